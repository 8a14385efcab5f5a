# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter's files: what they add to which tensor of the checkpoint, checked against the headers of both.

Read are safetensors files in the layers' names of diffusers and PEFT
(`transformer.blocks.0.attn1.to_q.lora_A.weight`, after `base_model.model.` or not), of the original Wan code
(`diffusion_model.blocks.0.self_attn.q.lora_down.weight`) and of kohya's trainers
(`lora_unet_blocks_0_self_attn_q.lora_down.weight`); with `alpha`, biases (`lora_B.bias`, `diff_b`) and whole
differences (`diff`).
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from omni_neuron_runtime import SafetensorsCheckpoint
from omni_neuron_wan22.checkpoint import Expert, WanCheckpoint
from omni_neuron_wan22.config import WanConfig
from omni_neuron_wan22.mapping import transformer_mapping
from omni_neuron_wan22.original_names import original_wan_names

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DIFFUSERS_METADATA = "lora_adapter_metadata"
_PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "lora_unet_")
_KEY = re.compile(
    r"(?P<layer>.+)\.(?:(?:lora_A|lora_down)(?:\.\w+)?\.(?P<down>weight)|(?:lora_B|lora_up)(?:\.\w+)?\.(?P<up>weight)"
    r"|(?:lora_B|lora_up)(?:\.\w+)?\.(?P<bias>bias)|(?P<diff_b>diff_b)|(?P<diff>diff)|(?P<alpha>alpha))"
)


class LoraError(ValueError):
    """An adapter that cannot be used; the message names the file, what is wrong and what would be right."""


@dataclass(frozen=True)
class Change:
    """What an adapter adds to one tensor of the checkpoint: a low-rank product, or a whole difference.

    Reads as a `TensorSlice`: indexing computes that part only, in float32.

    Attributes:
        shape: the tensor's.
        up, down: read `[out, rank]` and `[rank, in]`; `down` is None for a whole difference, which `up` reads.
        scale: alpha / rank.
    """

    shape: tuple[int, ...]
    up: Callable[[], torch.Tensor]
    down: Callable[[], torch.Tensor] | None = None
    scale: float = 1.0

    def read(self) -> LoadedChange:
        """The tensors in memory."""
        down = None if self.down is None else self.down().float().flatten(1)
        up = self.up().float() * self.scale
        return LoadedChange(self.shape, up if down is None else up.flatten(1), down)


