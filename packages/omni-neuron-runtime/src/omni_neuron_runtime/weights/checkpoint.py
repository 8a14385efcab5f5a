# SPDX-License-Identifier: Apache-2.0
"""A safetensors checkpoint, and loading one rank's shard of it into a model's parameters."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from omni_neuron_runtime.weights.files import CheckpointError, TensorEntry, find_files, read_header
from omni_neuron_runtime.weights.pipeline import Channel, Pipeline, StageStoppedError
from omni_neuron_runtime.weights.plan import LoadPlan, plan_load
from omni_neuron_runtime.weights.prefetch import PageCache, planned_ranges
from omni_neuron_runtime.weights.reader import SliceReader

logger = logging.getLogger(__name__)

# Parameters whose pages are asked for ahead of the read, and parameters that are read ahead of the transfer. The
# second bounds the memory: at most one in each stage's hands and this many between them.
_PREFETCH_AHEAD = 4
_READ_AHEAD = 2
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class LoadResult(NamedTuple):
    """What a load made, for `model.load_state_dict(result.state_dict, assign=True)`.

    Attributes:
        state_dict: parameter name to this rank's tensor, in the order of `model.named_parameters()`.
        missing_keys: checkpoint keys that the mapping names and the checkpoint lacks (empty with `strict`).
        unexpected_keys: checkpoint keys that the mapping does not name, sorted.
    """

    state_dict: dict[str, Tensor]
    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass
class LoadStats:
    """Sums over all loads of one `SafetensorsCheckpoint`.

    Attributes:
        parameters: parameters made.
        bytes_read: bytes of the slices that loaders took, in the checkpoint's dtype. The storage may read more: it
            reads whole pages and ahead.
        bytes_prefetched: bytes asked of the page cache by the pipelined load, small gaps included.
    """

    parameters: int = 0
    bytes_read: int = 0
    bytes_prefetched: int = 0


class SafetensorsCheckpoint:
    """A folder of safetensors files, with or without an index; or one file.

    With an index (`*.safetensors.index.json`) the index says which files and keys belong to the checkpoint. Without
    one, all `*.safetensors` files do, and no key may be in two of them. Headers are read when they are first needed.

    Args:
        path: the folder or file; or, where that does not exist, the `organisation/name` of a repository on the Hugging
            Face Hub, whose safetensors files at the top level are fetched (needs `huggingface_hub`).
        cache_dir: where the Hub's files are kept; None for the Hub's own default.
        stall_timeout_s: seconds that `load_sharded_pipelined` waits for one parameter before it is an error.

    Raises:
        CheckpointError: there is no such checkpoint, or its index is damaged.
    """

    def __init__(
        self, path: str | Path, cache_dir: str | Path | None = None, *, stall_timeout_s: float = 600.0
    ) -> None:
        self.path = _resolve(path, cache_dir)
        self.stall_timeout_s = stall_timeout_s
        self.stats = LoadStats()
        self._index: dict[str, Path] | None = None
        if self.path.is_file():
            self.files: tuple[Path, ...] = (self.path,)
        else:
            self.files, self._index = find_files(self.path)

    def validate(self) -> None:
        """Check every file from its header alone: whole, well formed, and what the index says. Reads no data.

        Raises:
            CheckpointError: names every file that is damaged, and how.
        """
        _ = self._entries

    def keys(self) -> list[str]:
        """The keys of the checkpoint, sorted (CheckpointError as for `validate`)."""
        return sorted(self._entries)

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of one tensor (CheckpointError where there is none of that name)."""
        return self._entry(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of one tensor (CheckpointError where there is none of that name)."""
        return self._entry(key).torch_dtype

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors in the checkpoint's dtypes, in memory of their own: for a few small ones.

        Raises:
            CheckpointError: there is none of such a name.
        """
        reader = SliceReader()
        return {key: reader.read(self._entry(key), ...).clone() for key in keys}

    def load_sharded(
        self,
        rank: int,
        world_size: int,
        model: nn.Module,
        mappings: Mapping[str, str | Sequence[str]],
        device: torch.device | str,
        dtype_override: torch.dtype | None = None,
        strict: bool = True,
    ) -> LoadResult:
        """Make this rank's shard of every parameter of `model`, one after the other.

        Each parameter's loader (`set_weight_loader`) decides which slices it takes; shape and dtype are those of the
        parameter, which is usually on the meta device. Buffers are not loaded.

        Args:
            rank: this process, `0 <= rank < world_size`; loaders take their shard index from it.
            world_size: number of processes.
            model: the module whose `named_parameters()` are made.
            mappings: parameter name to the checkpoint key, or the list of keys, that it is made from. It must name
                every parameter, and no key twice.
            device: where the tensors go.
            dtype_override: dtype of the floating-point parameters, instead of their own.
            strict: a key that the checkpoint lacks is an error; otherwise its parameter is left out.

        Raises:
            CheckpointError: names parameter, key and file, and what was expected and found.
        """
        plan = self._plan(rank, world_size, model, mappings, dtype_override, strict)
        reader = SliceReader()
        made = {read.name: reader.make_parameter(read, rank).to(device) for read in plan.in_file_order()}
        return self._result(plan, made, reader)

    def load_sharded_pipelined(
        self,
        rank: int,
        world_size: int,
        model: nn.Module,
        mappings: Mapping[str, str | Sequence[str]],
        device: torch.device | str,
        dtype_override: torch.dtype | None = None,
        strict: bool = True,
    ) -> LoadResult:
        """As `load_sharded`, same result bit for bit, in three stages that overlap.

        A thread asks the page cache for the byte ranges of the next parameters; a second reads slices, casts them and
        makes the parameter; the calling thread moves it to the device. A few parameters are in flight at most. An
        error of any stage stops the others and is raised here.
        """
        plan = self._plan(rank, world_size, model, mappings, dtype_override, strict)
        pipeline = Pipeline(self.stall_timeout_s)
        requested, ready = Channel(pipeline, _PREFETCH_AHEAD), Channel(pipeline, _READ_AHEAD)
        page_cache, reader = PageCache(), SliceReader()

        def prefetch() -> None:
            with closing(page_cache):
                for read in plan.in_file_order():
                    pipeline.doing["prefetch"] = str(read)
                    for byte_range in planned_ranges(read, rank):
                        page_cache.request(byte_range)
                    requested.put(read)
            pipeline.doing["prefetch"] = "done"
            requested.end()

        def slice_read() -> None:
            for read in requested.items():
                pipeline.doing["read"] = str(read)
                ready.put((read.name, reader.make_parameter(read, rank)))
            pipeline.doing["read"] = "done"
            ready.end()

        made = self._consume(pipeline, ready, {"prefetch": prefetch, "read": slice_read}, device)
        self.stats.bytes_prefetched += page_cache.bytes_requested
        return self._result(plan, made, reader)

    def _consume(
        self, pipeline: Pipeline, ready: Channel, stages: Mapping[str, Callable[[], None]], device: torch.device | str
    ) -> dict[str, Tensor]:
        made = {}
        try:
            for name, stage in stages.items():
                pipeline.start(name, stage)
            for name, value in ready.items(pipeline.stall_timeout_s):
                made[name] = value.to(device)
        except StageStoppedError:
            assert pipeline.error is not None
            if isinstance(pipeline.error, CheckpointError):
                raise pipeline.error from pipeline.error.__cause__
            raise CheckpointError(
                f"{self.path}: loading failed: {pipeline.error!r} ({pipeline.progress()})"
            ) from pipeline.error
        except TimeoutError as error:
            raise CheckpointError(f"{self.path}: loading stalled: {error}") from error
        finally:
            pipeline.stop()
            pipeline.join(timeout_s=5.0)
        return made

    @cached_property
    def _entries(self) -> dict[str, TensorEntry]:
        problems: list[str] = []
        entries: dict[str, TensorEntry] = {}
        for file in self.files:
            try:
                header = read_header(file)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            if self._index is None:
                both = sorted(header.keys() & entries.keys())
                if both:
                    where = f"{entries[both[0]].file.name} and {file.name}"
                    problems.append(f"{self.path}: {len(both)} tensor(s) are both in {where}: {both[0]!r} …; keep one")
                entries.update(header)
                continue
            listed = {key for key, place in self._index.items() if place == file}
            absent = sorted(listed - header.keys())
            if absent:
                problems.append(f"{file}: lacks {len(absent)} tensor(s) that the index says it holds: {absent[0]!r} …")
            unlisted = sorted(header.keys() - listed)
            if unlisted:
                logger.warning("%s: the index does not list %d tensor(s) in it, which are ignored: %s …",
                               file, len(unlisted), unlisted[0])  # fmt: skip
            entries.update({key: header[key] for key in listed & header.keys()})
        if problems:
            raise CheckpointError("\n".join(problems))
        return entries

    def _entry(self, key: str) -> TensorEntry:
        if key not in self._entries:
            raise CheckpointError(f"{self.path}: has no tensor {key!r}")
        return self._entries[key]

    def _plan(
        self,
        rank: int,
        world_size: int,
        model: nn.Module,
        mappings: Mapping[str, str | Sequence[str]],
        dtype_override: torch.dtype | None,
        strict: bool,
    ) -> LoadPlan:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not a rank of world size {world_size}; valid: 0 to {world_size - 1}")
        return plan_load(str(self.path), self._entries, model, mappings, dtype_override, strict)

    def _result(self, plan: LoadPlan, made: Mapping[str, Tensor], reader: SliceReader) -> LoadResult:
        self.stats.parameters += len(made)
        self.stats.bytes_read += reader.bytes_read
        ordered = {read.name: made[read.name] for read in plan.reads}
        return LoadResult(ordered, plan.missing_keys, plan.unexpected_keys)


def _resolve(path: str | Path, cache_dir: str | Path | None) -> Path:
    local = Path(path)
    if local.exists():
        return local
    if not _HUB_NAME.fullmatch(str(path)) or local.parent.exists():
        raise CheckpointError(f"{path}: there is no such folder or file")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{path}: there is no such folder; to fetch it from the Hugging Face Hub, install huggingface_hub"
        ) from error
    try:
        patterns = ["*.safetensors", "*.safetensors.index.json"]
        return Path(snapshot_download(str(path), allow_patterns=patterns, ignore_patterns=["*/*"], cache_dir=cache_dir))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: there is no such folder, and it was not fetched from the Hugging Face Hub: {error}"
        ) from error
