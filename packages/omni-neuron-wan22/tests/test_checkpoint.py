# SPDX-License-Identifier: Apache-2.0
"""Damaged or unsuitable checkpoints and engine settings, refused from headers and configurations before any loading."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from omni_neuron_runtime import CheckpointError
from omni_neuron_wan22 import (
    RequestError,
    TinyWan,
    WanCheckpoint,
    WanConfigError,
    load_transformer,
    make_tiny_checkpoint,
)
from omni_neuron_wan22.pipeline import NeuronWanPipeline, get_neuron_wan22_pre_process_func
from vllm_omni_neuron.sdk import check_engine_config


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One weights file a component."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("wan") / "plain", TinyWan(num_layers=1, text_layers=1))


@pytest.fixture
def checkpoint(plain: Path, tmp_path: Path) -> WanCheckpoint:
    """A copy to damage."""
    return WanCheckpoint(Path(shutil.copytree(plain, tmp_path / "model")))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def weights_of(checkpoint: WanCheckpoint, component: str) -> Path:
    [path] = (checkpoint.path / component).glob("*.safetensors")
    return path


def test_a_good_checkpoint_passes(checkpoint: WanCheckpoint) -> None:
    for size in (1, 2, 4):
        checkpoint.check(tensor_parallel_size=size)


@pytest.mark.parametrize("component", ["vae", "text_encoder", "tokenizer", "transformer", "transformer_2"])
def test_missing_component(checkpoint: WanCheckpoint, component: str) -> None:
    shutil.rmtree(checkpoint.path / component)
    with pytest.raises(WanConfigError, match=rf"no folder {component}; a checkpoint of this model has transformer, "):
        checkpoint.check()


@pytest.mark.parametrize("component", ["vae", "text_encoder", "transformer_2"])
def test_truncated_file(checkpoint: WanCheckpoint, component: str) -> None:
    path = weights_of(checkpoint, component)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=path.name):
        checkpoint.check()


def test_wrong_shape_of_one_tensor(checkpoint: WanCheckpoint) -> None:
    key = "blocks.0.ffn.net.0.proj.weight"
    edit_weights(weights_of(checkpoint, "transformer"), lambda t: t.update({key: t[key][:-1].contiguous()}))
    with pytest.raises(CheckpointError, match=rf"{key} \[255, 128\] does not fit .* \[256, 128\]"):
        checkpoint.check()


def test_a_short_tensor_is_not_taken_for_one_that_needs_padding(checkpoint: WanCheckpoint) -> None:
    """The loader itself refuses it too, where nobody ran `check` before."""
    key = "blocks.0.ffn.net.0.proj.weight"
    edit_weights(weights_of(checkpoint, "transformer"), lambda t: t.update({key: t[key][:-1].contiguous()}))
    with pytest.raises(CheckpointError, match=r"holds 255, expected 256"):
        load_transformer(checkpoint, "transformer", dtype=torch.float32)


def test_missing_tensor(checkpoint: WanCheckpoint) -> None:
    key = "blocks.0.attn1.to_k.weight"
    edit_weights(weights_of(checkpoint, "transformer"), lambda tensors: tensors.pop(key))
    with pytest.raises(CheckpointError, match=rf"missing 1 tensor\(s\): {key}"):
        checkpoint.check()


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("model_index.json", {"_class_name": "WanVACEPipeline"}, "runs WanPipeline, WanImageToVideoPipeline"),
        ("model_index.json", {"_class_name": "WanImageToVideoPipeline"}, "the in_channels .* are those of WanPipeline"),
        ("model_index.json", {"expand_timesteps": True}, "transformer_2 is listed; TI2V-5B has one expert"),
        ("transformer/config.json", {"in_channels": 36}, "are those of WanImageToVideoPipeline"),
        ("transformer_2/config.json", {"in_channels": 36}, "in_channels = 36 but the VAE has z_dim = 16, .* 16"),
        ("transformer_2/config.json", {"in_channels": 8, "out_channels": 8}, "out_channels = 8 but the VAE has z_dim"),
        ("transformer/config.json", {"image_dim": 8}, "added_kv_proj_dim = None: .* has both"),
        ("transformer_2/config.json", {"text_dim": 65}, "text_dim = 65 but the text encoder has d_model = 64"),
        ("vae/config.json", {"patch_size": 2}, "scale_factor_spatial = 8: .* make it 16"),
        ("vae/config.json", {"latents_std": [1.0]}, "latents_std has 1 values, z_dim is 16"),
    ],
)
def test_other_models_are_refused(checkpoint: WanCheckpoint, file: str, changes: dict[str, Any], message: str) -> None:
    edit_json(checkpoint.path / file, **changes)
    with pytest.raises(WanConfigError, match=message):
        checkpoint.check()


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(WanConfigError, match="is not a folder"):
        WanCheckpoint(tmp_path / "nothing").check()
    with pytest.raises(WanConfigError, match=r"model_index.json is missing"):
        WanCheckpoint(tmp_path).check()


def test_one_expert(tmp_path: Path) -> None:
    checkpoint = WanCheckpoint(make_tiny_checkpoint(tmp_path, TinyWan(experts=1, num_layers=1)))
    checkpoint.check()
    assert checkpoint.experts_in_use(0.875) == ("transformer",)


def test_image_models_are_what_they_should_be(tmp_path: Path) -> None:
    i2v = WanCheckpoint(make_tiny_checkpoint(tmp_path / "i2v", TinyWan(task="i2v", num_layers=1, image_dim=8)))
    i2v.check()
    assert (i2v.task, i2v.encodes_images, i2v.boundary_ratio) == ("i2v", True, 0.9)
    shutil.rmtree(i2v.path / "image_processor")
    with pytest.raises(WanConfigError, match="no folder image_processor"):
        i2v.check()
    ti2v = WanCheckpoint(make_tiny_checkpoint(tmp_path / "ti2v", TinyWan(task="ti2v", num_layers=1)))
    ti2v.check()
    assert (ti2v.task, ti2v.experts, ti2v.boundary_ratio) == ("ti2v", ("transformer",), None)


def test_boundary_decides_which_experts_are_needed(checkpoint: WanCheckpoint) -> None:
    assert checkpoint.experts_in_use(None) == checkpoint.experts_in_use(0.875) == ("transformer", "transformer_2")
    assert checkpoint.experts_in_use(1.0) == ("transformer_2",)
    assert checkpoint.experts_in_use(0.0) == ("transformer",)


WIDTH = "spatial_shard_width"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel_config": {"tensor_parallel_size": 3}}, r"tensor_parallel_size = 3: .*4 attention heads.*1, 2, 4$"),
        ({"parallel_config": {"ulysses_degree": 2}}, "ulysses_degree = 2: .* ring_degree = 2$"),
        ({"parallel_config": {"cfg_parallel_size": 3}}, "cfg_parallel_size = 3: .*2 branches.* valid sizes are 1, 2$"),
        ({"parallel_config": {"tensor_parallel_size": 2, "vae_patch_parallel_size": 4}}, "vae_patch.* 4.* 1, 2"),
        (
            {"parallel_config": {"ring_degree": 2, "vae_patch_parallel_size": 2, "vae_parallel_mode": WIDTH}},
            f"vae_parallel_mode = '{WIDTH}': the valid value is 'tile'",
        ),
        ({"model_config": {"quantization": "fp8_row_mx"}}, "quantization = 'fp8_row_mx'"),
        ({"additional_config": {"context_method": "Ring"}}, "context_method = 'Ring': valid .* auto, gather, ring$"),
        ({"dtype": "float16"}, "dtype = torch.float16: valid values are bfloat16 and float32"),
        ({"enable_layerwise_offload": True}, "enable_layerwise_offload = True"),
        ({"cache_backend": "tea_cache"}, "cache_backend = 'tea_cache': valid are none, cache_dit"),
    ],
)
def test_engine_settings_that_this_version_lacks(plain: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(WanConfigError, match=message):
        check_engine_config(
            OmniDiffusionConfig(model=str(plain), **{"dtype": "float32", **settings}), NeuronWanPipeline
        )


def pre_process(
    model: Path, boundary: float | None, parallel: dict[str, int] | None = None, **settings: Any
) -> OmniDiffusionRequest:
    """What the engine's process makes of a request before any worker sees it."""
    engine = OmniDiffusionConfig(
        model=str(model), dtype="float32", boundary_ratio=boundary, parallel_config=parallel or {}
    )
    sampling = OmniDiffusionSamplingParams(**settings)
    request = OmniDiffusionRequest(prompt="a cat", sampling_params=sampling, request_id="test")
    return get_neuron_wan22_pre_process_func(engine)(request)


