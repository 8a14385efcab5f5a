# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's scaled FP8 checkpoints: every tensor accounted for, weights and their scales, what is refused and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel as DiffusersTransformer
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file, save_file
from test_a14b_mapping import group_of

from omni_neuron_runtime import CheckpointError, get_weight_loader
from omni_neuron_wan22 import (
    Fp8Settings,
    TinyWan,
    WanCheckpoint,
    WanConfig,
    WanTransformer3DModel,
    load_transformer,
    make_scaled_fp8_checkpoint,
    make_tiny_checkpoint,
)
from omni_neuron_wan22.comfyui import FP8, ScaledFp8File, find_expert_file, take_inventory
from omni_neuron_wan22.fp8_loading import fp8_summary, prepare_loading
from omni_neuron_wan22.original_names import linear_weights, original_wan_names
from omni_neuron_wan22.row_mx import use_row_mx

MODULES = ("attn1", "attn2", "ffn")
Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def documented(config: WanConfig) -> Tensors:
    """The documented checkpoint of a configuration: dtype and shape by key."""
    with torch.device("meta"):
        shapes = {
            key: tuple(tensor.shape)
            for key, tensor in DiffusersTransformer(num_layers=config.num_layers).state_dict().items()
        }
    tensors: Tensors = {"scaled_fp8": (FP8, (0,))}
    linears = linear_weights(config)
    for key, name in original_wan_names(config).items():
        tensors[name] = (FP8 if key in linears else torch.float16, shapes[key])
        if key in linears:
            layer = name.removesuffix("weight")
            tensors |= {layer + kind: (torch.float32, ()) for kind in ("scale_weight", "scale_input")}
    return tensors


@pytest.fixture(scope="module")
def a14b() -> Tensors:
    return documented(WanConfig())


def test_the_documented_checkpoint_has_1908_tensors(a14b: Tensors) -> None:
    """407 in FP8, 812 in float32, 689 in float16: a marker and 406 weights, two scales of each, everything else."""
    assert Counter(dtype for dtype, _ in a14b.values()) == {FP8: 407, torch.float32: 812, torch.float16: 689}
    inventory = take_inventory(a14b, WanConfig())
    assert (len(inventory.keys), len(inventory.fp8), len(inventory.scales), inventory.linears) == (1095, 406, 406, 406)
    assert len(inventory.unused) == 407  # the marker and the scales of inputs
    assert len(a14b) == 1908 == len({*inventory.keys.values(), *inventory.scales.values(), *inventory.unused})


def test_original_names_are_those_that_diffusers_converts() -> None:
    config = WanConfig(num_layers=2)
    names = original_wan_names(config)
    converted = convert_wan_transformer_to_diffusers({name: name for name in names.values()})
    assert converted == names


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("row_mx", [(), MODULES], ids=["dequantised", "row_mx"])
def test_every_key_is_read_once_by_the_ranks_together(a14b: Tensors, size: int, row_mx: tuple[str, ...]) -> None:
    config = WanConfig()
    file = ScaledFp8File(Path("a14b"), config)
    inventory = take_inventory(a14b, config)
    vars(file).update(inventory=inventory, scales=dict.fromkeys(inventory.scales, 0.5))
    with torch.device("meta"):
        model = WanTransformer3DModel(config, group=group_of(size))
        use_row_mx(model, row_mx, native=False)
    summary = fp8_summary(model, file)
    assert (summary.row_mx_linears, summary.fp8_linears) == (400 if row_mx else 0, 406)
    if row_mx:  # the kernel's inner width: 13,824 / 4, and 13,824 / 8 filled up to a multiple of 128
        assert model.blocks[0].ffn.up.weight.shape == (1280, {4: 3456, 8: 1792}[size], 4)
    mapping, parameters = prepare_loading(model, file), dict(model.named_parameters())
    assert set(mapping) == set(parameters)
    used = Counter(key for keys in mapping.values() for key in ([keys] if isinstance(keys, str) else keys))
    assert set(used.values()) == {1}
    known = {*used, *inventory.unused, *inventory.scales.values()}
    assert known == set(a14b)
    assert sum(parameter.dtype == FP8 for parameter in parameters.values()) == 40 * 8 * bool(row_mx)
    for name, keys in mapping.items():
        slices = [Slice(*a14b[key]) for key in ([keys] if isinstance(keys, str) else keys)]
        for rank in range(size):
            shard = get_weight_loader(parameters[name]).load(slices, rank)
            assert shard.shape == parameters[name].shape, (name, rank)
        for part in slices:
            # A rank reads its slices only, or all of what every rank needs.
            assert part.elements_read in (part.numel, size * part.numel), (name, part.elements_read)


