# SPDX-License-Identifier: Apache-2.0
"""Tensors that were captured in the denoising steps of a run: read, and written.

The files are those of the tensor capture of `vllm-omni-neuron`:
`{capture_dir}/{prompt_hash}/step_NNN/{module}_tp{t}_cp{c}_cfg{g}[_call{n}].pt`, each what `torch.save` makes of a
tensor, or of lists and dicts of tensors, and in each step `meta.json` with `step`, `timestep` and `modules`. torch is
imported when a tensor is read or written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .pass_rule import as_array
from .rank_agreement import Array, Ranks, disagreeing

_STEP = re.compile(r"step_(\d+)")
_FILE = re.compile(r"(?P<module>.+)_tp(?P<tp>\d+)_cp(?P<cp>\d+)_cfg(?P<cfg>\d+)(?:_call(?P<call>\d+))?\.pt")

Parts = dict[tuple[int, int], Array]
"""One tensor's parts by (tp, cp) rank."""


class CaptureError(ValueError):
    """A capture is missing, incomplete or unreadable."""


@dataclass(frozen=True)
class CapturedStep:
    """One denoising step.

    Attributes:
        folder: its files.
        step: its number, from 0.
        timestep: of the scheduler; None where the caller of the model gave none.
        cfg_size: CFG ranks of the run.
    """

    folder: Path
    step: int
    timestep: float | None
    cfg_size: int

    def load(self) -> dict[str, dict[int, Parts]]:
        """What was captured: by module, by branch of the guidance (0 positive, 1 negative), by (tp, cp) rank.

        A module that returns several tensors is several, such as `blocks.0[1]`. A step without guidance has branch 0
        only, whichever CFG ranks repeated it; what they hold is then equal.

        Raises:
            CaptureError: a file cannot be read.
        """
        import torch

        branches: dict[int, dict[str, Parts]] = {}
        for path, match in _files(self.folder):
            try:
                content = torch.load(path, weights_only=True, map_location="cpu")
            except Exception as error:  # torch raises whatever the damage leads to
                raise CaptureError(f"{path} cannot be read: {error}") from error
            branch = int(match["call"] or 0) * self.cfg_size + int(match["cfg"])
            for name, tensor in _flatten(match["module"], content):
                parts = branches.setdefault(branch, {}).setdefault(name, {})
                parts[int(match["tp"]), int(match["cp"])] = as_array(tensor)
        if len(branches) > 1 and all(_equal(branches[0], other) for other in branches.values()):
            branches = {0: branches[0]}
        modules: dict[str, dict[int, Parts]] = {}
        for branch, tensors in sorted(branches.items()):
            for name, parts in tensors.items():
                modules.setdefault(name, {})[branch] = parts
        return modules

    def low_precision_dtype(self) -> str | None:
        """The name of a 16- or 8-bit dtype that a tensor of this step has; None where all are wider."""
        import torch

        for path, match in _files(self.folder):
            content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
            for _, tensor in _flatten(match["module"], content):
                if tensor.is_floating_point() and tensor.element_size() < 4:
                    return str(tensor.dtype).removeprefix("torch.")
        return None


@dataclass(frozen=True)
class CapturedRun:
    """The captured steps of one run, in order, at least one and without a gap."""

    folder: Path
    steps: tuple[CapturedStep, ...]


def read_run(folder: Path | str) -> CapturedRun:
    """Find the steps of a captured run; tensors are read when a step is loaded.

    Args:
        folder: a run's, which holds `step_000` and so on; or a capture folder in which one run was captured.

    Raises:
        CaptureError: there is no such folder, no run or several in it, a step is missing, without files or without
            `meta.json`.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CaptureError(f"{path} is no folder")
    if not _step_folders(path):
        runs = sorted(child for child in path.iterdir() if child.is_dir() and _step_folders(child))
        if not runs:
            raise CaptureError(f"{path} holds no captured step (no folder step_000)")
        if len(runs) > 1:
            names = ", ".join(run.name for run in runs)
            raise CaptureError(f"{path} holds several runs ({names}); name the folder of one")
        [path] = runs
    numbered = _step_folders(path)
    missing = sorted(set(range(max(numbered) + 1)) - set(numbered))
    if missing:
        raise CaptureError(f"{path} lacks step_{missing[0]:03d}, but has step_{max(numbered):03d}")
    cfg_size = 1
    for step_folder in numbered.values():
        files = _files(step_folder)
        if not files:
            raise CaptureError(f"{step_folder} holds no captured tensor")
        cfg_size = max(cfg_size, 1 + max(int(match["cfg"]) for _, match in files))
    steps = (
        CapturedStep(step_folder, number, _timestep(step_folder), cfg_size)
        for number, step_folder in sorted(numbered.items())
    )
    return CapturedRun(path, tuple(steps))


def write_step(
    folder: Path | str,
    step: int,
    timestep: float | None,
    tensors: Mapping[str, Any],
    *,
    ranks: tuple[int, int, int] = Ranks(),
    call: int = 0,
) -> Path:
    """Write tensors of one step of a run, from any loop: another library's, for a reference.

    Args:
        folder: of the run; made where it is missing.
        step: from 0.
        timestep: of the scheduler.
        tensors: by name; predictions, latents, what modules return.
        ranks: this process's tp, cp and cfg rank.
        call: which of this rank's branches of the guidance, where it computes them one after the other.

    Returns:
        The step's folder.
    """
    import torch

    step_folder = Path(folder) / f"step_{step:03d}"
    step_folder.mkdir(parents=True, exist_ok=True)
    tp, cp, cfg = ranks
    for name, tensor in tensors.items():
        value = tensor.detach().cpu() if isinstance(tensor, torch.Tensor) else torch.as_tensor(tensor)
        torch.save(value, step_folder / f"{name}_tp{tp}_cp{cp}_cfg{cfg}{f'_call{call}' if call else ''}.pt")
    if (tp, cp, cfg) == (0, 0, 0):
        meta = {"step": step, "timestep": timestep, "modules": list(tensors)}
        (step_folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return step_folder


def _step_folders(path: Path) -> dict[int, Path]:
    matches = ((child, _STEP.fullmatch(child.name)) for child in path.iterdir() if child.is_dir())
    return {int(match[1]): child for child, match in matches if match}


def _files(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    found = []
    for path in sorted(folder.glob("*.pt")):
        match = _FILE.fullmatch(path.name)
        if match is None:
            raise CaptureError(f"{path} is not named as a capture file")
        found.append((path, match))
    return found


def _timestep(folder: Path) -> float | None:
    try:
        value = json.loads((folder / "meta.json").read_text())["timestep"]
    except (OSError, ValueError, KeyError) as error:
        raise CaptureError(f"{folder / 'meta.json'} cannot be read: {error}") from error
    return None if value is None else float(value)


def _flatten(name: str, content: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(content, "detach"):
        yield name, content
    elif isinstance(content, (list, tuple)):
        for index, item in enumerate(content):
            yield from _flatten(f"{name}[{index}]", item)
    elif isinstance(content, dict):
        for key, item in content.items():
            yield from _flatten(f"{name}.{key}", item)


def _equal(first: dict[str, Parts], second: dict[str, Parts]) -> bool:
    return first.keys() == second.keys() and all(
        parts.keys() == second[name].keys()
        and not any(disagreeing({0: part, 1: second[name][key]}) for key, part in parts.items())
        for name, parts in first.items()
    )