@dataclass(frozen=True)
class LoadedChange:
    """`Change`, read; `up` holds the scale."""

    shape: tuple[int, ...]
    up: torch.Tensor
    down: torch.Tensor | None

    def get_shape(self) -> list[int]:
        """The tensor's shape."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """As safetensors writes it."""
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self.down is None:
            return self.up[index]
        if len(self.shape) > 2:
            return (self.up @ self.down).reshape(self.shape)[index]
        rows, columns = (*(index if isinstance(index, tuple) else (index,)), slice(None))[:2]
        rows, columns = (slice(None) if part is ... else part for part in (rows, columns))
        return self.up[rows] @ self.down[:, columns]


Changes = dict[Expert, dict[str, Change]]


@dataclass
class _Layer:
    """What a file holds of one layer: the keys by kind."""

    keys: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _File:
    """One safetensors file.

    Attributes:
        path: of the file.
        expert: the one that the file's or folder's name says; None where the keys decide.
        config: PEFT's, or what diffusers keeps of it in the file; empty without.
        shapes: by key.
    """

    path: Path
    expert: Expert | None
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, path: Path, expert: Expert | None, config: Mapping[str, Any] | None = None) -> _File:
        try:
            with safe_open(path, framework="pt") as tensors:
                shapes = {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
                metadata = tensors.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise LoraError(f"{path} is no readable safetensors file: {error}") from error
        if config is None:
            config = json.loads(metadata.get(_DIFFUSERS_METADATA, "{}"))
        return cls(path, expert, config, shapes)

    def read(self, key: str) -> torch.Tensor:
        with safe_open(self.path, framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(key)
        return tensor


def read_adapter(path: str | Path, checkpoint: WanCheckpoint) -> Changes:
    """What an adapter changes, by expert and key of the checkpoint. Only headers and alphas are read.

    One file, or a folder with one, may hold both experts' layers under `transformer.` and `transformer_2.`. Layers that
    name no expert change both. A folder may instead hold `transformer/` and `transformer_2/`, or two files whose names
    contain `high_noise` and `low_noise`; then these decide.

    Args:
        path: a safetensors file, or a folder as PEFT or diffusers writes it.
        checkpoint: the base model.

    Raises:
        LoraError: no adapter there, one in a form that is not known, or one that does not fit the checkpoint.
    """
    if checkpoint.fp8 is not None:
        raise LoraError(f"adapter {path}: the experts' weights are FP8, into which no adapter is merged")
    changes: Changes = {}
    for file in _files(Path(path)):
        for expert, layers in _layers(file, checkpoint).items():
            of_expert = changes.setdefault(expert, {})
            for key, change in _changes(file, layers, SafetensorsCheckpoint(checkpoint.path / expert)):
                if key in of_expert:
                    raise LoraError(f"adapter {path}: {key} of {expert} is changed twice")
                of_expert[key] = change
    if not any(changes.values()):
        raise LoraError(f"adapter {path} holds no LoRA layer")
    return changes


def _files(path: Path) -> list[_File]:
    if path.is_file():
        return [_File.open(path, _named_expert(path.name))]
    if not path.is_dir():
        raise LoraError(f"adapter {path}: there is no such file or folder on this machine")
    experts: tuple[Expert, ...] = ("transformer", "transformer_2")
    parts: list[tuple[Path, Expert | None]] = [
        (path / expert, expert) for expert in experts if (path / expert).is_dir()
    ]
    files = [file for folder, expert in parts or [(path, None)] for file in _files_of_folder(folder, expert)]
    if len(files) > 1 and len({file.expert for file in files} - {None}) < len(files):
        names = ", ".join(file.path.name for file in files)
        raise LoraError(
            f"adapter {path} holds {len(files)} files ({names}): which is whose? Name one *high_noise* and the other "
            "*low_noise*, or put them into folders transformer and transformer_2"
        )
    return files


def _files_of_folder(folder: Path, expert: Expert | None) -> list[_File]:
    if (folder / PEFT_CONFIG).is_file():
        return [_File.open(folder / PEFT_WEIGHTS, expert, _peft_config(folder / PEFT_CONFIG))]
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise LoraError(f"adapter {folder}: no safetensors file in this folder")
    return [_File.open(path, expert or _named_expert(path.name)) for path in paths]


def _named_expert(name: str) -> Expert | None:
    match = re.search(r"(high|low)[-_ ]?noise", name.lower())
    return None if match is None else "transformer" if match[1] == "high" else "transformer_2"


def _peft_config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise LoraError(f"{path} is not JSON: {error}") from error
    if config.get("peft_type", "LORA") != "LORA":
        raise LoraError(f"{path}: peft_type = {config['peft_type']!r}; the valid one is LORA")
    for name in ("use_dora", "modules_to_save"):
        if config.get(name):
            raise LoraError(f"{path}: {name} = {config[name]!r} is not supported; leave it unset")
    return config


def _layers(file: _File, checkpoint: WanCheckpoint) -> dict[Expert, dict[str, _Layer]]:
    """The file's layers by expert and by diffusers' name."""
    found: dict[Expert, dict[str, _Layer]] = {}
    names = {expert: _layer_names(checkpoint.transformer_config(expert)) for expert in checkpoint.experts}
    for key in file.shapes:
        match = _KEY.fullmatch(key)
        if match is None:
            raise LoraError(f"{file.path}: {key!r} is no key of a LoRA layer; valid ones end as in {_EXAMPLES}")
        experts, name = _experts_and_name(match["layer"], file, checkpoint)
        kind = next(kind for kind, value in match.groupdict().items() if value and kind != "layer")
        for expert in experts:
            if name not in names[expert]:
                near = difflib.get_close_matches(name, names[expert], n=3)
                hint = f"; nearest: {', '.join(near)}" if near else f"; names are such as {next(iter(names[expert]))}"
                raise LoraError(f"{file.path}: {expert} has no layer {name!r} ({key}){hint}")
            layer = found.setdefault(expert, {}).setdefault(names[expert][name], _Layer())
            if kind in layer.keys:
                raise LoraError(f"{file.path}: {key} and {layer.keys[kind]} are the same layer's")
            layer.keys[kind] = key
    return found


_EXAMPLES = "blocks.0.attn1.to_q.lora_A.weight, …lora_B.weight, …lora_down.weight, …lora_up.weight, …alpha, …diff"


def _experts_and_name(layer: str, file: _File, checkpoint: WanCheckpoint) -> tuple[list[Expert], str]:
    """The experts that a layer's full name means, and the rest of the name."""
    for prefix in _PREFIXES:
        layer = layer.removeprefix(prefix)
    component, _, rest = layer.partition(".")
    named: Expert | None = "transformer" if component == "transformer" else None
    if component == "transformer_2":
        named = "transformer_2"
        if file.expert == "transformer":
            raise LoraError(f"{file.path} is named as the high-noise expert's, but holds {layer}")
    name = layer if named is None else rest
    # diffusers writes `transformer.` into the low-noise expert's own file as well.
    expert = file.expert or named
    if expert is not None and expert not in checkpoint.experts:
        raise LoraError(f"{file.path}: {layer} is of {expert}; the checkpoint has {', '.join(checkpoint.experts)} only")
    return list(checkpoint.experts) if expert is None else [expert], name