class Slice:
    """A safetensors slice without data: loaders see its shape and cut meta tensors out of it."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.elements_read = 0

    @property
    def numel(self) -> int:
        return self._tensor.numel()

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: object) -> torch.Tensor:
        part = self._tensor[index]  # type: ignore[index]
        self.elements_read += part.numel()
        return part


SMALL = WanConfig(num_layers=1)
Q = "blocks.0.self_attn.q"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q}.bias"), rf"1 missing: {Q}\.bias"),
        (lambda t: t.pop("scaled_fp8"), "1 missing: scaled_fp8"),
        (lambda t: t.update({"blocks.1.ffn.0.weight": (FP8, (1,))}), r"1 unexpected: blocks\.1\.ffn\.0\.weight"),
        (
            lambda t: t.update({f"{Q}.comfy_quant": (torch.uint8, (9,))}),
            f"1 unexpected: {Q}.comfy_quant; .*newer layout",
        ),
        (lambda t: t.pop(f"{Q}.scale_weight"), rf"1 missing scales of FP8 weights: {Q}\.scale_weight"),
        (
            lambda t: t.update({f"{Q}.scale_weight": (torch.float32, (5120,))}),
            rf"not one float32: {Q}\.scale_weight \(float32 \[5120\]\)",
        ),
        (lambda t: t.update({f"{Q}.scale_weight": (torch.float16, ())}), rf"{Q}\.scale_weight \(float16 \[\]\)"),
        (
            lambda t: t.update({f"{Q}.weight": (torch.float8_e5m2, (5120, 5120))}),
            rf"other than F8_E4M3 and F16, BF16, F32: {Q}\.weight \(float8_e5m2",
        ),
        (
            lambda t: t.update({"blocks.0.norm3.weight": (FP8, (5120,))}),
            r"other than F16, BF16, F32: blocks\.0\.norm3\.weight \(float8_e4m3fn",
        ),
        (lambda t: t.update({"scaled_fp8": (torch.float8_e5m2, (0,))}), r"another FP8 type than E4M3FN: scaled_fp8"),
        (
            lambda t: t.update({"model.diffusion_model.head.modulation": t["head.modulation"]}),
            r"duplicate, with and without prefix: .*head\.modulation",
        ),
        (
            lambda t: t.update({k: (torch.float16, v[1]) for k, v in t.items() if k.endswith(".weight")}),
            "no weight is FP8",
        ),
    ],
)
def test_what_is_wrong_is_named(change: Callable[[Tensors], Any], message: str) -> None:
    tensors = documented(SMALL)
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        take_inventory(tensors, SMALL)


def test_a_prefix_a_float32_marker_and_the_wish_for_no_fp8_matmul_are_understood() -> None:
    tensors = {f"model.diffusion_model.{key}": value for key, value in documented(SMALL).items()}
    tensors["model.diffusion_model.scaled_fp8"] = (torch.float32, (2,))
    inventory = take_inventory(tensors, SMALL)
    assert not inventory.fp8_matmul
    assert inventory.keys["scale_shift_table"] == "model.diffusion_model.head.modulation"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("wan") / "plain", TinyWan(num_layers=1, text_layers=1))


@pytest.fixture
def checkpoint(plain: Path, tmp_path: Path) -> WanCheckpoint:
    """Both experts quantised, into files that a test may change; every module dequantised."""
    folder = make_scaled_fp8_checkpoint(plain, tmp_path / "fp8")
    return WanCheckpoint(plain, Fp8Settings(folder, frozenset(MODULES)))


def with_row_mx(checkpoint: WanCheckpoint) -> WanCheckpoint:
    assert checkpoint.fp8 is not None
    return replace(checkpoint, fp8=replace(checkpoint.fp8, modules_to_not_convert=frozenset()))


def edit(checkpoint: WanCheckpoint, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of the high-noise expert's file."""
    path = checkpoint.fp8_file("transformer").path
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return path


