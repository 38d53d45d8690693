"""Choosing the checkpoint to resume from, and reading it whole and verified before anything is loaded.

The rules are those of docs/DESIGN.md, section 3: the newest healthy one first, damage is believed after a
second read, and a storage error, a lack of memory or an unknown version is never taken for damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from spotsafe.checkpoint.blocks import check_size, finish, readers
from spotsafe.checkpoint.branch import Branch, gone_back_to
from spotsafe.checkpoint.candidates import (
    Candidate,
    Decoded,
    Listing,
    candidates,
    read_candidate,
    read_index,
)
from spotsafe.checkpoint.index import FileEntry, Index, tiling_problem
from spotsafe.checkpoint.index_values import entries_by_name
from spotsafe.checkpoint.layout import CheckpointName, is_frozen_file
from spotsafe.checkpoint.manifest import Manifest
from spotsafe.checkpoint.read_progress import ReadProgress
from spotsafe.checkpoint.room import check_room
from spotsafe.clock import Clock, SystemClock
from spotsafe.errors import (
    DamagedCheckpoint,
    NoUsableCheckpoint,
    StorageNotFound,
    UnsupportedFormat,
)
from spotsafe.events import CheckpointPassedOver, Event, RestoreStarted, RestoreVerified
from spotsafe.storage.store import Store
from spotsafe.tensors.filling import read_filled
from spotsafe.tensors.pause import collection_paused
from spotsafe.tensors.source import Source
from spotsafe.tensors.tree import Json, SavedState, Spec

Emit = Callable[[Event], object]

THREADS = 8
"""Blocks read and digested at the same time."""
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The checkpoint to resume from."""

    candidate: Candidate
    """Its manifest is there and readable."""
    newest: CheckpointName
    """The newest checkpoint that exists, usable or not."""
    passed_over: Mapping[str, str]
    """Name -> reason of each newer checkpoint that is there and will not be used."""
    unhealthy_passed_to: str | None
    """If an unhealthy one was passed over: the name of the healthy one that was chosen instead."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return str(self.candidate.name)

    @property
    def manifest(self) -> Manifest:
        """What was published."""
        assert self.candidate.manifest is not None
        return self.candidate.manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a checkpoint holds, without its data."""

    tensors: Mapping[str, Spec]
    """Name -> dtype and shape."""
    state: Mapping[str, Json]
    session: Json
    """Typed JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint in memory, every byte of it verified."""

    name: CheckpointName
    manifest: Manifest
    saved: SavedState
    session: Json
    """The session's own values as typed JSON; `session_values` decodes them."""
    frozen: tuple[FileEntry, ...] = ()
    """The files with frozen tensors, its own and those that it refers to."""

    def session_values(self) -> dict[str, object] | None:
        """The session's own values, in memory of their own; None if no session wrote the checkpoint."""
        values: dict[str, object] | None = Source(self.saved.tensors).decode(self.session)
        return values


# -- choosing ----------------------------------------------------------------------------------------------------


def choose(
    store: Store,
    listing: Listing,
    *,
    run: str | None = None,
    emit: Emit | None = None,
    unusable: Mapping[str, str] | None = None,
    branch: Branch = (),
) -> Choice | None:
    """The checkpoint to resume from, by the manifests alone: the newest healthy, else the newest.

    Args:
        store: the run.
        listing: a look at it.
        branch: the rollbacks that count. What they set aside is not there; the health of the checkpoint that was
            gone back to is not judged, for a person chose it.
        run: the run's id, if it is known: a checkpoint of another run that got into this folder is passed over.
        emit: told about each one that is passed over.
        unusable: names whose data proved damaged or missing, with the reason.

    Returns:
        None if no checkpoint is there (`check_history` then says whether one ever was).

    Raises:
        NoUsableCheckpoint: there are some, none can be used.
        UnsupportedFormat: a newer spotsafe wrote one that might be the right one.
        StorageError: one could not be read.
    """
    reasons: dict[str, str] = {}
    choice = pick(
        candidates(store, listing, branch),
        run=run,
        unusable=unusable or {},
        reasons=reasons,
        trusted=gone_back_to(branch),
    )
    if choice is None and reasons:
        raise _none_usable(store, reasons)
    if choice is not None and emit is not None:
        for name, reason in choice.passed_over.items():
            emit(CheckpointPassedOver(checkpoint=name, reason=reason))
    return choice


