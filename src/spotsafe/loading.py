"""`spotsafe.load`: a checkpoint, or a part of it, without the program that made it."""

from __future__ import annotations

import difflib
import fnmatch
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from spotsafe.checkpoint.candidates import Candidate, read_candidate, read_index
from spotsafe.checkpoint.catalog import resolve, split_target
from spotsafe.checkpoint.index import Index, Slice, TensorEntry, tiling_problem
from spotsafe.checkpoint.index_values import entries_by_name
from spotsafe.checkpoint.layout import MANIFEST
from spotsafe.checkpoint.naming import Contents, Json, contents
from spotsafe.checkpoint.ranges import Range, check_sizes, read_ranges
from spotsafe.checkpoint.room import check_room, room_for
from spotsafe.checkpoint.typed_values import tensor_names
from spotsafe.errors import CheckpointNotFound, DamagedCheckpoint, StateMismatch, StorageNotFound
from spotsafe.storage.open import open_store
from spotsafe.storage.store import Store
from spotsafe.tensors.filling import read_filled
from spotsafe.tensors.memory import new_bytes, view_of
from spotsafe.tensors.pause import collection_paused
from spotsafe.tensors.source import Source
from spotsafe.tensors.tree import torch_dtype

_T = TypeVar("_T")
_TRIES = 10
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A published checkpoint whose indexes have been read and verified; of its data nothing has."""

    store: Store
    candidate: Candidate
    indexes: tuple[Index, ...]
    contents: Contents

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return str(self.candidate.name)

    def tensors(self) -> dict[str, list[TensorEntry]]:
        """What the ranks wrote of each tensor."""
        return entries_by_name(self.indexes)


def load(
    url: str | os.PathLike[str] | Store, names: str | Iterable[str] | None = None
) -> dict[str, torch.Tensor | Any]:
    """Load a checkpoint, or a part of it, without building the model.

    ::

        spotsafe.load("s3://bucket/run-0412", "model.encoder.*")     # the newest checkpoint
        spotsafe.load("runs/gpt@4000", ["scheduler.last_epoch", "optimizer.*.exp_avg"])
        spotsafe.load("runs/gpt@best:val_loss")                      # everything

        weights = spotsafe.load("runs/gpt", "model.*")
        model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})

    Only the blocks (16 MiB, unless the checkpoint says otherwise) that hold what was asked for are read, and every
    byte that is returned was compared with its digest. Nothing is written and no attempt is claimed, so a run that
    is alive is not disturbed. No code of the checkpoint runs.

    Args:
        url: the run, with ``@latest`` (the default), ``@best``, ``@<step>`` or ``@<a checkpoint's name>`` behind it.
        names: which values: names as ``spotsafe show`` prints them, or patterns with ``*``, ``?`` and ``[...]``, in
            which ``*`` stands for dots too. None is everything.

    Returns:
        Name -> value, in the checkpoint's order. Tensors have the dtype that was saved, lie in the memory of this
        machine whatever device they were on, and are new, but two names of one tied tensor give one object. Other
        values have the types that were saved; of an Enum or a dataclass, whose class only its program has, one gets
        the fields in an object with `class_name` and `value`.

    Raises:
        CheckpointNotFound: there is no such checkpoint, or it was deleted while it was read.
        StateMismatch: it holds nothing of a name or pattern (a ValueError); names the nearest.
        DamagedCheckpoint: bytes differ from what was published. No older checkpoint is taken instead.
        UnsupportedFormat: a newer spotsafe wrote it.
        NotEnoughMemory: what was asked for does not fit into memory.
        StorageError: it could not be read.
    """
    return with_checkpoint(url, lambda opened: decode(opened, _choose(opened, names)))


def with_checkpoint(url: str | os.PathLike[str] | Store, read: Callable[[Opened], _T]) -> _T:
    """What `read` makes of the checkpoint that a url names; of another one if that is deleted meanwhile.

    What was named by its step or its full name is not exchanged for another.

    Raises:
        CheckpointNotFound: there is none like that, or it was deleted while it was read.
        DamagedCheckpoint: its manifest, an index or a file is not what was published.
        UnsupportedFormat: a newer spotsafe wrote it.
        StorageError: it could not be read.
    """
    base, selector = (url, None) if isinstance(url, Store) else split_target(os.fspath(url))
    return with_selected(open_store(base), selector, read)


def with_selected(store: Store, selector: str | int | None, read: Callable[[Opened], _T]) -> _T:
    """The same with the store and what is selected of it given apart, as `split_target` gives them.

    Raises:
        As `with_checkpoint`.
    """
    for _ in range(_TRIES):
        candidate = resolve(store, selector)
        try:
            return read(_open(store, candidate))
        except StorageNotFound as error:
            _refuse_if_still_there(store, candidate, error)
            if isinstance(selector, int) or selector == str(candidate.name):
                gone = f"{store.url}: {candidate.name} was deleted while it was read"
                raise CheckpointNotFound(gone) from error
    raise CheckpointNotFound(
        f"{store.url}: {_TRIES} times a checkpoint vanished while it was read; does a job keep too few of them?"
    )


def _refuse_if_still_there(store: Store, candidate: Candidate, error: StorageNotFound) -> None:
    if read_candidate(store, candidate.name).manifest is not None:
        file = (error.path or str(error)).rpartition("/")[2]
        raise DamagedCheckpoint(checkpoint=str(candidate.name), file=file, reason="is missing") from error


def _open(store: Store, candidate: Candidate) -> Opened:
    assert candidate.manifest is not None, "`resolve` answers only published checkpoints"
    parts = sorted(candidate.manifest.parts, key=lambda part: part.rank)
    indexes = tuple(read_index(store, candidate, part) for part in parts)
    with collection_paused():
        problem = tiling_problem(indexes) if indexes else "it lists no index"
    if problem is not None:
        file = parts[0].file if parts else MANIFEST
        raise DamagedCheckpoint(checkpoint=str(candidate.name), file=file, reason=problem)
    with collection_paused():
        named = contents(indexes, checkpoint=str(candidate.name))
    return Opened(store=store, candidate=candidate, indexes=indexes, contents=named)


def read_tensors(opened: Opened, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Read and verify tensors by their names in the index, each into memory of its own.

    Raises:
        StorageNotFound: a file is not there.
        DamagedCheckpoint: bytes differ from what was published.
        NotEnoughMemory: they do not fit.
        StorageError: they could not be read.
    """
    with collection_paused():
        entries, name = opened.tensors(), opened.candidate.name
        wanted = {one: entries[one] for one in names}
        files: dict[str, int] = defaultdict(int)
        for piece in (piece for parts in wanted.values() for entry in parts for piece in entry.slices):
            files[piece.file] += piece.nbytes
    check_sizes(opened.store, name, opened.indexes, files)
    what = f"{opened.name} (of {', '.join(sorted(files)[:_SHOWN])})"
    check_room(sum(files.values()), what=what)
    return read_filled(opened.store, name, opened.indexes, wanted, what=what)