def test_dequantised_weights_are_those_of_float32_within_fp8s_precision(plain: Path, checkpoint: WanCheckpoint) -> None:
    exact = load_transformer(WanCheckpoint(plain), "transformer", dtype=torch.float32).state_dict()
    loaded = load_transformer(checkpoint, "transformer", dtype=torch.float32).state_dict()
    file = checkpoint.fp8_file("transformer")
    source_of = {key: source for source, key in file.inventory.keys.items()}
    assert len(set(file.scales.values())) == len(file.scales) == 16
    for name, keys in file.mapping().items():
        sources = [source_of[key] for key in ([keys] if isinstance(keys, str) else keys)]
        parts = zip(sources, exact[name].chunk(len(sources)), loaded[name].chunk(len(sources)), strict=True)
        for source, wanted, found in parts:
            if source in file.scales:
                # Half a unit in the last of three bits, or half the smallest subnormal.
                bound = (wanted.abs() / 16).maximum(torch.tensor(file.scales[source] * 2.0**-10))
                assert not torch.equal(found, wanted), source
            else:
                bound = (wanted.abs() / 2048).maximum(torch.tensor(2.0**-25))  # float16's, likewise
            assert bool(((found - wanted).abs() <= bound * 1.0001).all()), source


def test_two_ranks_read_what_one_does(checkpoint: WanCheckpoint) -> None:
    whole, *halves = (
        load_transformer(checkpoint, "transformer", dtype=torch.float32, group=group).blocks[0]
        for group in (group_of(1), group_of(2, 0), group_of(2, 1))
    )
    qkv = [half.attn1.qkv.weight.unflatten(0, (3, -1)) for half in halves]
    assert torch.equal(torch.cat(qkv, 1).flatten(0, 1), whole.attn1.qkv.weight)
    assert torch.equal(torch.cat([half.ffn.down.weight for half in halves], 1), whole.ffn.down.weight)


def test_weights_that_stay_fp8_are_the_dequantised_ones(checkpoint: WanCheckpoint) -> None:
    """Unpacked and times their scales, bit for bit, on each of two ranks: those of queries, keys and values, too."""
    for rank in range(2):
        options = {"dtype": torch.float32, "group": group_of(2, rank)}
        plain = load_transformer(checkpoint, "transformer", **options).blocks[0]
        kept = load_transformer(with_row_mx(checkpoint), "transformer", **options).blocks[0]
        for name in ("attn1.qkv", "attn1.o", "attn2.q", "attn2.k", "attn2.v", "attn2.o", "ffn.up", "ffn.down"):
            weight, packed = plain.get_parameter(f"{name}.weight"), kept.get_parameter(f"{name}.weight")
            rows = packed.view(torch.uint8).permute(0, 2, 1).flatten(0, 1).view(FP8).float()
            scaled = (rows * kept.get_parameter(f"{name}.weight_scale")).t()
            assert torch.equal(scaled[:, : weight.shape[1]], weight), name
            assert not scaled[:, weight.shape[1] :].any()  # pads


