"""Small staged saves of numpy arrays: what tests of the writer and of the protocol need, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from spotsafe.checkpoint.attempts import read_branch
from spotsafe.checkpoint.branch import Branch
from spotsafe.checkpoint.catalog import Candidate, candidates, look, read_index
from spotsafe.checkpoint.claim import AttemptRecord, claim
from spotsafe.checkpoint.dtypes import require
from spotsafe.checkpoint.image import PAGE, ImageTensor, plan_image
from spotsafe.checkpoint.index import Slice, TensorEntry
from spotsafe.checkpoint.layout import CheckpointName, data_file, frozen_file
from spotsafe.events import Event
from spotsafe.identity import Identity
from spotsafe.policy.retention import Keep, latest
from spotsafe.storage.store import Store
from spotsafe.writer.job import FrozenFile, HealthSpan, Held, SaveJob, SaveResult, StagedFile
from spotsafe.writer.lending import HeldFiles
from spotsafe.writer.upload import Uploader

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSave:
    """A job and the memory that it speaks of."""

    job: SaveJob
    arena: memoryview
    frozen: memoryview | None = None


def stage(
    name: CheckpointName,
    arrays: Arrays,
    *,
    files: int = 1,
    rank: int = 0,
    world_size: int = 1,
    roles: Mapping[str, str] | None = None,
    run: str = "0123abcd",
    keep: Keep | None = None,
    parent: str | None = None,
    metrics: Mapping[str, float] | None = None,
    nonfinite_before: frozenset[str] = frozenset(),
    passed_over: frozenset[str] = frozenset(),
    rollbacks: Branch = (),
    frozen: Sequence[Arrays] = (),
    held: Callable[[str], Held | None] = lambda _: None,
    staged_frozen: bool = True,
) -> StagedSave:
    """Stage `arrays` as parameters, spread over so many files.

    Args:
        name: of the checkpoint.
        arrays: by tensor name; their numpy dtype is the tensor's.
        files: how many data files.
        rank: whose arrays they are.
        world_size: of so many.
        roles: other roles than ``parameter``, by tensor name.
        run: the run's id.
        keep: retention; two by default.
        parent: what was resumed from.
        metrics: for the manifest.
        nonfinite_before: names that may be nonfinite.
        passed_over: names that retention must not touch.
        rollbacks: those that count.
        frozen: arrays that do not change from save to save, for each file of them.
        held: which of these files lie on storage already.
        staged_frozen: whether their bytes are at hand.
    """
    chosen = [dict(list(arrays.items())[number::files]) for number in range(files)]
    arena, staged, tensors = _staged(chosen, named=partial(data_file, rank), roles=roles)
    lent_arena, lent, lent_tensors = _staged(
        frozen, named=partial(frozen_file, rank), roles=dict.fromkeys(_keys(frozen), "other")
    )
    spans = [
        HealthSpan(
            tensor=one.name,
            arena_offset=file.arena_offset + one.slices[0].start,
            nbytes=one.slices[0].nbytes,
            dtype=one.dtype,
            role=one.role,
        )
        for one in tensors
        for file in staged
        if file.name == one.slices[0].file
    ]
    job = SaveJob(
        name=name,
        run=run,
        parent=parent,
        reason="interval",
        created=1_700_000_000.0 + name.step,
        world_size=world_size,
        rank=rank,
        metrics=metrics or {},
        files=tuple(staged),
        tensors=(*tensors, *lent_tensors),
        state={},
        session={"step": name.step},
        health=tuple(spans),
        nonfinite_before=nonfinite_before,
        keep=keep or latest(2),
        resumed_from=parent,
        passed_over=passed_over,
        rollbacks=rollbacks,
        frozen=tuple(
            FrozenFile(
                name=file.name,
                size=file.size,
                arena_offset=file.arena_offset if staged_frozen else None,
                held=held(file.name),
            )
            for file in lent
        ),
    )
    return StagedSave(job=job, arena=arena, frozen=lent_arena if frozen and staged_frozen else None)


def _keys(files: Sequence[Arrays]) -> list[str]:
    return [key for arrays in files for key in arrays]


def _staged(
    files: Sequence[Arrays], *, named: Callable[[int], str], roles: Mapping[str, str] | None
) -> tuple[memoryview, list[StagedFile], list[TensorEntry]]:
    arena, staged, tensors = bytearray(), list[StagedFile](), list[TensorEntry]()
    for number, arrays in enumerate(files):
        image, starts = _image(arrays)
        file = StagedFile(name=named(number), arena_offset=len(arena), size=len(image))
        arena += image.ljust(-(-len(image) // PAGE) * PAGE, b"\0")
        staged.append(file)
        tensors += [
            _entry(key, array, file=file.name, start=starts[key], role=(roles or {}).get(key, "parameter"))
            for key, array in arrays.items()
        ]
    return memoryview(arena), staged, tensors


class Attempt:
    """One start of a run as a session makes it: look, claim, then save after save in this thread.

    Args:
        store: the run.
        emit: is told what happens.
        keep: retention of its saves.
        ended: as for `Uploader`.
        ended_at: as for `Uploader`.

    Attributes:
        record: the claim.
        resumed_from: the newest published checkpoint before the claim, of those that no rollback set aside.
        now: seconds of run time, for the age of files with frozen arrays; a test may change it.
        results: of the saves so far.
    """

    def __init__(
        self,
        store: Store,
        *,
        emit: Callable[[Event], object] | None = None,
        keep: Keep | None = None,
        ended: Callable[[int], bool] | None = None,
        ended_at: Callable[[int], float | None] | None = None,
    ) -> None:
        self._keep = keep
        listing = look(store)
        there = candidates(store, listing, read_branch(store, listing))
        self.resumed_from: Candidate | None = next(iter(there), None)
        seen = None if self.resumed_from is None else str(self.resumed_from.name)
        self.record: AttemptRecord = claim(
            store,
            listing=listing,
            identity=Identity.of_this_process(environ={}, argv=["train.py"]),
            newest_seen=seen,
            resumed_from=seen,
            wall=1_700_000_000.0,
        )
        self._uploader = Uploader(
            store, emit=emit or (lambda _: None), monotonic=lambda: 0.0, ended=ended, ended_at=ended_at
        )
        self._store = store
        self._held: HeldFiles | None = None
        self.now = 0.0
        self.results: list[SaveResult] = []

    def save(self, step: int, *, arrays: Arrays | None = None, files: int = 2, **options: Any) -> SaveResult:
        """Save some arrays that tell the step; `options` as for `stage`."""
        name = CheckpointName(self.record.attempt, step, len(self.results) + 1, self.record.nonce)
        parent = None if self.resumed_from is None else str(self.resumed_from.name)
        filled = arrays or {f"weight{i}": np.full((3, i + 1), step, dtype=np.float32) for i in range(files)}
        given = {"keep": self._keep, "rollbacks": self.record.rollbacks, **options}
        if given.get("frozen"):
            given.setdefault("held", self._held_files().get)
        save = stage(name, filled, files=files, run=self.record.run, parent=parent, **given)
        result = self._uploader.run(save.job, save.arena, save.frozen)
        if self._held is not None:
            self._held.note_result(result)
        self.results.append(result)
        return result

    def _held_files(self) -> HeldFiles:
        """Those of the checkpoint resumed from, read when they are first asked for."""
        if self._held is None:
            held = HeldFiles(lambda: self.now)
            if self.resumed_from is not None and self.resumed_from.manifest is not None:
                parts = self.resumed_from.manifest.parts
                indexes = [read_index(self._store, self.resumed_from, part) for part in parts]
                held.note(self.resumed_from.name, [file for index in indexes for file in index.files])
            self._held = held
        return self._held


def steps_of(found: Sequence[Candidate]) -> list[int]:
    """The steps of those that are published."""
    return [one.name.step for one in found if one.manifest is not None]


def _image(arrays: Arrays) -> tuple[bytes, Mapping[str, int]]:
    image = plan_image(
        ImageTensor.of(key, dtype=require(array.dtype.name, path=key), shape=array.shape)
        for key, array in arrays.items()
    )
    data = bytearray(image.header.ljust(image.size, b"\0"))
    for key, array in arrays.items():
        data[image.starts[key] : image.starts[key] + array.nbytes] = array.tobytes()
    return bytes(data), image.starts


def _entry(key: str, array: npt.NDArray[Any], *, file: str, start: int, role: str) -> TensorEntry:
    piece = Slice(offsets=(0,) * array.ndim, lengths=array.shape, file=file, start=start, nbytes=array.nbytes)
    return TensorEntry(name=key, dtype=array.dtype.name, shape=array.shape, slices=(piece,), role=role)