def read_slices(opened: Opened, wanted: Sequence[tuple[TensorEntry, Slice]]) -> list[torch.Tensor]:
    """Read and verify single slices, each as a tensor of its own shape.

    Raises:
        As `read_tensors`.
    """
    check_sizes(opened.store, opened.candidate.name, opened.indexes, {piece.file for _, piece in wanted})
    with room_for(f"{len(wanted)} slices of {opened.name}", by_torch=True):
        memory = [new_bytes(piece.nbytes) for _, piece in wanted]
    ranges = [
        Range(piece.file, piece.start, view_of(data)) for (_, piece), data in zip(wanted, memory, strict=True)
    ]
    read_ranges(opened.store, opened.candidate.name, opened.indexes, ranges)
    return [
        data.view(torch_dtype(entry.dtype)).view(piece.lengths)
        for (entry, piece), data in zip(wanted, memory, strict=True)
    ]


def decode(opened: Opened, nodes: Mapping[str, Json]) -> dict[str, Any]:
    """The values of typed JSON of a checkpoint, with all of their tensors read.

    Raises:
        As `read_tensors`.
    """
    # In their order and not in that of a set, which would send the memory of fifty thousand through the cache twice.
    tensors = read_tensors(opened, dict.fromkeys(tensor_names(list(nodes.values()))))
    source = Source(tensors, on_cpu=True, copy=False, lenient=True)
    try:
        with collection_paused():
            return {name: source.decode(node) for name, node in nodes.items()}
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(checkpoint=opened.name, file="index-*.json", reason=error.reason) from error


# -- which values ------------------------------------------------------------------------------------------------


def _choose(opened: Opened, names: str | Iterable[str] | None) -> dict[str, Json]:
    held = opened.contents
    if names is None:
        return dict(held.values)
    everything = {**held.values, **held.inner}
    wanted: set[str] = set()
    problems = []
    for name in [names] if isinstance(names, str) else names:
        found = {name} if name in everything else set(fnmatch.filter(everything, name))
        if not found:
            problems.append(f"{name!r}{_nearest(name, everything)}")
        wanted |= found
    if problems:
        raise StateMismatch(
            f"checkpoint {opened.name} of {opened.store.url} holds nothing named {'; '.join(problems)}. "
            "`spotsafe show` prints all of its names",
            problems=problems,
        )
    return {name: node for name, node in everything.items() if name in wanted}


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    if any(one.startswith((f"{name}.", f"{name}[")) for one in names):
        return f" (did you mean {name + '.*'!r}?)" if f"{name}[" not in name else ""
    near = difflib.get_close_matches(name, names, n=3) or names[:_SHOWN]
    return f" (nearest: {', '.join(map(repr, near))})" if near else " (it holds nothing at all)"
