# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's scaled FP8 checkpoints of the DiT: one file an expert, every tensor of it accounted for.

The layout (ComfyUI's `scaled_fp8`, 2025): the original Wan code's names, maybe behind `model.diffusion_model.`; a
linear layer's weight in E4M3FN with a float32 factor `scale_weight` of the whole tensor beside it, and maybe one of its
input, `scale_input`; everything else, and any linear layer that was left alone, in 16 or 32 bits. The dtype of a marker
`scaled_fp8` names the FP8 type; two elements in it instead of none mean that no FP8 matmul is meant.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from omni_neuron_runtime import CheckpointError, SafetensorsCheckpoint
from omni_neuron_wan22.config import WanConfig
from omni_neuron_wan22.mapping import transformer_mapping
from omni_neuron_wan22.original_names import linear_weights, original_wan_names
from vllm_omni_neuron.sdk import Mapping as KeyMapping

logger = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
PREFIXES = ("model.diffusion_model.", "")
# Where the files lie in a folder that was downloaded as a whole.
SUBFOLDERS = ("", "split_files/diffusion_models", "diffusion_models")

_MARKER = "scaled_fp8"
_MARKER_DTYPES = (FP8, torch.float32)  # float32 means E4M3FN, too
_PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NEWER_LAYOUT = ("comfy_quant", "weight_scale", "input_scale")
_NAMES_IN_A_MESSAGE = 8


@dataclass(frozen=True)
class Inventory:
    """What each tensor of one file is.

    Attributes:
        keys: diffusers' key → the key in the file, for every tensor of the DiT.
        scales: diffusers' key of a weight → the key of its factor in the file.
        linears: how many linear layers there are.
        fp8: diffusers' keys of the weights that are FP8, all of them of linear layers.
        fp8_bytes: of those.
        unused: keys in the file that are known and not needed: the marker, and factors of inputs, which are
            row-quantised by what they are.
        fp8_matmul: whether the marker leaves FP8 matmuls open.
    """

    keys: dict[str, str]
    scales: dict[str, str]
    linears: int
    fp8: frozenset[str]
    fp8_bytes: int
    unused: tuple[str, ...]
    fp8_matmul: bool


def take_inventory(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], config: WanConfig) -> Inventory:
    """Account for every tensor of a file.

    Args:
        tensors: dtype and shape by key.
        config: of the DiT.

    Raises:
        CheckpointError: names missing, unexpected and duplicate keys, and tensors of a dtype or scales of a shape that
            the layout does not have.
    """
    prefix = next(prefix for prefix in PREFIXES if any(key.startswith(prefix) for key in tensors) or not prefix)
    by_name: dict[str, str] = {}
    problems = _Problems()
    for key in tensors:
        name = key.removeprefix(prefix)
        if name in by_name:
            problems.add("duplicate, with and without prefix", key)
        by_name[name] = key

    names, linears = original_wan_names(config), linear_weights(config)
    layers = {key: names[key].removesuffix("weight") for key in linears}
    of_layout = {_MARKER, *(layer + kind for layer in layers.values() for kind in ("scale_weight", "scale_input"))}
    problems.extend("missing", (prefix + name for name in (*names.values(), _MARKER) if name not in by_name))
    unexpected = [key for name, key in by_name.items() if name not in of_layout | set(names.values())]
    problems.extend("unexpected", unexpected)
    if any(key.endswith(_NEWER_LAYOUT) for key in unexpected):
        problems.note("they are of ComfyUI's newer layout (comfy_quant); this version reads the scaled_fp8 layout")

    fp8, scales = [], {}
    for key, name in names.items():
        if name not in by_name:
            continue
        dtype = tensors[by_name[name]][0]
        scale = by_name.get(layers.get(key, "") + "scale_weight")
        if scale is not None:
            scales[key] = scale
            if tensors[scale][0] != torch.float32 or tensors[scale][1] not in ((), (1,)):
                problems.add("scales that are not one float32", _described(scale, tensors))
        if dtype == FP8 and key in layers:
            fp8.append(key)
            if scale is None:
                problems.add("missing scales of FP8 weights", prefix + layers[key] + "scale_weight")
        elif dtype not in _PLAIN_DTYPES:
            allowed = "F8_E4M3 and " if key in layers else ""
            problems.add(f"of a dtype other than {allowed}F16, BF16, F32", _described(by_name[name], tensors))
    if _MARKER in by_name and tensors[by_name[_MARKER]][0] not in _MARKER_DTYPES:
        problems.add("markers of another FP8 type than E4M3FN", _described(by_name[_MARKER], tensors))
    if not fp8:
        problems.note("no weight is FP8")
    problems.raise_any()
    inputs = (layer + "scale_input" for layer in layers.values())
    return Inventory(
        keys={key: by_name[name] for key, name in names.items()},
        scales=scales,
        linears=len(linears),
        fp8=frozenset(fp8),
        fp8_bytes=sum(math.prod(tensors[by_name[names[key]]][1]) for key in fp8),
        unused=tuple(by_name[name] for name in (_MARKER, *inputs) if name in by_name),
        fp8_matmul=math.prod(tensors[by_name[_MARKER]][1]) != 2,
    )