def pick(
    found: Iterable[Candidate],
    *,
    unusable: Mapping[str, str],
    reasons: MutableMapping[str, str],
    run: str | None = None,
    trusted: str | None = None,
) -> Choice | None:
    """The decision itself, on candidates newest first; reads no further than it must.

    Args:
        found: what exists, newest first.
        unusable: names that cannot be used although their manifests can be read.
        reasons: receives why each one that was looked at is not the choice.
        run: the run's id, if it is known.
        trusted: name of one whose health is not judged.

    Raises:
        UnsupportedFormat: one of a newer version comes before the choice.
    """
    newest: CheckpointName | None = None
    sick: Candidate | None = None
    before_sick: dict[str, str] = {}
    for candidate in found:
        name = str(candidate.name)
        newest = newest or candidate.name
        if isinstance(candidate.fault, UnsupportedFormat):
            raise candidate.fault
        reason = candidate.reason or unusable.get(name, "") or _stranger(candidate, run)
        manifest = candidate.manifest
        if not reason and name != trusted and manifest is not None and not manifest.health.healthy:
            reason = _sick(manifest)
            if sick is None:
                sick, before_sick = candidate, dict(reasons)
        if not reason:
            to = name if sick is not None else None
            return Choice(
                candidate=candidate, newest=newest, passed_over=dict(reasons), unhealthy_passed_to=to
            )
        reasons[name] = reason
    if sick is None or newest is None:
        return None
    return Choice(candidate=sick, newest=newest, passed_over=before_sick, unhealthy_passed_to=None)


def _stranger(candidate: Candidate, run: str | None) -> str:
    manifest = candidate.manifest
    if run is None or manifest is None or manifest.run == run:
        return ""
    return (
        f"it is of run {manifest.run}, and this folder is run {run}; init_from= takes values of another run"
    )


def _sick(manifest: Manifest) -> str:
    names = manifest.health.nonfinite
    more = ", ..." if len(names) > _SHOWN else ""
    return f"unhealthy: NaN or infinity in {', '.join(names[:_SHOWN])}{more}"


def _none_usable(store: Store, reasons: Mapping[str, str]) -> NoUsableCheckpoint:
    details = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return NoUsableCheckpoint(
        f"{store.url} has checkpoints, but none can be used: {details}. Nothing was started afresh. "
        "Repair the folder, or use another one",
        url=store.url,
        reasons=reasons,
    )


def load_chosen(
    store: Store,
    choice: Choice,
    *,
    emit: Emit,
    unusable: MutableMapping[str, str],
    threads: int = THREADS,
    decoded: Decoded | None = None,
    clock: Clock | None = None,
) -> Loaded | None:
    """Read the chosen checkpoint; if it cannot be used, note why and return None: choose again.

    Args:
        store: the run.
        choice: from `choose`.
        emit: told about the beginning, the progress and the end.
        unusable: receives name and reason.
        threads: blocks at the same time; with 1 the caller's own thread reads, in a fixed order.
        decoded: of indexes that were read before, as for `read_index`.
        clock: of the session.

    Raises:
        StorageNotFound: a file is gone, and so is the checkpoint: look again and choose again.
        StorageError: it could not be read.
        UnsupportedFormat: its index needs a newer spotsafe.
        NotEnoughMemory: it does not fit into memory.
    """
    try:
        return load_verified(
            store, choice.candidate, emit=emit, threads=threads, decoded=decoded, clock=clock
        )
    except DamagedCheckpoint as error:
        unusable[choice.name] = str(error)
    except StorageNotFound as error:
        if read_candidate(store, choice.candidate.name).manifest is None:
            raise
        unusable[choice.name] = f"{error.path or error} is missing"
    return None


# -- reading -----------------------------------------------------------------------------------------------------


