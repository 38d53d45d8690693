"""The writing half of `spotsafe.integrations.dcp`.

Every rank writes its data files. The coordinator, rank 0, claims the attempt, names the checkpoint, and at the end,
when all ranks are done, writes the index that holds all names and values, and the manifest.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from spotsafe.checkpoint.catalog import run_url
from spotsafe.checkpoint.digest import BLOCK, block_digests, sha256_hex
from spotsafe.checkpoint.index import FileEntry, Index, TensorEntry, encode_index, tiling_problem
from spotsafe.checkpoint.layout import CheckpointName, index_file
from spotsafe.checkpoint.manifest import Health, Manifest, Part
from spotsafe.errors import StorageError, UnsupportedState
from spotsafe.exchange.dcp_names import nest
from spotsafe.identity import new_nonce
from spotsafe.integrations.dcp_attempt import REASON, attempt_of, end_attempt, known_attempt, spans_of
from spotsafe.policy.retention import Keep, parse_keep
from spotsafe.storage.open import open_store
from spotsafe.storage.store import Store
from spotsafe.tensors.plan import MAX_FILE_BYTES, SavePlan as FilePlan, TensorSpec, plan_save, specs_of
from spotsafe.tensors.staging import stage
from spotsafe.tensors.tree import PLAIN, Capture, Collector, Json, NamedTensor, dtype_name
from spotsafe.writer.arena import Arena
from spotsafe.writer.beside import beside
from spotsafe.writer.health import scan

_NUMBER = re.compile(r"(\d+)/*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assignment:
    """What the coordinator tells a rank to write."""

    name: CheckpointName
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """What a rank tells the coordinator that it wrote."""

    assignment: _Assignment
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    nodes: Mapping[str, Json]
    """fqn -> typed JSON; a tensor is a reference."""
    part: Part | None
    """The rank's index. The coordinator writes its own at the end; a rank without tensors has none."""
    nonfinite: frozenset[str]
    """Names of tensors of which this rank wrote a NaN or an infinity."""


@dataclass(slots=True)
class _Collected:
    """The values of one rank's plan on their way to files."""

    collector: Collector = field(default_factory=Collector)
    pieces: list[tuple[TensorSpec, torch.Tensor]] = field(default_factory=list)
    nodes: dict[str, Json] = field(default_factory=dict)

    def plan(self, rank: int, max_file_bytes: int) -> tuple[FilePlan, Capture]:
        """Where everything goes, and the live tensors."""
        named = tuple(NamedTensor(name=spec.name, tensor=tensor) for spec, tensor in self.pieces)
        capture = Capture(state={}, tensors=(*self.collector.tensors, *named))
        specs = [*specs_of(self.collector.tensors), *(spec for spec, _ in self.pieces)]
        return plan_save(specs, rank=rank, max_file_bytes=max_file_bytes), capture


