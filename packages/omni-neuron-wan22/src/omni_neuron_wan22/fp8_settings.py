# SPDX-License-Identifier: Apache-2.0
"""The settings of FP8: what they mean, and where that can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omni_neuron_runtime import is_cpu_mode, platform_target
from omni_neuron_wan22.config import WanConfigError

METHOD = "fp8_row_mx"
# The parts of a block whose linear layers can stay FP8; all others are always dequantised.
MODULES = ("attn1", "attn2", "ffn")
_NATIVE_TARGET = "trn3"


@dataclass(frozen=True)
class Fp8Settings:
    """`quantization: fp8_row_mx`.

    Attributes:
        path: ComfyUI's scaled FP8 checkpoint: a folder with a file an expert, or a file.
        modules_to_not_convert: those of `MODULES` that are dequantised when they are loaded.
    """

    path: Path
    modules_to_not_convert: frozenset[str] = frozenset()

    @property
    def row_mx(self) -> tuple[str, ...]:
        """Those of `MODULES` whose weights stay FP8."""
        return tuple(module for module in MODULES if module not in self.modules_to_not_convert)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Fp8Settings | None:
        """Take `quantization`, `comfyui_fp8_model_path` and `modules_to_not_convert` out of the model's settings.

        Raises:
            WanConfigError: another method, one setting without the other, or no such modules.
        """
        method, path = settings.get("quantization"), settings.get("comfyui_fp8_model_path")
        excluded = settings.get("modules_to_not_convert")
        if method is None:
            for name, value in (("comfyui_fp8_model_path", path), ("modules_to_not_convert", excluded)):
                if value is not None:
                    raise WanConfigError(f"{name} = {value!r} is only valid with quantization = {METHOD!r}")
            return None
        if method != METHOD:
            raise WanConfigError(f"quantization = {method!r}: the valid value is {METHOD!r}, or none")
        if path is None:
            raise WanConfigError(
                f"quantization = {METHOD!r} needs comfyui_fp8_model_path, the folder of a ComfyUI scaled FP8 checkpoint"
            )
        modules = [] if excluded is None else excluded
        if isinstance(modules, str) or not set(modules) <= set(MODULES):
            raise WanConfigError(f"modules_to_not_convert = {modules!r}: valid is a list of {', '.join(MODULES)}")
        return cls(Path(path).expanduser(), frozenset(modules))

    def check_place(self, dtype: torch.dtype) -> None:
        """Refuse ROW_MX where nothing computes it; nothing to refuse where every module is dequantised.

        Raises:
            WanConfigError: the platform target is older than trn3, or the dtype is not the kernels'.
        """
        if not self.row_mx:
            return
        setting, target = f"quantization = {METHOD!r}", platform_target()
        instead = f"modules_to_not_convert = {list(MODULES)} loads the same checkpoint dequantised"
        if target not in (_NATIVE_TARGET, "cpu"):
            raise WanConfigError(
                f"{setting}: the ROW_MX kernels of {', '.join(self.row_mx)} need {_NATIVE_TARGET}, and the platform "
                f"target is {target}; {instead}"
            )
        if dtype != torch.bfloat16 and not is_cpu_mode():
            raise WanConfigError(f"{setting} with dtype = {dtype}: the ROW_MX kernels compute in bfloat16; {instead}")

    def computed_by(self) -> str:
        """Who computes the modules, in words."""
        if not self.row_mx:
            return "all modules are computed from dequantised weights"
        by = "torch, from dequantised numbers, in CPU mode" if is_cpu_mode() else f"{_NATIVE_TARGET}'s ROW_MX kernels"
        return f"{', '.join(self.row_mx)} are computed by {by}"
