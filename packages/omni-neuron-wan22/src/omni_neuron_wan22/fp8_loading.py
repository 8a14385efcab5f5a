# SPDX-License-Identifier: Apache-2.0
"""Loaders of FP8 weights: each source tensor keeps its own factor, and a rank reads its own slices.

E4M3FN goes up to 448 and is never taken for the legacy E4M3 of older chips, which ends at 240: a weight is multiplied
out in float32, or stays E4M3FN for trn3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from omni_neuron_kernels import pack_fp8_weight
from omni_neuron_runtime import (
    SafetensorsWeightLoader,
    TensorSlice,
    get_weight_loader,
    set_weight_loader,
)
from omni_neuron_wan22.comfyui import FP8, ScaledFp8File
from omni_neuron_wan22.transformer import WanTransformer3DModel
from vllm_omni_neuron.sdk import Mapping

_NAN_MAGNITUDE = 0x7F  # E4M3FN's only NaN, with either sign


def prepare_loading(module: nn.Module, file: ScaledFp8File) -> Mapping:
    """Set the loaders of the parameters that come from FP8 or have a factor; return the mapping to the file's keys.

    Args:
        module: the DiT; where `use_row_mx` has made a weight FP8 it stays so, others are multiplied out.
        file: the expert's.
    """
    mapping, parameters = file.mapping(), dict(module.named_parameters())
    source_of = {key: source for source, key in file.inventory.keys.items()}
    for name, keys in list(mapping.items()):
        parameter, listed = parameters[name], [keys] if isinstance(keys, str) else keys
        sources = [source_of[key] for key in listed]
        if parameter.dtype == FP8:
            set_weight_loader(parameter, _packing(get_weight_loader(parameter), listed))
            mapping[f"{name}_scale"] = [file.inventory.scales[source] for source in sources]
        elif any(source in file.scales for source in sources):
            factors = [file.scales.get(source, 1.0) for source in sources]
            set_weight_loader(parameter, _dequantizing(get_weight_loader(parameter), listed, factors))
    return mapping


@dataclass(frozen=True)
class Fp8Summary:
    """What became of one expert's weights.

    Attributes:
        linears: linear layers of the expert.
        fp8_linears: those that are FP8 in the file.
        fp8_bytes: of those, in the file.
        row_mx_linears: those that stay FP8; the other FP8 ones were multiplied out.
        rank_row_mx_bytes: what they take on this rank, scales included.
        rank_bytes: what all of the expert's weights take on this rank.
        rank_bytes_without_fp8: what they would take if no weight had stayed FP8.
    """

    linears: int
    fp8_linears: int
    fp8_bytes: int
    row_mx_linears: int
    rank_row_mx_bytes: int
    rank_bytes: int
    rank_bytes_without_fp8: int

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"{self.fp8_linears} of {self.linears} linear layers are FP8 in the file, {self.fp8_bytes / mib:.1f} MiB; "
            f"{self.row_mx_linears} stay so, {self.fp8_linears - self.row_mx_linears} are dequantised; the weights "
            f"take {self.rank_bytes / mib:.1f} MiB on this rank, {self.rank_bytes_without_fp8 / mib:.1f} without FP8"
        )


def fp8_summary(model: WanTransformer3DModel, file: ScaledFp8File) -> Fp8Summary:
    """Count in the loaded `model` what came from `file`."""
    mapping, parameters = file.mapping(), dict(model.named_parameters())
    kept = [name for name, parameter in parameters.items() if parameter.dtype == FP8]
    bytes_of = {name: parameter.nbytes for name, parameter in parameters.items()}
    row_mx_bytes = sum(bytes_of[name] + bytes_of[f"{name}_scale"] for name in kept)
    widened = sum(parameters[name].numel() for name in kept) * model.dtype.itemsize
    return Fp8Summary(
        linears=file.inventory.linears,
        fp8_linears=len(file.inventory.fp8),
        fp8_bytes=file.inventory.fp8_bytes,
        row_mx_linears=sum(1 if isinstance(mapping[name], str) else len(mapping[name]) for name in kept),
        rank_row_mx_bytes=row_mx_bytes,
        rank_bytes=sum(bytes_of.values()),
        rank_bytes_without_fp8=sum(bytes_of.values()) - row_mx_bytes + widened,
    )


def _dequantizing(loader: SafetensorsWeightLoader, keys: list[str], factors: list[float]) -> SafetensorsWeightLoader:
    """What `loader` makes of the tensors times their factors, in float32."""

    def transform(slices: Sequence[TensorSlice], rank: int) -> torch.Tensor:
        scaled = [_Scaled(*source) for source in zip(slices, keys, factors, strict=True)]
        return loader.load(scaled, rank)

    return SafetensorsWeightLoader(transform)


def _packing(loader: SafetensorsWeightLoader, keys: list[str]) -> SafetensorsWeightLoader:
    """What `loader` makes of FP8 tensors, `[out, in]`, as the ROW_MX functions take it."""

    def transform(slices: Sequence[TensorSlice], rank: int) -> torch.Tensor:
        stored = loader.load([_Bytes(*source) for source in zip(slices, keys, strict=True)], rank)
        return pack_fp8_weight(stored.view(FP8).t())

    return SafetensorsWeightLoader(transform)


class _Scaled:
    """A `TensorSlice` whose parts are multiplied out, float32."""

    def __init__(self, whole: TensorSlice, key: str, factor: float) -> None:
        self._whole, self._key, self._factor = whole, key, factor

    def get_shape(self) -> list[int]:
        return self._whole.get_shape()

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self._whole[index]
        if part.dtype == FP8:
            _refuse_nan(part.view(torch.uint8), self._key)
        return part.float() * self._factor


class _Bytes:
    """A `TensorSlice` of FP8 as bytes, for which torch has all that loaders do: it pads no FP8."""

    def __init__(self, whole: TensorSlice, key: str) -> None:
        self._whole, self._key = whole, key

    def get_shape(self) -> list[int]:
        return self._whole.get_shape()

    def get_dtype(self) -> str:
        return "U8"

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self._whole[index].view(torch.uint8)
        _refuse_nan(part, self._key)
        return part


def _refuse_nan(part: torch.Tensor, key: str) -> None:
    if part.device.type == "meta":
        return
    count = int(((part & _NAN_MAGNITUDE) == _NAN_MAGNITUDE).sum())
    if count:
        raise ValueError(f"{key} holds {count} NaN (byte 0x7f or 0xff): the file is damaged, or not E4M3FN")