class SpotsafeWriter(StorageWriter):
    """A `StorageWriter` that makes spotsafe checkpoints in one run.

    The run is claimed once, at the first save; an older writer of the same run then ends with `Superseded` at its
    next save. Each `dcp.save` is a new checkpoint, also for an id that was saved before. Works with `dcp.save` and
    `dcp.async_save`, with and without a process group. Tensors of which every rank holds a shard are stored as
    slices; whole tensors that are one in memory once.

    From the claim on a heartbeat tells other jobs that the run is in use, until `close`, the end of the writer or
    of the process. The first save deletes what older attempts left behind unpublished. A checkpoint with a NaN or an
    infinity in a tensor that was finite before is marked as unhealthy, and warned of.

    Args:
        url: the run: a path, an fsspec url or a `Store`; the same on all ranks.
        step: of the next saves. Where the `checkpoint_id` of a save ends in a number, that is its step.
        keep: which older checkpoints stay, as for a session; None keeps all.
        max_file_bytes: a data file is not larger, unless a single row is.
        takeover: save also where another job seems to be alive, or where the newest checkpoint is a session's.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Store,
        *,
        step: int | None = None,
        keep: Keep | int | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        takeover: bool = False,
    ) -> None:
        self.step = step
        self.checkpoint_id: str | os.PathLike[str] | None = None
        self._step_of_id: int | None = None
        self._url, self._max_file_bytes = run_url(url), max_file_bytes
        self._keep = None if keep is None else parse_keep(keep)
        self._token = new_nonce()  # tells this writer from another one, in whatever process it is used
        self._takeover = takeover
        self._written: set[CheckpointName] = set()
        # Not of copies that travel to another process, at every save a new one: there the process's end counts.
        weakref.finalize(self, end_attempt, self._token, timeout_s=0.0).atexit = False

    def close(self) -> None:
        """Record the end of the attempt, so that the next job need not wait for a heartbeat. Nothing is saved after."""
        end_attempt(self._token, timeout_s=10.0)

    # -- what torch.distributed.checkpoint calls, in this order ---

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A save begins; a number at the end of its id is the step."""
        self.checkpoint_id = checkpoint_id
        self._step_of_id = None if checkpoint_id is None else step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
        """Refuse what cannot be one checkpoint.

        Raises:
            ValueError: with ``use_collectives=False`` no rank would know of the others.
        """
        del is_coordinator
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "use_collectives=False makes a checkpoint of each rank; spotsafe makes one of all"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the run if that is not done, and name the checkpoint (coordinator).

        Raises:
            RunInUse: another job is alive on the run, or it is a session's.
            ValueError: nobody says which step it is, or the writer is closed.
        """
        name, world_size = self._next_name(), len(plans)
        return [
            dataclasses.replace(plan, storage_data=_Assignment(name=name, rank=rank, world_size=world_size))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors, and its index unless it is the coordinator.

        Raises:
            UnsupportedState: a value that cannot be stored; names its fqn.
            StorageError: it could not be written.
        """
        assignment = plan.storage_data
        if not isinstance(assignment, _Assignment) or assignment.name in self._written:
            raise ValueError(
                "the planner used a plan of an earlier save, which names another checkpoint: make it without "
                "enable_plan_caching=True"
            )
        self._written.add(assignment.name)
        collected = _Collected()
        for item in plan.items:
            _collect(item, planner, collected)
        written = self._write(assignment, collected)
        size = sum(file.size for file in written.files)
        result = WriteResult(index=MetadataIndex(fqn=""), size_in_bytes=size, storage_data=written)
        future: Future[list[WriteResult]] = Future()
        future.set_result([result])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of all names and values, and publish (coordinator).

        Raises:
            Superseded: a newer writer has claimed the run.
            UnsupportedState: the ranks' pieces are not exactly the tensors.
            StorageError: it is not known whether the checkpoint was published.
        """
        ranks: list[_Written] = [one.storage_data for rank in results for one in rank]
        store, first = open_store(self._url), ranks[0].assignment
        part = _write_index(store, first, _first_index(metadata, ranks))
        parts = (part, *(one.part for one in ranks if one.part is not None))
        attempt = known_attempt(self._token)
        health = attempt.health(first.name, frozenset().union(*(one.nonfinite for one in ranks)))
        metadata.storage_meta = self.storage_meta()
        attempt.publish(_manifest(attempt.record.run, first, parts, ranks, health), keep=self._keep)

    def storage_meta(self) -> StorageMeta:
        """What DCP hands to planners and shows."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any text may be an id."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    # -- inside ---

    def _next_name(self) -> CheckpointName:
        step = self.step if self._step_of_id is None else self._step_of_id
        self._step_of_id = None  # DCP says nothing to a writer whose next save has no id
        if step is None:
            raise ValueError(
                f"which step is this? End checkpoint_id in a number (got {self.checkpoint_id!r}), or set step="
            )
        return attempt_of(self._token, open_store(self._url), takeover=self._takeover).next_name(step)

    def _write(self, assignment: _Assignment, collected: _Collected) -> _Written:
        store = open_store(self._url)
        plan, capture = collected.plan(assignment.rank, self._max_file_bytes)
        arena = Arena(plan.arena_size)
        try:
            stage(plan, capture, arena.view)
            with beside(plan.arena_size) as begin:
                spans = tuple(spans_of(plan.files, plan.tensors))
                scanned = begin(partial(scan, spans, arena=arena.view))
                files = tuple(
                    _write_file(
                        store,
                        assignment.name.file(file.name),
                        arena.view[file.arena_offset : file.arena_offset + file.size],
                    )
                    for file in plan.files
                )
                nonfinite = scanned.result().state
        finally:
            arena.close()
        part = None
        if assignment.rank and plan.tensors:
            index = Index(rank=assignment.rank, block_size=BLOCK, files=files, tensors=plan.tensors)
            part = _write_index(store, assignment, index)
        return _Written(
            assignment=assignment,
            files=files,
            tensors=plan.tensors,
            nodes=collected.nodes,
            part=part,
            nonfinite=nonfinite,
        )


