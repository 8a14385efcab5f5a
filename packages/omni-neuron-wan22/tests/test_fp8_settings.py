# SPDX-License-Identifier: Apache-2.0
"""The engine's settings of FP8: what they mean and what is refused before a worker starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_omni.diffusion.data import OmniDiffusionConfig

from omni_neuron_runtime import CheckpointError
from omni_neuron_wan22 import (
    TinyWan,
    WanCheckpoint,
    WanConfigError,
    make_scaled_fp8_checkpoint,
    make_tiny_checkpoint,
)
from omni_neuron_wan22.pipeline import NeuronWanPipeline
from vllm_omni_neuron.sdk import check_engine_config

ALL = ["attn1", "attn2", "ffn"]
METHOD = {"quantization": "fp8_row_mx"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("wan") / "plain", TinyWan(num_layers=1, text_layers=1))


@pytest.fixture(scope="module")
def fp8(plain: Path) -> str:
    return str(make_scaled_fp8_checkpoint(plain, plain.parent / "fp8"))


def check(plain: Path, settings: dict[str, Any], **config: Any) -> WanCheckpoint:
    od_config = OmniDiffusionConfig(model=str(plain), **{"dtype": "bfloat16", "additional_config": settings, **config})
    checkpoint = check_engine_config(od_config, NeuronWanPipeline)
    assert isinstance(checkpoint, WanCheckpoint)
    return checkpoint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "fp8"}, "quantization = 'fp8': the valid value is 'fp8_row_mx'"),
        (METHOD, "quantization = 'fp8_row_mx' needs comfyui_fp8_model_path"),
        (
            {"comfyui_fp8_model_path": "x"},
            "comfyui_fp8_model_path = 'x' is only valid with quantization = 'fp8_row_mx'",
        ),
        ({"modules_to_not_convert": ALL}, "modules_to_not_convert = .* is only valid with quantization"),
        (
            METHOD | {"comfyui_fp8_model_path": "x", "modules_to_not_convert": ["attn1", "attn3"]},
            r"modules_to_not_convert = \['attn1', 'attn3'\]: valid is a list of attn1, attn2, ffn",
        ),
        (METHOD | {"comfyui_fp8_model_path": "x", "modules_to_not_convert": "ffn"}, "modules_to_not_convert = 'ffn'"),
    ],
)
def test_settings_that_do_not_fit(plain: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(WanConfigError, match=message):
        check(plain, settings)


def test_vllm_omnis_own_methods_and_missing_folders_are_refused(plain: Path) -> None:
    with pytest.raises(WanConfigError, match=r"quantization_config = .*the model's own is given as `quantization`"):
        check(plain, {}, quantization_config="fp8")
    with pytest.raises(CheckpointError, match="nowhere is no folder or file on this machine"):
        check(plain, METHOD | {"comfyui_fp8_model_path": "nowhere"})


@pytest.mark.parametrize("target", ["trn2", "trn1"])
def test_weights_stay_fp8_on_trn3_only(
    plain: Path, fp8: str, target: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = METHOD | {"comfyui_fp8_model_path": fp8}
    checked = check(plain, settings).fp8
    assert checked is not None and checked.row_mx == tuple(ALL)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    with pytest.raises(
        WanConfigError,
        match=rf"kernels of attn1, attn2, ffn need trn3, .* target is {target}; modules_to_not_convert = .*'ffn'\]",
    ):
        check(plain, settings)
    with pytest.raises(WanConfigError, match=rf"kernels of ffn need trn3, .* target is {target}"):
        check(plain, settings | {"modules_to_not_convert": ["attn1", "attn2"]})
    assert check(plain, settings | {"modules_to_not_convert": ALL}).fp8.row_mx == ()  # type: ignore[union-attr]
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    check(plain, settings)
