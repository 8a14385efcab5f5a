# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: diffusers' values, the base back bit for bit, every way to write one, and none that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel as DiffusersTransformer
from lora_ranks import digests, manager_of, predictions, request_of, with_two_adapters
from safetensors.torch import save_file
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.errors import OmniClientError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.lora.request import LoRARequest
from wan22_reference import dit_inputs, on_ranks, relative_l2

from omni_neuron_parallel import RankPool
from omni_neuron_wan22 import WanCheckpoint
from omni_neuron_wan22.lora_adapter import LoraError, read_adapter
from omni_neuron_wan22.pipeline import get_neuron_wan22_pre_process_func

RANK, ALPHA = 3, 6.0
SIZES = {"attn": (128, 128), "ffn.net.0.proj": (256, 128), "ffn.net.2": (128, 256)}
LAYERS = (
    "blocks.0.attn1.to_q",
    "blocks.0.attn1.to_v",
    "blocks.0.attn1.to_out.0",
    "blocks.0.attn2.to_k",
    "blocks.1.attn2.to_q",
    "blocks.1.ffn.net.0.proj",
    "blocks.1.ffn.net.2",
)
Tensors = dict[str, torch.Tensor]


def size_of(layer: str) -> tuple[int, int]:
    return next(size for part, size in SIZES.items() if part in layer)


def adapter(seed: int, layers: tuple[str, ...] = LAYERS) -> Tensors:
    """An adapter of rank 3 in diffusers' names, large enough to see."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in layers:
        rows, columns = size_of(layer)
        tensors[f"{layer}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * 0.2
        tensors[f"{layer}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * 0.2
    return tensors


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    return {prefix + key: tensor for key, tensor in tensors.items()}


def alphas(layers: tuple[str, ...] = LAYERS) -> Tensors:
    return {f"{layer}.alpha": torch.tensor(ALPHA) for layer in layers}


def write(path: Path, tensors: Tensors) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    return str(path)


@pytest.mark.parametrize("pool", [1, 2], indirect=True, ids=["tp1", "tp2"])
def test_values_are_those_of_diffusers_and_the_base_comes_back(
    tiny: Path, tmp_path: Path, pool: RankPool | None
) -> None:
    first = adapter(1)
    second = {**adapter(2, LAYERS[-1:]), f"{LAYERS[-1]}.lora_B.bias": torch.ones(128)}
    paths = [
        write(tmp_path / "first.safetensors", prefixed(first | alphas(), "transformer_2.")),
        write(tmp_path / "second.safetensors", prefixed(second, "transformer_2.")),
    ]
    expected = []
    for tensors, scale in ((first, ALPHA / RANK), (first, 0.5 * ALPHA / RANK), (second, 1.0)):
        reference = DiffusersTransformer.from_pretrained(tiny / "transformer_2")
        layers = {key: scale * tensor if "lora_B" in key else tensor for key, tensor in tensors.items()}
        reference.load_lora_adapter(layers, prefix=None)
        expected.append(reference(**dit_inputs(), return_dict=False)[0])
    for results, restored in on_ranks(pool, with_two_adapters, str(tiny), *paths):
        for actual, wanted in zip(results, expected, strict=True):
            assert relative_l2(actual, wanted) <= 1e-5
        assert restored


def original(tensors: Tensors) -> Tensors:
    """In the original Wan code's names."""
    parts = {"attn1": "self_attn", "attn2": "cross_attn", "to_out.0": "o", "net.0.proj": "0", "net.2": "2"}
    parts |= {f"to_{name}": name for name in "qkv"} | {"lora_A": "lora_down", "lora_B": "lora_up"}
    renamed = {}
    for key, tensor in tensors.items():
        for ours, theirs in parts.items():
            key = key.replace(f".{ours}.", f".{theirs}.")
        renamed[key] = tensor
    return renamed


def kohya(tensors: Tensors) -> Tensors:
    """In the names of kohya's trainers."""
    renamed = {}
    for key, tensor in original(tensors).items():
        layer, kind = key.split(".lora_")[0].removesuffix(".alpha"), key[key.rfind(".lora_") :]
        renamed[f"lora_unet_{layer.replace('.', '_')}{kind if '.lora_' in key else '.alpha'}"] = tensor
    return renamed