def test_no_value_up_to_448_is_lost(checkpoint: WanCheckpoint) -> None:
    """Beyond 240, where the legacy E4M3 ends, too: multiplied out, and in the weights that stay FP8."""
    special = torch.tensor([448.0, -448.0, 256.0, 240.0, -240.0, 2.0**-9, -0.0, 0.0])
    key = "blocks.0.ffn.0"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors[f"{key}.weight"].float()
        weight[0, :8] = special
        tensors |= {f"{key}.weight": weight.to(FP8), f"{key}.scale_weight": torch.tensor(0.5)}

    edit(checkpoint, change)
    plain = load_transformer(checkpoint, "transformer", dtype=torch.float32).blocks[0].ffn.up.weight
    kept = load_transformer(with_row_mx(checkpoint), "transformer", dtype=torch.float32).blocks[0].ffn
    assert torch.equal(plain[0, :8], 0.5 * special)
    assert kept.up.weight.dtype == FP8
    # Rows 4p to 4p + 3 of a column lie side by side.
    assert torch.equal(kept.up.weight[:2, 0].flatten().float(), special)
    assert bool((kept.up.weight_scale == 0.5).all())


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("row_mx", [False, True])
def test_nan_is_refused_by_name(checkpoint: WanCheckpoint, byte: int, row_mx: bool) -> None:
    key = "blocks.0.self_attn.v.weight"
    edit(checkpoint, lambda tensors: tensors[key].view(torch.uint8)[3].fill_(byte))
    chosen = with_row_mx(checkpoint) if row_mx else checkpoint
    with pytest.raises(CheckpointError, match=rf"parameter 'blocks.0.attn1.qkv.weight' .*{key} holds 128 NaN"):
        load_transformer(chosen, "transformer", dtype=torch.float32)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_cannot_be_are_refused_before_loading(checkpoint: WanCheckpoint, value: float) -> None:
    key = f"{Q}.scale_weight"
    path = edit(checkpoint, lambda tensors: tensors.update({key: torch.tensor(value)}))
    with pytest.raises(CheckpointError, match=rf"{path.name}: scales .* positive: {key} = {value}"):
        checkpoint.check()


def test_other_files_are_refused_before_loading(checkpoint: WanCheckpoint, tmp_path: Path) -> None:
    assert checkpoint.fp8 is not None
    checkpoint.check()
    high, low = (checkpoint.fp8_file(expert).path for expert in ("transformer", "transformer_2"))
    spare = high.rename(tmp_path / "spare.safetensors")
    with pytest.raises(CheckpointError, match=r"high-noise expert, .*'high' .* 0 are there; it holds wan2.2_t2v_low"):
        checkpoint.check()
    low.rename(high)
    spare.rename(low)
    with pytest.raises(CheckpointError, match=r"high.*: these are the weights of .*transformer_2.* swapped"):
        checkpoint.check()
    low.rename(high)
    edit(checkpoint, lambda tensors: tensors.update({"head.head.bias": torch.zeros(65, dtype=torch.float16)}))
    with pytest.raises(CheckpointError, match=r"high.*: head.head.bias \[65\] does not fit proj_out.bias \[64\]"):
        checkpoint.check()


def test_a_file_that_is_not_meant_for_fp8_matmuls(checkpoint: WanCheckpoint, caplog: pytest.LogCaptureFixture) -> None:
    edit(checkpoint, lambda tensors: tensors.update(scaled_fp8=torch.zeros(2).to(FP8)))
    checkpoint.check()
    assert not caplog.records
    with_row_mx(checkpoint).check()
    assert "no FP8 matmul is meant for it; attn1, attn2, ffn are computed so, as the settings have it" in caplog.text