class _Problems:
    """Keys by what is wrong with them, for one error."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}
        self._notes: list[str] = []

    def add(self, what: str, key: str) -> None:
        self._found.setdefault(what, []).append(key)

    def extend(self, what: str, keys: Iterable[str]) -> None:
        for key in keys:
            self.add(what, key)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def raise_any(self) -> None:
        lines = []
        for what, keys in self._found.items():
            more = f" and {len(keys) - _NAMES_IN_A_MESSAGE} more" if len(keys) > _NAMES_IN_A_MESSAGE else ""
            lines.append(f"{len(keys)} {what}: {', '.join(keys[:_NAMES_IN_A_MESSAGE])}{more}")
        if lines or self._notes:
            raise CheckpointError("not a scaled FP8 checkpoint of this model: " + "; ".join([*lines, *self._notes]))


def _described(key: str, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> str:
    dtype, shape = tensors[key]
    return f"{key} ({str(dtype).removeprefix('torch.')} {list(shape)})"


@dataclass(frozen=True)
class ScaledFp8File:
    """One expert's file.

    Attributes:
        path: a safetensors file.
        config: of the DiT.
    """

    path: Path
    config: WanConfig

    @cached_property
    def tensors(self) -> SafetensorsCheckpoint:
        """The file as it is."""
        return SafetensorsCheckpoint(self.path)

    @cached_property
    def inventory(self) -> Inventory:
        """What its tensors are; from the header alone.

        Raises:
            CheckpointError: damaged, or not this layout of this model.
        """
        tensors = {key: (self.tensors.dtype(key), self.tensors.shape(key)) for key in self.tensors.keys()}  # noqa: SIM118 (not a mapping)
        try:
            return take_inventory(tensors, self.config)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    @cached_property
    def scales(self) -> dict[str, float]:
        """diffusers' key of a weight → its factor.

        Raises:
            CheckpointError: names factors that are not finite and positive.
        """
        values = self.tensors.read(self.inventory.scales.values())
        scales = {key: float(values[scale]) for key, scale in self.inventory.scales.items()}
        wrong = [
            f"{self.inventory.scales[key]} = {scale}"
            for key, scale in scales.items()
            if not (math.isfinite(scale) and scale > 0)
        ]
        if wrong:
            raise CheckpointError(f"{self.path}: scales that are not finite and positive: {', '.join(wrong)}")
        return scales

    def check_row_mx(self, modules: Collection[str]) -> None:
        """Refuse to keep modules of the blocks in FP8 that are not all FP8 here, or whose scales are wrong.

        Args:
            modules: of "attn1", "attn2" and "ffn".

        Raises:
            CheckpointError: names the weights, and the setting that leaves their module alone; or the scales.
        """
        inventory = self.inventory
        plain = [key for key in linear_weights(self.config) if key not in inventory.fp8 and _module(key) in modules]
        if plain:
            named = ", ".join(inventory.keys[key] for key in plain[:_NAMES_IN_A_MESSAGE])
            raise CheckpointError(
                f"{self.path}: {len(plain)} weights of modules that are to stay FP8 are not FP8: {named}; put "
                f"{', '.join(sorted({_module(key) for key in plain}))} into modules_to_not_convert"
            )
        if modules and not inventory.fp8_matmul:
            logger.warning(
                "%s: its marker says that no FP8 matmul is meant for it; %s are computed so, as the settings have it",
                self.path,
                ", ".join(modules),
            )
        _ = self.scales

    def check_expert(self, own: Path, other: Path) -> None:
        """Refuse the file of the other expert, told by a parameter that FP8 files hold unquantised.

        Args:
            own: folder of the same expert's weights in diffusers' layout.
            other: that of the other expert.

        Raises:
            CheckpointError: the other expert's is nearer.
        """
        key = "scale_shift_table"
        [found] = self.tensors.read([self.inventory.keys[key]]).values()
        near, far = (
            (SafetensorsCheckpoint(folder).read([key])[key].float() - found.float()).norm() for folder in (own, other)
        )
        if far < near:
            raise CheckpointError(
                f"{self.path}: these are the weights of {other}, not of {own}; are the files of both experts swapped?"
            )

    def mapping(self) -> KeyMapping:
        """Parameter of `WanTransformer3DModel` → key or keys in the file."""
        keys = self.inventory.keys
        return {
            name: keys[sources] if isinstance(sources, str) else [keys[source] for source in sources]
            for name, sources in transformer_mapping(self.config).items()
        }


def _module(key: str) -> str:
    """The part of a block that a key of diffusers' belongs to; "" outside of blocks."""
    return key.split(".")[2] if key.startswith("blocks.") else ""


Noise = Literal["high", "low"]


def find_expert_file(path: Path, noise: Noise | None, *, image_to_video: bool) -> Path:
    """The file of one expert.

    A file is told by its name: `high` or `low`, then `i2v` or `t2v` where there are both, then `fp8` where there are
    files without.

    Args:
        path: a folder, also one with the files in `split_files/diffusion_models`; or a file.
        noise: which expert; None for a model that has one only.
        image_to_video: what the model is.

    Raises:
        CheckpointError: there is none, or more than one, or a single file for two experts.
    """
    if path.is_file():
        if noise is not None:
            raise CheckpointError(f"{path} is one file, and this model has two experts: give the folder with both")
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder or file on this machine")
    files = next((found for sub in SUBFOLDERS if (found := sorted((path / sub).glob("*.safetensors")))), [])
    chosen = files if noise is None else [file for file in files if _names(file, noise)]
    for token in ("i2v" if image_to_video else "t2v", "fp8"):
        if len(chosen) > 1:
            chosen = [file for file in chosen if _names(file, token)]
    if len(chosen) != 1:
        what = f"a file of the {noise}-noise expert, told by {noise!r} in its name," if noise else "one file"
        held = ", ".join(file.name for file in files) or "no *.safetensors"
        raise CheckpointError(f"{path}: {what} is needed and {len(chosen)} are there; it holds {held}")
    return chosen[0]


def _names(file: Path, token: str) -> bool:
    return re.search(rf"(?<![a-z]){token}(?![a-z])", file.stem.lower()) is not None
