# SPDX-License-Identifier: Apache-2.0
"""Components that run whole: those of transformers, on every rank or on the output rank for all of them. No vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from omni_neuron_parallel import broadcast_nested_from_first, get_world_group
from omni_neuron_runtime import CheckpointError, SafetensorsCheckpoint
from vllm_omni_neuron.sdk.checkpoint import DiffusersCheckpoint
from vllm_omni_neuron.sdk.config import ModelConfigError
from vllm_omni_neuron.sdk.mapping import listing

ResultT = TypeVar("ResultT")


def load_transformers(
    checkpoint: DiffusersCheckpoint, component: str, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> nn.Module:
    """A component whose class is transformers', such as a text encoder: whole, in eval mode, without gradients.

    Args:
        checkpoint: the folder.
        component: its folder in there; the class is the one that model_index.json lists, else config.json's.
        dtype: of the weights.
        device: where they go.

    Raises:
        CheckpointError: files that are missing or truncated, or lack tensors.
        ModelConfigError: no class of transformers is named.
    """
    import transformers

    name = _class_name(checkpoint, component)
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise ModelConfigError(f"{checkpoint.path / component}: transformers {transformers.__version__} has no {name}")
    return load_pretrained(model_class, checkpoint.path / component, dtype).eval().requires_grad_(False).to(device)


def on_output_rank(function: Callable[[], ResultT], device: torch.device | str = "cpu") -> ResultT:
    """What `function` returns on global rank 0, on every rank: one rank runs what has no reason to run on all.

    Collective over the world. An error of `function` is raised on every rank, so that nobody waits for rank 0.

    Args:
        function: called on global rank 0 only. It returns tensors in tuples, lists and dicts, however nested; other
            values, such as None, must be such that they can be pickled.
        device: where the tensors go, on every rank.

    Raises:
        CollectiveError: a rank died or did not take part.
        RuntimeError: on the other ranks, with what `function` raised on rank 0; there it is raised as it is.
    """
    first = get_world_group() is None or dist.get_rank() == 0
    failure: Exception | None = None
    outcome = None
    if first:
        try:
            outcome = ("", tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), function()))
        except Exception as error:
            failure = error
            outcome = (f"{type(error).__name__}: {error}", None)
    message, value = broadcast_nested_from_first(outcome)
    if failure is not None:
        raise failure
    if message:
        raise RuntimeError(f"rank 0, which computes for every rank, failed: {message}")
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def load_pretrained(model_class: Any, path: Path, dtype: torch.dtype) -> Any:
    """A model of transformers or diffusers from a folder of this machine, complete.

    Raises:
        CheckpointError: files that are missing or truncated, or tensors, which the library would fill with noise.
    """
    SafetensorsCheckpoint(path).validate()
    model, found = model_class.from_pretrained(
        path, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    missing = sorted(found["missing_keys"])
    if missing:
        raise CheckpointError(f"{path}: missing {len(missing)} tensor(s) of {model_class.__name__}: {listing(missing)}")
    return model


def _class_name(checkpoint: DiffusersCheckpoint, component: str) -> str:
    entry = checkpoint.index.get(component)
    if isinstance(entry, list) and len(entry) == 2:
        library, name = entry
    else:
        library, name = "transformers", (checkpoint.raw_config(component).get("architectures") or [None])[0]
    if library != "transformers" or not isinstance(name, str):
        raise ModelConfigError(
            f"{checkpoint.path}: {component} is {entry if entry else name!r}; valid is a class of transformers"
        )
    return name
