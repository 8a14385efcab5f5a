# SPDX-License-Identifier: Apache-2.0
"""Tensor capture: what chosen modules return in each denoising step, written to files for comparison.

Configured by `model_config["tensor_capture"]`:

- `modules`: patterns of module names such as `blocks.0-3.attn1` (a range of indices) or `blocks[.][02][.]ffn` (a
  regular expression that matches the whole name), relative to a declared DiT component or beginning with its name;
- `capture_dir`: the folder;
- `capture_filter`: optional, a regular expression that the whole name must match as well.

Files: `{capture_dir}/{prompt_hash}/step_NNN/{module}_tp{t}_cp{c}_cfg{g}.pt`, each a tensor, or the list or dict that
the module returned, and `meta.json` with `step`, `timestep` and `modules`. The ranks in the name are this process's in
the tensor-parallel, context-parallel and CFG-parallel group. Where one rank predicts several branches in a step, one
after the other as sequential guidance does, the second one's files end in `_call1.pt`, and so on.

A step is the `predict_noise` calls in a row with one `timestep` argument; a call without that keyword is a step of its
own.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

SETTINGS = ("modules", "capture_dir", "capture_filter")


class Ranks(NamedTuple):
    """This process's rank in each parallel group."""

    tp: int
    cp: int
    cfg: int