def test_layers_that_were_left_alone(plain: Path, tmp_path: Path) -> None:
    """In embeddings and output that changes nothing but the weights; in a module that stays FP8 it is refused."""
    folder = make_scaled_fp8_checkpoint(
        plain, tmp_path, prefix="model.diffusion_model.", blocks_only=True, scale_input=False
    )
    checkpoint = WanCheckpoint(plain, Fp8Settings(folder))
    checkpoint.check()
    summary = fp8_summary(
        load_transformer(checkpoint, "transformer", dtype=torch.bfloat16), checkpoint.fp8_file("transformer")
    )
    assert (summary.linears, summary.fp8_linears, summary.row_mx_linears) == (16, 10, 10)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        key = "model.diffusion_model.blocks.0.ffn.2"
        tensors[f"{key}.weight"] = tensors[f"{key}.weight"].to(torch.bfloat16) * tensors.pop(f"{key}.scale_weight")

    edit(checkpoint, change)
    with pytest.raises(CheckpointError, match=r"1 weights .*blocks.0.ffn.2.weight; put ffn into modules_to_not_conv"):
        checkpoint.check()
    mixed = replace(checkpoint, fp8=Fp8Settings(folder, frozenset(["ffn"])))
    mixed.check()
    loaded = load_transformer(mixed, "transformer", dtype=torch.float32)
    exact = load_transformer(WanCheckpoint(plain), "transformer", dtype=torch.float32)
    for name in ("ffn.up.weight", "ffn.down.weight"):
        expected = exact.blocks[0].get_parameter(name)
        assert torch.allclose(loaded.blocks[0].get_parameter(name), expected, rtol=0.07, atol=1e-3)


@pytest.mark.parametrize("task", ["i2v", "ti2v"])
def test_other_models_have_the_same_layout(task: Any, tmp_path: Path) -> None:
    """Image-to-video in two files, TI2V-5B in one."""
    plain = make_tiny_checkpoint(tmp_path / "plain", TinyWan(num_layers=1, text_layers=1, task=task))
    checkpoint = WanCheckpoint(plain, Fp8Settings(make_scaled_fp8_checkpoint(plain, tmp_path / "fp8")))
    checkpoint.check()
    summary = fp8_summary(
        load_transformer(checkpoint, "transformer", dtype=torch.bfloat16), checkpoint.fp8_file("transformer")
    )
    assert (summary.fp8_linears, summary.row_mx_linears) == (16, 10)


def test_which_file_is_whose(tmp_path: Path) -> None:
    def touch(*names: str) -> None:
        for name in names:
            (tmp_path / f"{name}.safetensors").touch()

    def found(noise: Any, image_to_video: bool) -> str:
        return find_expert_file(tmp_path, noise, image_to_video=image_to_video).stem

    with pytest.raises(CheckpointError, match="it holds no"):
        found(None, False)
    touch("wan2.2_t2v_high_noise_14B_fp8_scaled", "Wan2_2-T2V-A14B-LOW_fp8_e4m3fn_scaled_KJ")
    assert found("high", False) == "wan2.2_t2v_high_noise_14B_fp8_scaled"
    assert found("low", False) == "Wan2_2-T2V-A14B-LOW_fp8_e4m3fn_scaled_KJ"
    touch("wan2.2_i2v_high_noise_14B_fp8_scaled", "wan2.2_t2v_high_noise_14B_fp16")
    assert found("high", False) == "wan2.2_t2v_high_noise_14B_fp8_scaled"
    assert found("high", True) == "wan2.2_i2v_high_noise_14B_fp8_scaled"
    touch("wan2.2_t2v_high_noise_copy_fp8_scaled")
    with pytest.raises(CheckpointError, match="2 are there"):
        found("high", False)
    file = tmp_path / "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors"
    assert find_expert_file(file, None, image_to_video=False) == file
    with pytest.raises(CheckpointError, match="is one file, and this model has two experts"):
        find_expert_file(file, "high", image_to_video=False)
    with pytest.raises(CheckpointError, match="no folder or file on this machine"):
        find_expert_file(tmp_path / "none", "high", image_to_video=False)
