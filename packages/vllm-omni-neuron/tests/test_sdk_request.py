# SPDX-License-Identifier: Apache-2.0
"""What the SDK makes of an engine's configuration and of requests, by a model's spec and rules."""

from __future__ import annotations

import dataclasses
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.errors import OmniClientError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.lora.request import LoRARequest

from vllm_omni_neuron import shared_memory
from vllm_omni_neuron.sdk import (
    FEATURES,
    ComponentSpec,
    EngineHooks,
    GenerationRequest,
    ModelConfigError,
    ModelSpec,
    RequestError,
    RequestRules,
    Setting,
    check_choice,
    check_compiled_ring,
    check_engine_config,
    check_guidance_scale,
    check_number,
    check_positive,
    resolve_request,
)


@dataclass(frozen=True, kw_only=True)
class DrawingRequest(GenerationRequest):
    guidance_scale_2: float
    strength: float
    style: str
    layers: int


DRAWING = RequestRules(
    height=64,
    width=96,
    num_inference_steps=8,
    guidance_scale=5.0,
    max_sequence_length=16,
    spatial_stride=16,
    settings=(
        Setting("guidance_scale_2", None, check_guidance_scale, follows="guidance_scale"),
        Setting("strength", 0.5, functools.partial(check_number, needed="0 to 1", at_least=0, at_most=1), checkpoint=1),
        Setting("style", "ink", functools.partial(check_choice, choices=("ink", "chalk")), engine="chalk"),
        Setting("layers", 3, check_positive),
    ),
    request_class=DrawingRequest,
)
FILM = RequestRules(
    height=64,
    width=96,
    num_inference_steps=8,
    guidance_scale=5.0,
    max_sequence_length=16,
    spatial_stride=8,
    temporal_stride=8,
    num_frames=17,
    fps=12,
)


def request_of(prompt: Any = "a cat", **settings: Any) -> OmniDiffusionRequest:
    # As the engine makes it: the request object marks which guidance scales the caller gave.
    params = OmniDiffusionSamplingParams(**settings)
    return OmniDiffusionRequest(prompt=prompt, sampling_params=params, request_id="test")


def resolve(rules: RequestRules, prompt: Any = "a cat", **settings: Any) -> Any:
    request = request_of(prompt, **settings)
    return resolve_request(request.prompt, request.sampling_params, rules)


def test_an_image_model_has_one_frame_and_no_frame_rate() -> None:
    request = resolve(DRAWING, height=100, extra_args={"layers": 7})
    assert isinstance(request, DrawingRequest)
    assert (request.height, request.width, request.num_frames, request.output_type) == (96, 96, 1, "pil")
    assert not {"num_frames", "fps"} & set(request.sources)
    with pytest.raises(RequestError, match="num_frames = 5: this model makes images"):
        resolve(DRAWING, num_frames=5)


def test_settings_of_the_models_own_are_looked_up_in_order() -> None:
    request = resolve(DRAWING, extra_args={"layers": 7})
    assert (request.guidance_scale_2, request.strength, request.style, request.layers) == (5.0, 1.0, "chalk", 7)
    sources = {setting.name: request.sources[setting.name] for setting in DRAWING.settings}
    assert sources == {
        "guidance_scale_2": "guidance_scale",
        "strength": "checkpoint",
        "style": "engine",
        "layers": "request",
    }
    given = resolve(DRAWING, strength=0.25, guidance_scale_2=1.5, extra_args={"style": "INK"})
    assert (given.strength, given.guidance_scale_2, given.style) == (0.25, 1.5, "ink")
    assert resolve(DRAWING, layers=7).layers == 7
    assert resolve(DRAWING, layers=4).sources["layers"] == "default"  # 4 is vLLM-Omni's own
    with pytest.raises(ValueError, match="GenerationRequest has no field strength, style, which settings names"):
        dataclasses.replace(DRAWING, settings=DRAWING.settings[1:3], request_class=GenerationRequest)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strength": 1.5}, "strength = 1.5: 0 to 1 is needed"),
        ({"strength": -0.1}, "strength = -0.1"),
        ({"extra_args": {"style": "oil"}}, "style = 'oil': valid values are ink, chalk"),
        ({"extra_args": {"layers": True}}, "layers = True: a whole number of at least 1"),
        ({"guidance_scale_2": -1.0}, r"guidance_scale_2 = -1.0: a number of at least 0"),
        ({"guidance_scale": float("nan")}, "guidance_scale = nan"),
        ({"height": 15}, "height = 15: the smallest size is 16 pixels"),
        ({"generator_device": "neuron:0"}, "generator_device = 'neuron:0': valid values are cpu"),
        ({"output_type": "gif"}, "output_type = 'gif': valid values are np, pt, pil, latent"),
        (
            {"prompt": {"prompt": "x", "multi_modal_data": {"image": object()}}},
            "this model makes images from text only",
        ),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        resolve(DRAWING, **settings)


