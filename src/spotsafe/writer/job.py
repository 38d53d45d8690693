"""What the writer needs to know of a save: plain values that a thread or another process can take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spotsafe.checkpoint.branch import Branch
from spotsafe.checkpoint.index import FileEntry, TensorEntry
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.policy.retention import Keep


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """A data file that lies ready in the arena, byte for byte."""

    name: str
    arena_offset: int
    """Multiple of 4096. Of a save that is streamed, it would be that of an arena that had room for all of it."""
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A file with frozen tensors that lies on storage."""

    checkpoint: str
    """Name of the checkpoint in whose folder it lies."""
    seen_in: str
    """Name of the checkpoint whose manifest vouches for it: that one, or another that refers to it."""
    size: int
    digests: tuple[str, ...]
    age_s: float
    """Seconds of run time since it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenFile:
    """A data file with tensors that do not change: written, or only referred to."""

    name: str
    size: int
    arena_offset: int | None
    """Where it lies ready in the memory for frozen tensors; None if it has not changed and was not staged again."""
    held: Held | None
    """Where the same bytes may lie already."""


class HealthSpan(NamedTuple):
    """Bytes in the arena to be searched for NaN and infinity."""

    tensor: str
    arena_offset: int
    nbytes: int
    dtype: str
    role: str
    """`parameter`, `moment` or `buffer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """One save, completely staged."""

    name: CheckpointName
    run: str
    parent: str | None
    reason: str
    created: float
    world_size: int
    rank: int
    metrics: Mapping[str, float]
    files: tuple[StagedFile, ...]
    tensors: tuple[TensorEntry, ...]
    state: Mapping[str, Any]
    session: Any
    health: tuple[HealthSpan, ...]
    nonfinite_before: frozenset[str]
    """Names that were already nonfinite where the attempt began; they do not make a save unhealthy."""
    keep: Keep
    resumed_from: str | None
    """Name of the checkpoint resumed from, for retention's rule about it."""
    passed_over: frozenset[str] = field(default_factory=frozenset)
    """Names that the resume passed over; retention does not touch them."""
    rollbacks: Branch = ()
    """The rollbacks that count; retention does not touch what they set aside."""
    frozen: tuple[FrozenFile, ...] = ()
    """Files beside `files`, whose tensors are in `tensors` too."""
    streamed: bool = False
    """Whether the arena holds one file at a time, from its beginning on. Then none is frozen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """How a save ended."""

    name: CheckpointName
    published: bool
    healthy: bool
    total_bytes: int
    """Bytes of the data files that were to be written; those that are only referred to do not count."""
    write_s: float
    superseded_by: int | None = None
    """The newer attempt that exists, if one was seen before or after the publish."""
    error: BaseException | None = None
    abandoned: bool = False
    """Whether its state was never all there; who copied it tells why."""
    frozen: tuple[FileEntry, ...] = ()
    """The files with frozen tensors, as the index has them; empty if the save did not come so far."""