def _layer_names(config: WanConfig) -> dict[str, str]:
    """Every way to write a layer's name → diffusers' own."""
    names: dict[str, str] = {}
    # No original name is known of the image embedding's layers, which no Wan2.2 model has.
    original = original_wan_names(config) if config.image_dim is None else {}
    for keys in transformer_mapping(config).values():
        for key in [keys] if isinstance(keys, str) else keys:
            layer = key.removesuffix(".weight").removesuffix(".bias")
            other = original.get(key, key).removesuffix(".weight").removesuffix(".bias")
            names |= {spelling: layer for name in (layer, other) for spelling in (name, name.replace(".", "_"))}
    return names


def _changes(file: _File, layers: Mapping[str, _Layer], tensors: SafetensorsCheckpoint) -> list[tuple[str, Change]]:
    """The file's changes to the tensors of one expert, each checked against the tensor's shape."""
    changes = []
    present = set(tensors.keys())
    for name, layer in layers.items():
        keys = layer.keys
        weight, bias = f"{name}.weight", f"{name}.bias"
        if "down" in keys or "up" in keys:
            if weight not in present:
                raise LoraError(f"{file.path}: the checkpoint has no {weight} for {', '.join(keys.values())}")
            changes.append((weight, _low_rank(file, name, keys, tensors.shape(weight))))
        elif "alpha" in keys:
            raise LoraError(f"{file.path}: {keys['alpha']} has no lora_A and lora_B beside it")
        for kind, target in (("diff", weight), ("bias", bias), ("diff_b", bias)):
            if kind not in keys:
                continue
            if target not in present:
                raise LoraError(f"{file.path}: {keys[kind]} changes {target}, which the checkpoint does not have")
            shape, scale = tensors.shape(target), _scale(file, name, keys) if kind == "bias" else 1.0
            if file.shapes[keys[kind]] != shape:
                raise LoraError(
                    f"{file.path}: {keys[kind]} has shape {list(file.shapes[keys[kind]])}, {target} {list(shape)}"
                )
            if any(target == changed for changed, _ in changes):
                raise LoraError(f"{file.path}: {target} is changed twice, by {keys[kind]} as well")
            changes.append((target, Change(shape, _reader(file, keys[kind]), scale=scale)))
    return changes


def _low_rank(file: _File, name: str, keys: Mapping[str, str], shape: tuple[int, ...]) -> Change:
    for kind, other in (("down", "up"), ("up", "down")):
        if kind not in keys:
            raise LoraError(f"{file.path}: {keys[other]} has no lora_{'A' if kind == 'down' else 'B'} beside it")
    down, up = file.shapes[keys["down"]], file.shapes[keys["up"]]
    rank, columns = down[0], math.prod(down[1:])
    if math.prod(up[1:]) != rank:
        raise LoraError(
            f"{file.path}: {keys['up']} {list(up)} and {keys['down']} {list(down)} differ in rank: "
            f"{math.prod(up[1:])} and {rank}"
        )
    configured = _of_layer(file.config, "r", "rank_pattern", name)
    if configured is not None and configured != rank:
        raise LoraError(f"{file.path}: {keys['down']} has rank {rank}, its configuration says r = {configured}")
    if (up[0], columns) != (shape[0], math.prod(shape[1:])):
        raise LoraError(
            f"{file.path}: {keys['up']} {list(up)} times {keys['down']} {list(down)} makes [{up[0]}, {columns}], but "
            f"{name}.weight is {list(shape)}"
        )
    return Change(shape, _reader(file, keys["up"]), _reader(file, keys["down"]), _scale(file, name, keys))


def _scale(file: _File, name: str, keys: Mapping[str, str]) -> float:
    """alpha / rank; 1 where no alpha is given."""
    if "down" not in keys:
        return 1.0
    rank = file.shapes[keys["down"]][0]
    alpha = float(file.read(keys["alpha"])) if "alpha" in keys else None
    if alpha is None:
        alpha = _of_layer(file.config, "lora_alpha", "alpha_pattern", name)
    if alpha is None:
        return 1.0
    return alpha / (math.sqrt(rank) if file.config.get("use_rslora") else rank)


def _of_layer(config: Mapping[str, Any], setting: str, patterns: str, name: str) -> float | None:
    """A setting of PEFT's configuration for one layer; diffusers' form of it has the component before each name."""
    prefix = "" if setting in config else "transformer."
    for pattern, value in (config.get(prefix + patterns) or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            return float(value)
    value = config.get(prefix + setting)
    return None if value is None else float(value)


def _reader(file: _File, key: str) -> Callable[[], torch.Tensor]:
    return lambda: file.read(key)