def test_a_name_that_nothing_reads_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolve(DRAWING, extra_args={"style": "ink", "stile": "oil", "num_frames": 3})
        resolve(DRAWING, extra_args={"stile": "oil", "_sources": {}})  # resolved before
    [record] = caplog.records
    assert "extra_args has stile, num_frames, which nothing here reads; valid are guidance_scale, " in record.message


@pytest.mark.parametrize(("stride", "asked", "made"), [(8, 20, 17), (8, 17, 17), (4, 4, 5), (1, 6, 6)])
def test_frames_fit_the_temporal_stride(stride: int, asked: int, made: int, caplog: pytest.LogCaptureFixture) -> None:
    rules = dataclasses.replace(FILM, temporal_stride=stride)
    with caplog.at_level(logging.WARNING):
        assert resolve(rules, num_frames=asked).num_frames == made
    assert len(caplog.records) == (asked != made)
    assert resolve(rules).num_frames == 17


SPEC = ModelSpec(
    architecture="DrawingPipeline",
    title="Drawing",
    output="image",
    components=(ComponentSpec("transformer", "transformer", axes=("tp", "cp")),),
    axes={"tp": None, "cp": 4, "vae_patch": 2},
    features=dict.fromkeys(FEATURES, "it is a drawing"),
    dtypes=("float32",),
)


class Drawing(EngineHooks):
    """Supports nothing and splits 24 tokens."""

    spec: ClassVar[ModelSpec] = SPEC

    @classmethod
    def check_engine(cls, od_config: Any, checkpoint: Any) -> None:
        if od_config.flow_shift:
            raise ModelConfigError("flow_shift: the hook was asked")

    @classmethod
    def request_rules(cls, od_config: Any, checkpoint: Any) -> RequestRules:
        return DRAWING

    @classmethod
    def check_request(cls, request: Any, checkpoint: Any, od_config: Any) -> None:
        if request.layers > 8:
            raise RequestError(f"layers = {request.layers}: {checkpoint.path.name} has 8")

    @classmethod
    def num_tokens(cls, request: Any, checkpoint: Any) -> int:
        return request.height * request.width // 256


class Able(Drawing):
    """Supports everything."""

    spec = dataclasses.replace(
        SPEC, features=dict.fromkeys(FEATURES, True), axes={"tp": None, "sp": None, "cp": None, "cfg": 2}
    )

    @classmethod
    def check_lora(cls, path: str, checkpoint: Any) -> None:
        raise ValueError(f"{path} is no adapter")


def config(folder: Path, **settings: Any) -> OmniDiffusionConfig:
    return OmniDiffusionConfig(model=str(folder), **{"dtype": "float32", **settings})


