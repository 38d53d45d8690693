"""Frozen tensors: staged once, then only referred to, as long as they are seen not to have changed.

A parameter without a gradient that no tracked optimizer holds is frozen if it is not small, and so is a large buffer,
until it changes.
What has changed once is saved like everything else from then on: the teacher of a moving average looks frozen too.

A change is seen in three ways. torch counts writes in place (`_version`), and a tensor that was replaced lies
elsewhere: both are looked at before every save. Writes through ``.data`` are counted by nobody: so a sample of each
tensor's items, spread over the whole of it, is compared before every save, which finds whatever changes most of a
tensor. A write that changes a few items only, through ``.data``, is found when everything is staged and digested
again: at every 20th save, and when the files are a day old.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from spotsafe.checkpoint.index_values import TensorEntry
from spotsafe.checkpoint.layout import CheckpointName, frozen_file
from spotsafe.tensors.plan import MAX_FILE_BYTES, PlanCache, SavePlan
from spotsafe.tensors.staging import WORDS, stage
from spotsafe.tensors.tree import Capture, NamedTensor, as_bytes
from spotsafe.writer.arena import Arena
from spotsafe.writer.job import FrozenFile, SaveResult
from spotsafe.writer.lending import HeldFiles

PARAMETER_BYTES = 16 << 10
"""Parameters from this size on may be frozen: to copy a smaller one takes no longer than to look at it."""
BUFFER_BYTES = 1 << 20
"""The same of buffers; smaller ones are mostly statistics, which change."""
_LEAST_BYTES = {"other": PARAMETER_BYTES, "buffer": BUFFER_BYTES}
RECHECK = 20
"""So many saves after it was staged, everything is staged and compared again."""
SAMPLE = 64
"""Items of a tensor that are compared before every save, at most."""


def frozen_names(
    tensors: Iterable[NamedTensor], *, modules: Collection[str], trained: Mapping[int, str]
) -> frozenset[str]:
    """Names of the tensors that no training changes, as far as roles and optimizers tell.

    Args:
        tensors: of a capture.
        modules: paths of the tracked modules; whatever else is tracked may change in its own ways.
        trained: address -> name of every parameter that an optimizer holds.
    """
    prefixes = tuple(f"{path}." for path in modules)
    names = frozenset(trained.values())
    return frozenset(
        one.name
        for one in tensors
        if one.role in _LEAST_BYTES
        and one.name.startswith(prefixes)
        and _may_be_frozen(one)
        and one.tensor.data_ptr() not in trained
        and not _is_part_of(one.name, names)
    )


def address_of(tensor: torch.Tensor) -> int:
    """Where its memory begins; something that is no address if it has none of its own."""
    try:
        return tensor.data_ptr() if tensor.layout is torch.strided else -id(tensor)
    except (RuntimeError, NotImplementedError):  # a subclass that is made of others
        return -id(tensor)


def _may_be_frozen(one: NamedTensor) -> bool:
    nbytes = one.tensor.numel() * one.tensor.element_size()
    return nbytes >= _LEAST_BYTES[one.role] and not one.tensor.is_inference()


def _is_part_of(name: str, names: frozenset[str]) -> bool:
    """Whether `name` is one of `names`, or that of a component of a tensor subclass that is."""
    while name not in names:
        name = name.rpartition(".")[0]
        if not name:
            return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFrozen:
    """The frozen part of a save."""

    files: tuple[FrozenFile, ...] = ()
    tensors: tuple[TensorEntry, ...] = ()
    """For the index."""
    arena: Arena | None = None
    """Where the files lie that are staged; to be closed when the save is written."""

    @property
    def staged_bytes(self) -> int:
        """Bytes that were copied."""
        return 0 if self.arena is None else sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class _Mark:
    """What a tensor looked like: equal marks mean that it has most probably not changed."""

    address: int
    version: int
    layout: tuple[object, ...]
    sample: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A save that staged everything, until it is known how it ended."""

    save: CheckpointName
    plan: SavePlan
    marks: Mapping[str, _Mark]
    unexpected: bool
    """Whether nothing spoke for a change, so that different digests would be news."""