def current_ranks() -> Ranks:
    """The ranks in vLLM-Omni's groups."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
    from vllm_omni.diffusion.distributed.parallel_state import (
        get_classifier_free_guidance_rank,
        get_sequence_parallel_rank,
    )

    return Ranks(get_tensor_model_parallel_rank(), get_sequence_parallel_rank(), get_classifier_free_guidance_rank())


def match_modules(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of `names` that any of `patterns` means, in the order of `names`.

    Raises:
        ValueError: a pattern is no regular expression, or means none of them; the nearest names are given.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        try:
            expression = re.compile(_expand_ranges(pattern))
        except re.error as error:
            raise ValueError(f"tensor_capture: module pattern {pattern!r} is not valid: {error}") from None
        matched = {name for name in names if expression.fullmatch(name) or _matches_inside(expression, name)}
        if not matched:
            near = difflib.get_close_matches(pattern, [*names, *(_inside(name) for name in names)], n=3, cutoff=0.4)
            hint = f"nearest names: {', '.join(dict.fromkeys(near))}" if near else f"names begin with {names[0]}"
            raise ValueError(f"tensor_capture: module pattern {pattern!r} matches no module; {hint}")
        chosen |= matched
    return [name for name in names if name in chosen]


def _expand_ranges(pattern: str) -> str:
    """`blocks.0-3.attn1` as a regular expression; anything else is one already."""
    if not re.fullmatch(r"[\w.\-]+", pattern):
        return pattern

    def alternatives(match: re.Match[str]) -> str:
        first, last = int(match[1]), int(match[2])
        return "(?:" + "|".join(str(index) for index in range(first, last + 1)) + ")"

    return r"\.".join(re.sub(r"(\d+)-(\d+)", alternatives, part) for part in pattern.split("."))


def _matches_inside(expression: re.Pattern[str], name: str) -> bool:
    return expression.fullmatch(_inside(name)) is not None


def _inside(name: str) -> str:
    """The name without its component."""
    return name.partition(".")[2]


class TensorCapture:
    """Hooks on the modules of some components, and the files they fill.

    The hooks always copy: a condition would be traced into the compiled graph and recompile it when it changes. What
    is copied while capture is off is dropped when `predict_noise` returns.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        components: Mapping[str, nn.Module],
        ranks: Callable[[], Ranks] = current_ranks,
    ) -> None:
        unknown = [name for name in settings if name not in SETTINGS]
        if unknown:
            raise ValueError(f"tensor_capture has the unknown setting {unknown[0]!r}; known: {', '.join(SETTINGS)}")
        for name in SETTINGS[:2]:
            if not settings.get(name):
                raise ValueError(f"tensor_capture needs the setting {name!r}")
        if isinstance(settings["modules"], str):
            raise ValueError(f"tensor_capture: modules is {settings['modules']!r}; it must be a list of patterns")
        modules = {
            f"{component_name}.{name}": module
            for component_name, component in components.items()
            for name, module in component.named_modules()
            if name
        }
        if not modules:
            raise ValueError("tensor_capture: the pipeline declares no DiT component in _dit_modules")
        names = match_modules(settings["modules"], list(modules))
        if settings.get("capture_filter"):
            names = [name for name in names if re.fullmatch(settings["capture_filter"], name)]
        self.directory = Path(settings["capture_dir"])
        self.module_names = names
        self._ranks = ranks
        self._captured: dict[str, Any] = {}
        self._prompt_hash: str | None = None
        self._step = -1
        self._timestep: float | None = None
        self._call = 0
        for name in names:
            modules[name].register_forward_hook(self._hook_for(name))

    def _hook_for(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        captured = self._captured

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            captured[name] = _copy(output)

        return hook

    def observe(self, pipeline: Any) -> None:
        """Replace `pipeline.predict_noise`; call it after compilation."""
        predict_noise = pipeline.predict_noise

        def captured_predict_noise(*args: Any, **kwargs: Any) -> Any:
            self._captured.clear()
            prediction = predict_noise(*args, **kwargs)
            if self._prompt_hash is not None:
                self._write(kwargs.get("timestep"))
            self._captured.clear()
            return prediction

        pipeline.predict_noise = captured_predict_noise

    def enable(self, prompt_hash: str = "default") -> None:
        """Write from now on, under `prompt_hash`; the next step is step 0.

        Raises:
            ValueError: `prompt_hash` cannot be a folder's name.
        """
        if not re.fullmatch(r"[\w.\-]+", prompt_hash) or prompt_hash in (".", ".."):
            raise ValueError(f"prompt_hash={prompt_hash!r} cannot name a folder; use letters, digits, '.', '_', '-'")
        self._prompt_hash = prompt_hash
        self._step, self._timestep, self._call = -1, None, 0

    def disable(self) -> None:
        """Write no more."""
        self._prompt_hash = None

    def _write(self, timestep: Any) -> None:
        value = None if timestep is None else float(torch.as_tensor(timestep).flatten()[0])
        if self._step >= 0 and value is not None and value == self._timestep:
            self._call += 1
        else:
            self._step, self._timestep, self._call = self._step + 1, value, 0
        ranks = self._ranks()
        assert self._prompt_hash is not None
        folder = step_directory(self.directory, self._prompt_hash, self._step)
        folder.mkdir(parents=True, exist_ok=True)
        for name, tensors in self._captured.items():
            torch.save(_to_cpu(tensors), folder / _file_name(name, ranks, self._call))
        if ranks == (0, 0, 0):
            meta = {"step": self._step, "timestep": value, "modules": self.module_names}
            (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


def step_directory(capture_dir: Path | str, prompt_hash: str, step: int) -> Path:
    """The folder of one step."""
    return Path(capture_dir) / prompt_hash / f"step_{step:03d}"


def _file_name(module: str, ranks: Ranks, call: int) -> str:
    suffix = f"_call{call}" if call else ""
    return f"{module}_tp{ranks.tp}_cp{ranks.cp}_cfg{ranks.cfg}{suffix}.pt"


_FILE_NAME = re.compile(r"(?P<module>.+)_tp(?P<tp>\d+)_cp(?P<cp>\d+)_cfg(?P<cfg>\d+)(?:_call(?P<call>\d+))?\.pt")


class CaptureKey(NamedTuple):
    """What one capture file holds."""

    module: str
    tp: int
    cp: int
    cfg: int
    call: int


def read_step_meta(capture_dir: Path | str, prompt_hash: str, step: int) -> dict[str, Any]:
    """`step`, `timestep` and `modules` of one captured step.

    Raises:
        FileNotFoundError: that step was not captured.
    """
    meta: dict[str, Any] = json.loads((step_directory(capture_dir, prompt_hash, step) / "meta.json").read_text())
    return meta


def read_step_tensors(capture_dir: Path | str, prompt_hash: str, step: int) -> dict[CaptureKey, Any]:
    """Everything captured in one step by all ranks, on the CPU.

    Raises:
        FileNotFoundError: that step was not captured.
    """
    folder = step_directory(capture_dir, prompt_hash, step)
    if not folder.is_dir():
        raise FileNotFoundError(f"no captured step {step} of prompt {prompt_hash!r} in {capture_dir}: {folder}")
    tensors: dict[CaptureKey, Any] = {}
    for path in sorted(folder.glob("*.pt")):
        match = _FILE_NAME.fullmatch(path.name)
        if match is None:
            raise ValueError(f"{path} is not named as a capture file")
        key = CaptureKey(
            match["module"], int(match["tp"]), int(match["cp"]), int(match["cfg"]), int(match["call"] or 0)
        )
        tensors[key] = torch.load(path, weights_only=True)
    return tensors


def _copy(output: Any) -> Any:
    """Copies of the tensors in `output`, so that an in-place change later in the graph does not reach them."""
    if isinstance(output, torch.Tensor):
        return output.detach().clone()
    if isinstance(output, (tuple, list)):
        return [_copy(item) for item in output]
    if isinstance(output, dict):
        return {key: _copy(item) for key, item in output.items()}
    return None


def _to_cpu(tensors: Any) -> Any:
    if isinstance(tensors, torch.Tensor):
        return tensors.cpu()
    if isinstance(tensors, list):
        return [_to_cpu(item) for item in tensors]
    if isinstance(tensors, dict):
        return {key: _to_cpu(item) for key, item in tensors.items()}
    return tensors