def step_of(checkpoint_id: str | os.PathLike[str]) -> int | None:
    """The number at the end of an id, such as 4000 of ``run/step-4000``."""
    match = _NUMBER.search(os.fspath(checkpoint_id))
    return None if match is None else int(match[1])


def _collect(item: WriteItem, planner: SavePlanner, collected: _Collected) -> None:
    fqn = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        # `resolve_data` would give it pickled.
        find = getattr(planner, "lookup_object", None)
        if find is None:
            raise UnsupportedState(
                f"{fqn}: {type(planner).__name__} gives values pickled only; derive it from DefaultSavePlanner",
                path=fqn,
            )
        collected.nodes[fqn] = collected.collector.encode(find(item.index), fqn)
        return
    tensor = planner.resolve_data(item)
    if (
        not isinstance(tensor, torch.Tensor)
        or type(tensor) not in PLAIN
        or tensor.layout is not torch.strided
    ):
        raise UnsupportedState(
            f"{fqn} is a {type(tensor).__name__} of layout {getattr(tensor, 'layout', None)}; save plain tensors",
            path=fqn,
        )
    assert item.tensor_data is not None, "a tensor without a shape"
    tensor, whole, chunk = tensor.detach(), tuple(item.tensor_data.size), item.tensor_data.chunk
    if tuple(chunk.sizes) == whole:
        collected.nodes[fqn] = collected.collector.tensor(tensor, fqn)
    else:
        spec = TensorSpec(
            fqn, dtype_name(tensor.dtype), tuple(tensor.shape), "other", whole, tuple(chunk.offsets)
        )
        collected.pieces.append((spec, tensor))
        collected.nodes[fqn] = {"$": "tensor", "name": fqn}


def _write_file(store: Store, path: str, data: memoryview) -> FileEntry:
    store.put_large(path, data)
    _confirm(store, path, len(data))
    return FileEntry(name=path.rpartition("/")[2], size=len(data), digests=block_digests(data))


def _write_index(store: Store, assignment: _Assignment, index: Index) -> Part:
    data = encode_index(index)
    part = Part(rank=index.rank, file=index_file(index.rank), size=len(data), sha256=sha256_hex(data))
    path = assignment.name.file(part.file)
    store.put(path, data)
    _confirm(store, path, len(data))
    return part


def _confirm(store: Store, path: str, size: int) -> None:
    found = store.size(path)
    if found != size:
        raise StorageError(f"{path} has {found} bytes after {size} were written to it", path=path)


def _first_index(metadata: Metadata, ranks: Sequence[_Written]) -> Index:
    """The coordinator's index: its tensors, all other tensors by name, and every value."""
    nodes = {fqn: node for one in ranks for fqn, node in one.nodes.items()}
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    own = {entry.name: entry for entry in ranks[0].tensors}
    others = {
        entry.name: msgspec.structs.replace(entry, slices=())
        for one in ranks[1:]
        for entry in one.tensors
        if entry.name not in own
    }
    index = Index(
        rank=0,
        block_size=BLOCK,
        files=ranks[0].files,
        tensors=(*own.values(), *others.values()),
        state=nest((paths.get(fqn, (fqn,)), node) for fqn, node in nodes.items()),
    )
    rest = (Index(rank=1, block_size=BLOCK, files=one.files, tensors=one.tensors) for one in ranks[1:])
    problem = tiling_problem([index, *rest])
    if problem is not None:
        raise UnsupportedState(f"what the ranks hold does not make whole tensors: {problem}")
    return index


def _manifest(
    run: str, first: _Assignment, parts: tuple[Part, ...], ranks: Iterable[_Written], health: Health
) -> Manifest:
    name = first.name
    return Manifest(
        run=run,
        attempt=name.attempt,
        step=name.step,
        save=name.save,
        nonce=name.nonce,
        parent=None,
        created=time.time(),
        world_size=first.world_size,
        reason=REASON,
        health=health,
        parts=parts,
        total_bytes=sum(file.size for one in ranks for file in one.files),
    )