REASON = "not supported by Drawing: it is a drawing; leave it unset"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype = torch.bfloat16: valid values are float32"),
        ({"parallel_config": {"cfg_parallel_size": 2}}, "cfg_parallel_size = 2: the valid size for Drawing is 1$"),
        ({"parallel_config": {"ring_degree": 8}}, "ring_degree = 8: the valid size for Drawing is 1 to 4$"),
        ({"parallel_config": {"ulysses_degree": 2}}, "ulysses_degree = 2: .* ring_degree = 2$"),
        ({"model_config": {"tp_sequence_parallel": True}}, "tp_sequence_parallel: Drawing does not split"),
        ({"enable_cpu_offload": True}, f"enable_cpu_offload = True: {REASON}"),
        ({"vae_use_tiling": True}, f"vae_use_tiling = True: {REASON}"),
        ({"cache_backend": "cache_dit"}, f"cache_backend = 'cache_dit': {REASON}"),
        ({"cache_backend": "tea_cache"}, "cache_backend = 'tea_cache': valid are none$"),
        ({"lora_path": "adapter"}, f"lora_path = 'adapter': {REASON}"),
        ({"quantization_config": "fp8"}, "quantization_config = .*has none of its own: it is a drawing"),
        ({"model_config": {"quantization": "mxfp4"}}, f"quantization = 'mxfp4': {REASON}"),
        ({"additional_config": {"context_method": "ring"}}, f"context_method = 'ring': {REASON}"),
        ({"additional_config": {"context_method": "Ring"}}, "context_method = 'Ring': valid values are auto, gather"),
        ({"additional_config": {"warmup_shapes": [{"height": 8}]}}, f"warmup_shapes = .*: {REASON}"),
        ({"enable_sleep_mode": True}, f"enable_sleep_mode = True: {REASON}"),
        ({"flow_shift": 3.0}, "flow_shift: the hook was asked"),
    ],
)
def test_what_the_spec_lacks_is_refused_with_its_reason(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        check_engine_config(config(tmp_path, **settings), Drawing)


def test_compilation_is_refused_where_the_platform_would_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_omni_neuron.sdk import engine_checks

    # No platform's backend is made ready for this: that starts the device, in a process that has no core.
    platform = engine_checks.runtime.seam
    monkeypatch.setattr(platform, "register_lite_backend", lambda: pytest.fail("registered by a check"))
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE")
    with pytest.raises(ModelConfigError, match=r"compilation with 'neuron_native' \(enforce_eager = True .* a draw"):
        check_engine_config(config(tmp_path), Drawing)
    check_engine_config(config(tmp_path, enforce_eager=True), Drawing)
    check_engine_config(config(tmp_path), Able)


def test_a_ring_that_no_kernel_takes_is_refused_where_it_would_be_compiled_for_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = {"additional_config": {"context_method": "ring"}, "parallel_config": {"ring_degree": 2}}
    check_compiled_ring(config(tmp_path, **ring), "a joint text")
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE")
    for allowed in ({"enforce_eager": True}, {"additional_config": {}}, {"parallel_config": {}}):
        check_compiled_ring(config(tmp_path, **ring | allowed), "a joint text")
    with pytest.raises(ModelConfigError, match="'ring' cannot be compiled with 'neuron_native': a joint text"):
        check_compiled_ring(config(tmp_path, **ring), "a joint text")


def test_cores_whose_collectives_cannot_be_routed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"parallel_config": {"tensor_parallel_size": 8, "ring_degree": 2}}
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "8-23")
    check_engine_config(config(tmp_path, **settings), Able)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE")
    with pytest.raises(
        ModelConfigError, match=r"TP8×CP2×CFG1 on the cores 8,9,.* cannot be routed on trn2: cp \[8, 16"
    ):
        check_engine_config(config(tmp_path, **settings), Able)
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "16-31")
    check_engine_config(config(tmp_path, **settings), Able)