def test_every_way_to_write_an_adapter_is_the_same(tiny: Path, tmp_path: Path) -> None:
    checkpoint = WanCheckpoint(tiny)
    high, low = adapter(1), adapter(2)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}

    def peft(folder: Path) -> Path:
        both = prefixed(high, "base_model.model.transformer.") | prefixed(low, "base_model.model.transformer_2.")
        write(folder / "adapter_model.safetensors", both)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    def two_files(folder: Path, spell: Any, prefix: str) -> Path:
        # diffusers writes `transformer.` into the low-noise expert's own file, too.
        for name, tensors in (("high_noise", high), ("low_noise", low)):
            write(folder / f"wan22_{name}.safetensors", prefixed(spell(tensors | alphas()), prefix))
        return folder

    def two_folders(folder: Path) -> Path:
        for expert, tensors in (("transformer", high), ("transformer_2", low)):
            save_file(
                prefixed(tensors, "transformer."),
                (folder / expert).mkdir(parents=True) or folder / expert / "pytorch_lora_weights.safetensors",
                {"lora_adapter_metadata": json.dumps({"transformer.r": RANK, "transformer.lora_alpha": ALPHA})},
            )
        return folder

    written = [
        peft(tmp_path / "peft"),
        two_files(tmp_path / "diffusers", dict, "transformer."),
        two_files(tmp_path / "original", original, "diffusion_model."),
        two_files(tmp_path / "kohya", kohya, ""),
        two_folders(tmp_path / "folders"),
    ]
    for path in written:
        changes = read_adapter(path, checkpoint)
        for expert, tensors in (("transformer", high), ("transformer_2", low)):
            assert set(changes[expert]) == {f"{layer}.weight" for layer in LAYERS}, path  # type: ignore[index]
            for layer in LAYERS:
                up, down = tensors[f"{layer}.lora_B.weight"], tensors[f"{layer}.lora_A.weight"]
                actual = changes[expert][f"{layer}.weight"].read()[:]  # type: ignore[index]
                torch.testing.assert_close(actual, ALPHA / RANK * up @ down)


def test_an_adapter_reaches_the_experts_that_it_names(tiny: Path, tmp_path: Path) -> None:
    manager = manager_of(tiny)
    base = predictions(manager)
    for number, (prefix, changed) in enumerate(
        [("transformer_2.", [False, True]), ("transformer.", [True, False]), ("", [True, True])], 1
    ):
        path = write(tmp_path / f"{number}.safetensors", prefixed(adapter(1), prefix))
        manager.set_active_adapter(request_of(path, number))
        now = predictions(manager)
        assert [not torch.equal(*pair) for pair in zip(now, base, strict=True)] == changed
    assert manager.merged() == {"name": "adapter 3", "scale": 1.0}
    # One place: the adapters before it are gone, and a pinned one keeps it.
    assert manager.list_adapters() == [3]
    assert manager.pin_adapter(3)
    with pytest.raises(LoraError, match="all 1 places are taken by pinned adapters"):
        manager.add_adapter(request_of(path, 4))
    assert manager.remove_adapter(3)
    assert not manager.remove_adapter(3)
    assert manager.merged() is None
    assert all(torch.equal(*pair) for pair in zip(predictions(manager), base, strict=True))


Q, LAST = LAYERS[0], LAYERS[-1]
BAD = {
    "unknown layer": (
        {f"blocks.0.attn1.to_x.{kind}.weight": torch.ones(3, 128) for kind in ("lora_A", "lora_B")},
        r"transformer has no layer 'blocks.0.attn1.to_x' .*nearest: blocks.0.attn1.to_",
    ),
    "block that is not there": (
        {key.replace("blocks.1", "blocks.7"): value for key, value in adapter(1, (LAST,)).items()},
        r"has no layer 'blocks.7.ffn.net.2'",
    ),
    "ranks differ": (
        adapter(1, (Q,)) | {f"{Q}.lora_B.weight": torch.ones(128, 4)},
        r"to_q.lora_B.weight \[128, 4\] and .* differ in rank: 4 and 3",
    ),
    "shape": (
        adapter(1, (Q,)) | {f"{Q}.lora_A.weight": torch.ones(RANK, 96)},
        r"makes \[128, 96\], but blocks.0.attn1.to_q.weight is \[128, 128\]",
    ),
    "half": ({f"{Q}.lora_A.weight": torch.ones(RANK, 128)}, "has no lora_B beside it"),
    "no key of a layer": ({"optimizer.step": torch.ones(1)}, "'optimizer.step' is no key of a LoRA layer"),
    "DoRA": (adapter(1, (Q,)) | {f"{Q}.dora_scale": torch.ones(128)}, r"to_q.dora_scale' is no key of a LoRA layer"),
    "bias": ({f"{Q}.diff_b": torch.ones(64)}, r"diff_b has shape \[64\], .*to_q.bias \[128\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_adapter_that_does_not_fit_is_named(tiny: Path, tmp_path: Path, case: str) -> None:
    tensors, message = BAD[case]
    path = write(tmp_path / "bad.safetensors", tensors)
    with pytest.raises(LoraError, match=message):
        read_adapter(path, WanCheckpoint(tiny))


def test_a_bad_adapter_is_the_clients_error_and_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.safetensors", BAD["shape"][0])
    manager = manager_of(tiny)
    manager.set_active_adapter(request_of(write(tmp_path / "good.safetensors", adapter(1))))
    before = digests(manager)
    with pytest.raises(LoraError, match="makes"):
        manager.set_active_adapter(request_of(bad, 2))
    assert digests(manager) == before
    assert manager.list_adapters() == [1]

    pre_process = get_neuron_wan22_pre_process_func(OmniDiffusionConfig(model=str(tiny), dtype=torch.float32))
    for path, message in ((bad, "makes"), (str(tmp_path / "none"), "no such file or folder")):
        parameters = OmniDiffusionSamplingParams(seed=1, lora_request=LoRARequest("adapter", 1, path))
        with pytest.raises(OmniClientError, match=message):
            pre_process(OmniDiffusionRequest(prompt="a cat", sampling_params=parameters, request_id="1"))