class FrozenTensors:
    """Decides for each save which tensors are frozen, and whether they have to be staged again.

    Args:
        held: what lies on storage already.
        rank: of this process.
        warn: takes one line for people.
        max_file_bytes: what a file does not exceed.
        arena: makes memory of so many bytes to stage them in.
    """

    def __init__(
        self,
        held: HeldFiles,
        *,
        rank: int,
        warn: Callable[[str], None],
        max_file_bytes: int = MAX_FILE_BYTES,
        arena: Callable[[int], Arena] = Arena,
    ) -> None:
        self._arena = arena
        self._held, self._rank, self._warn = held, rank, warn
        self._plans = PlanCache(max_file_bytes=max_file_bytes, named=frozen_file)
        self._changed: set[str] = set()
        self._marks: Mapping[str, _Mark] = {}  # of the content of the held files
        self._plan: SavePlan | None = None  # theirs
        self._pending: _Pending | None = None
        self._saves = 0  # since everything was staged

    @property
    def awaited(self) -> CheckpointName | None:
        """The save that staged everything, until its result is taken or it is forgotten."""
        return None if self._pending is None else self._pending.save

    @property
    def awaits_result(self) -> bool:
        """Whether a save is in flight that staged everything.

        INVARIANT: no other save is made then. It could not refer to the files of that one, which may never be
        published, nor to those before: they may be what that save finds to be changed.
        """
        return self._pending is not None

    def split(self, capture: Capture) -> tuple[Capture, tuple[NamedTensor, ...]]:
        """The capture without frozen tensors, and those; what has changed since it was staged is none any more."""
        candidates = [
            one for one in capture.tensors if one.name in capture.frozen and one.name not in self._changed
        ]
        now = _marks_of(candidates)
        self._changed.update(name for name, mark in now.items() if self._marks.get(name, mark) != mark)
        frozen = [one for one in candidates if one.name not in self._changed]
        frozen.sort(
            key=lambda one: one.role == "buffer"
        )  # they are likelier to leave: what lies before them stays
        if not frozen:
            return capture, ()  # as it is, so that the plan of the last one is seen to be its plan
        names = {one.name for one in frozen}
        moving = tuple(one for one in capture.tensors if one.name not in names)
        return replace(capture, tensors=moving), tuple(frozen)

    def size_of(self, tensors: Sequence[NamedTensor]) -> int:
        """Bytes of memory that it takes to stage them."""
        return self._plans.plan(tensors, rank=self._rank).arena_size if tensors else 0

    def stage(self, tensors: Sequence[NamedTensor], *, save: CheckpointName) -> StagedFrozen:
        """The frozen part of a save; copied only if that is needed.

        Args:
            tensors: from `split`.
            save: its name. None that staged everything is in flight.

        Raises:
            MemoryError: there is no memory to stage it in.
        """
        assert not self.awaits_result, "nobody knows yet which files hold what is frozen"
        if not tensors:
            return StagedFrozen()
        plan = self._plans.plan(tensors, rank=self._rank)
        held = {file.name: self._held.get(file.name) for file in plan.files}
        same = plan is self._plan and None not in held.values()
        arena = self._room(plan, needed=not same) if not same or self._saves + 1 >= RECHECK else None
        if arena is not None:
            stage(plan, Capture(state={}, tensors=tuple(tensors)), arena.view)
            # Again: what is compared later is what was copied.
            self._pending = _Pending(save=save, plan=plan, marks=_marks_of(tensors), unexpected=same)
        files = tuple(
            FrozenFile(
                name=file.name,
                size=file.size,
                arena_offset=None if arena is None else file.arena_offset,
                held=held[file.name],
            )
            for file in plan.files
        )
        return StagedFrozen(files=files, tensors=plan.tensors, arena=arena)

    def _room(self, plan: SavePlan, *, needed: bool) -> Arena | None:
        """Memory to stage it in; None if there is none, where it would only be looked at again."""
        try:
            return self._arena(plan.arena_size)
        except MemoryError:
            if needed:
                raise
            return None

    def forget_staged(self, save: CheckpointName) -> None:
        """A save for which `stage` was called was given up."""
        self._pending_of(save)
        self._plan = None

    def take(self, result: SaveResult) -> None:
        """How a save ended for which `stage` was called; in the order in which they were staged."""
        pending = self._pending_of(result.name)
        if not result.published:
            self._plan = None  # whatever was wrong, the next save has everything at hand
            return
        news = self._held.note_result(result)
        self._saves += 1
        if pending is None:
            return
        self._plan, self._marks, self._saves = pending.plan, pending.marks, 0
        if news and pending.unexpected:
            self._warn(
                f"frozen tensors in {', '.join(news)} were changed through .data, which torch does not count; "
                f"checkpoints of this attempt before {result.name} hold them as they were. Track what changes by "
                "an optimizer, or write it without .data"
            )

    def _pending_of(self, save: CheckpointName) -> _Pending | None:
        pending = self._pending
        if pending is None or pending.save != save:
            return None
        self._pending = None
        return pending


def _marks_of(tensors: Sequence[NamedTensor]) -> dict[str, _Mark]:
    samples = _samples([one.tensor for one in tensors])
    return {
        one.name: _Mark(
            one.tensor.data_ptr(),
            one.tensor._version,  # noqa: SLF001 - torch has no public way
            (one.tensor.shape, one.tensor.stride(), one.tensor.dtype, one.tensor.device),
            sample,
        )
        for one, sample in zip(tensors, samples, strict=True)
    }


def _samples(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Some items of each, as bytes; one transfer for each device."""
    picked = [_picked(tensor) for tensor in tensors]
    found = [b""] * len(tensors)
    for device in {one.device for one in picked}:
        places = [place for place, one in enumerate(picked) if one.device == device]
        data, at = torch.cat([picked[place] for place in places]).cpu().numpy().tobytes(), 0
        for place in places:
            found[place] = data[at : at + len(picked[place])]
            at += len(picked[place])
    return found


def _picked(tensor: torch.Tensor) -> torch.Tensor:
    """At most `SAMPLE` items, spread evenly over all dimensions, as a flat tensor of bytes."""
    with torch.no_grad():
        tensor = tensor.detach().as_subclass(torch.Tensor)
        if tensor.dim():
            each = max(1, int(SAMPLE ** (1 / tensor.dim())))
            tensor = tensor[tuple(slice(None, None, max(1, -(-size // each))) for size in tensor.shape)]
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        words = WORDS.get(tensor.element_size(), tensor.dtype)  # not every dtype has a copy kernel
        return as_bytes(tensor.view(words).contiguous())
