# SPDX-License-Identifier: Apache-2.0
"""The model SDK: what a model package needs beside the layers of `omni_neuron_parallel` and `omni_neuron_runtime`.

Names are imported when they are asked for; importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_omni_neuron.sdk.denoising import Prediction, Trajectory
    from vllm_omni_neuron.sdk.pipeline import NeuronDiffusionPipeline
    from vllm_omni_neuron.sdk.spec import (
        FEATURES,
        SDK_VERSION,
        SPEC_AXES,
        ComponentKind,
        ComponentSpec,
        Dtype,
        Feature,
        ModelSpec,
        Output,
        SpecAxis,
        SpecError,
        load_spec,
        model_spec,
    )
    from vllm_omni_neuron.sdk.stage_clock import StageClock

_HOMES = {
    "denoising": ["Prediction", "Trajectory"],
    "pipeline": ["NeuronDiffusionPipeline"],
    "spec": [
        "FEATURES",
        "SDK_VERSION",
        "SPEC_AXES",
        "ComponentKind",
        "ComponentSpec",
        "Dtype",
        "Feature",
        "ModelSpec",
        "Output",
        "SpecAxis",
        "SpecError",
        "load_spec",
        "model_spec",
    ],
    "stage_clock": ["StageClock"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "FEATURES",
    "SDK_VERSION",
    "SPEC_AXES",
    "ComponentKind",
    "ComponentSpec",
    "Dtype",
    "Feature",
    "ModelSpec",
    "NeuronDiffusionPipeline",
    "Output",
    "Prediction",
    "SpecAxis",
    "SpecError",
    "StageClock",
    "Trajectory",
    "load_spec",
    "model_spec",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