def test_what_the_spec_has_goes_to_the_hooks(tmp_path: Path) -> None:
    settings = {"parallel_config": {"cfg_parallel_size": 2}, "enable_cpu_offload": True, "vae_use_tiling": True}
    assert check_engine_config(config(tmp_path, **settings), Able).path == tmp_path
    with pytest.raises(ModelConfigError, match=r"cfg_parallel_size = 3: .* valid sizes are 1, 2"):
        check_engine_config(config(tmp_path, parallel_config={"cfg_parallel_size": 3}), Able)
    with pytest.raises(ModelConfigError, match="lora_path: nowhere is no adapter"):
        check_engine_config(config(tmp_path, lora_path="nowhere"), Able)


def test_requests_in_the_engines_process(tmp_path: Path) -> None:
    pre_process = Drawing.get_pre_process_func(config(tmp_path, parallel_config={"ring_degree": 4}))
    params = pre_process(request_of(height=70, extra_args={"layers": 2})).sampling_params
    assert (params.height, params.width, params.num_frames, params.output_type) == (64, 96, 1, "pil")
    assert params.extra_args["_sources"]["layers"] == "request"
    image = {"prompt": "a cat", "multi_modal_data": {"image": Image.new("RGB", (8, 8))}}
    for wrong, message in (
        (request_of(extra_args={"layers": 9}), f"layers = 9: {tmp_path.name} has 8"),
        (request_of(image), "the request carries image; Drawing takes none: it is a drawing"),
        (request_of(lora_request=LoRARequest("a", 1, "b")), "carries lora_request; Drawing takes none"),
        (request_of(height=16, width=32), "height 16, width 32: .*cp = 4 .*2 tokens"),
        (request_of(generator=[torch.Generator()] * 2), r"2 generators are given; 1 image\(s\) need as many"),
    ):
        with pytest.raises(OmniClientError, match=message):
            pre_process(wrong)
    with pytest.raises(OmniClientError, match="b is no adapter"):
        Able.get_pre_process_func(config(tmp_path))(request_of(lora_request=LoRARequest("a", 1, "b")))


def test_an_output_that_does_not_fit_into_shared_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the worker that hands it over is killed by SIGBUS, after the whole generation."""
    monkeypatch.setattr(shared_memory, "space", lambda: shared_memory.Space(6 << 20, 64 << 20))
    workers = {"parallel_config": {"cfg_parallel_size": 2}}
    pre_process = Able.get_pre_process_func(config(tmp_path, **workers))
    size = {"height": 512, "width": 1024}  # 6 MiB in float32
    pre_process(request_of(**size))
    with pytest.raises(OmniClientError, match=r"output of 2 × 3 × 1 × 512 × 1024 .*12 MiB .* 6 MiB free .*--shm-size"):
        pre_process(request_of(num_outputs_per_prompt=2, **size))
    pre_process(request_of(num_outputs_per_prompt=2, output_type="latent", **size))
    Able.get_pre_process_func(config(tmp_path))(request_of(num_outputs_per_prompt=2, **size))  # one process


def test_images_come_as_the_caller_wants_them() -> None:
    made = torch.linspace(-1, 1, 2 * 3 * 4 * 6).reshape(2, 3, 4, 6)
    result = {"payload": {"image": made}, "metadata": {"generation": {"seed": 1}}}
    post_process = Drawing.get_post_process_func(None)
    outputs = {
        kind: post_process(result, sampling_params=OmniDiffusionSamplingParams(output_type=kind))["payload"]["image"]
        for kind in ("pil", "np", "pt", "latent")
    }
    assert [image.size for image in outputs["pil"]] == [(6, 4)] * 2
    np.testing.assert_allclose(outputs["np"], made.permute(0, 2, 3, 1).numpy() / 2 + 0.5, atol=1e-6)
    torch.testing.assert_close(outputs["pt"], made / 2 + 0.5)
    assert outputs["latent"] is made
    default = post_process(result)
    assert isinstance(default["payload"]["image"][0], Image.Image) and default["metadata"] == result["metadata"]