def read_description(store: Store, candidate: Candidate, *, decoded: Decoded | None = None) -> Description:
    """What a checkpoint holds, from its indexes.

    Args:
        store: the run.
        candidate: the checkpoint.
        decoded: of indexes that were read before, as for `read_index`.

    Raises:
        DamagedCheckpoint: an index is not what was published.
        StorageError: one could not be read.
    """
    indexes = _read_indexes(store, candidate, decoded)
    with collection_paused():
        tensors = {entry.name: (entry.dtype, entry.shape) for index in indexes for entry in index.tensors}
    return Description(tensors=MappingProxyType(tensors), state=_state(indexes), session=indexes[0].session)


def load_verified(
    store: Store,
    candidate: Candidate,
    *,
    emit: Emit | None = None,
    threads: int = THREADS,
    decoded: Decoded | None = None,
    clock: Clock | None = None,
) -> Loaded:
    """Read a whole checkpoint into memory and compare every block with its digest.

    Args:
        store: the run.
        candidate: the checkpoint.
        emit: told about the beginning, the progress and the end.
        threads: as for `load_chosen`.
        decoded: of indexes that were read before, as for `read_index`.
        clock: of the session.

    Raises:
        DamagedCheckpoint: bytes differ from what was published, also at a second read.
        StorageNotFound: a file is not there.
        StorageError: it could not be read.
        NotEnoughMemory: it does not fit into memory.
    """
    assert candidate.manifest is not None
    name, manifest, total = candidate.name, candidate.manifest, candidate.manifest.needed_bytes
    emit = _tell_nobody if emit is None else emit  # a list with a `__call__` may be empty
    clock = SystemClock() if clock is None else clock
    started = clock.monotonic()
    emit(RestoreStarted(checkpoint=str(name), total_bytes=total))
    with ReadProgress(str(name), total, emit=emit, clock=clock) as progress:
        indexes = _read_indexes(store, candidate, decoded)
        # Sizes come first: nobody makes room for what an index claims before it is known to be there.
        entries = [entry for index in indexes for entry in index.files]
        with readers(threads) as pool:
            finish([pool.submit(check_size, store, name, entry) for entry in entries], progress=progress)
        _check_room(name, entries)
        tensors = _read_tensors(store, name, indexes, threads, progress)
    emit(RestoreVerified(checkpoint=str(name), seconds=clock.monotonic() - started))
    return Loaded(
        name=name,
        manifest=manifest,
        saved=SavedState(state=_state(indexes), tensors=MappingProxyType(tensors)),
        session=indexes[0].session,
        frozen=tuple(file for index in indexes for file in index.files if is_frozen_file(file.name)),
    )


def _tell_nobody(_: Event) -> None:
    pass


def _read_indexes(store: Store, candidate: Candidate, decoded: Decoded | None) -> list[Index]:
    assert candidate.manifest is not None
    parts = sorted(candidate.manifest.parts, key=lambda part: part.rank)
    indexes = [read_index(store, candidate, part, decoded=decoded) for part in parts]
    with collection_paused():
        problem = tiling_problem(indexes) if indexes else "it lists no index"
    if problem is not None:
        file = parts[0].file if parts else "manifest.json"
        raise DamagedCheckpoint(checkpoint=str(candidate.name), file=file, reason=problem)
    return indexes


def _state(indexes: Sequence[Index]) -> Mapping[str, Json]:
    return MappingProxyType({name: tree for index in indexes for name, tree in index.state.items()})


def _read_tensors(
    store: Store, name: CheckpointName, indexes: Sequence[Index], threads: int, progress: ReadProgress
) -> dict[str, torch.Tensor]:
    """Every tensor in memory of its own, which nothing else shares."""
    with collection_paused():
        wanted = entries_by_name(indexes)
    files = [entry.shown() for index in indexes for entry in index.files]
    what = f"{name} (of {', '.join(files[:_SHOWN])})"
    return read_filled(
        store, name, indexes, wanted, what=what, threads=threads, every_block=True, progress=progress
    )


def _check_room(name: CheckpointName, entries: Sequence[FileEntry]) -> None:
    if entries:
        largest = max(entries, key=lambda entry: entry.size)
        needed = sum(entry.size for entry in entries)
        check_room(needed, what=f"{name} (its largest file is {largest.shown()})")


__all__ = [
    "THREADS",
    "Choice",
    "Description",
    "Loaded",
    "choose",
    "load_chosen",
    "load_verified",
    "pick",
    "read_description",
]