def test_a_request_for_an_expert_that_is_not_loaded(plain: Path) -> None:
    pre_process(plain, 1.0, extra_args={"sample_solver": "euler"})
    with pytest.raises(RequestError, match=r"boundary_ratio = 0.875 needs transformer, .*boundary_ratio = 1.0"):
        pre_process(plain, 1.0, boundary_ratio=0.875)
    with pytest.raises(RequestError, match=r"boundary_ratio = 0.5 needs transformer_2, .*boundary_ratio = 0.0"):
        pre_process(plain, 0.0, boundary_ratio=0.5)


def test_a_video_with_fewer_tokens_than_context_parallel_ranks(plain: Path) -> None:
    size = {"height": 32, "width": 32, "num_frames": 5}
    pre_process(plain, None, {"ring_degree": 8}, **size)
    with pytest.raises(RequestError, match=r"height 32, width 32 and 5 frames: .*cp = 16 .*8 tokens.* 1 to 8"):
        pre_process(plain, None, {"ring_degree": 16}, **size)


def test_pre_processing_writes_back_what_will_be_made(plain: Path) -> None:
    generator = torch.Generator()
    settings = {"height": 70, "num_frames": 6, "output_type": "LATENT", "extra_args": {"_sources": "a client's"}}
    params = pre_process(plain, None, generator=[generator], **settings).sampling_params
    assert (params.height, params.width, params.num_frames, params.output_type) == (64, 832, 5, "latent")
    assert (params.extra_args["_sources"]["height"], params.extra_args["_sources"]["width"]) == ("request", "default")
    assert params.generator == [generator]
    assert settings["extra_args"] == {"_sources": "a client's"}  # the caller's own objects stay as they are
    with pytest.raises(RequestError, match="2 generators"):
        pre_process(plain, None, generator=[generator, generator])
