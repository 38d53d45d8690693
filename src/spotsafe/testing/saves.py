"""Small staged saves of numpy arrays: what tests of the writer and of the protocol need, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spotsafe.checkpoint.attempts import read_branch
from spotsafe.checkpoint.branch import Branch
from spotsafe.checkpoint.catalog import Candidate, candidates, look
from spotsafe.checkpoint.claim import AttemptRecord, claim
from spotsafe.checkpoint.dtypes import require
from spotsafe.checkpoint.image import PAGE, ImageTensor, plan_image
from spotsafe.checkpoint.index import Slice, TensorEntry
from spotsafe.checkpoint.layout import CheckpointName, data_file
from spotsafe.events import Event
from spotsafe.identity import Identity
from spotsafe.policy.retention import Keep, latest
from spotsafe.storage.store import Store
from spotsafe.writer.job import HealthSpan, SaveJob, SaveResult, StagedFile
from spotsafe.writer.upload import Uploader

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSave:
    """A job and the memory that it speaks of."""

    job: SaveJob
    arena: memoryview


def stage(
    name: CheckpointName,
    arrays: Arrays,
    *,
    files: int = 1,
    roles: Mapping[str, str] | None = None,
    run: str = "0123abcd",
    keep: Keep | None = None,
    parent: str | None = None,
    metrics: Mapping[str, float] | None = None,
    nonfinite_before: frozenset[str] = frozenset(),
    passed_over: frozenset[str] = frozenset(),
    rollbacks: Branch = (),
) -> StagedSave:
    """Stage `arrays` as parameters, spread over so many files.

    Args:
        name: of the checkpoint.
        arrays: by tensor name; their numpy dtype is the tensor's.
        files: how many data files.
        roles: other roles than ``parameter``, by tensor name.
        run: the run's id.
        keep: retention; two by default.
        parent: what was resumed from.
        metrics: for the manifest.
        nonfinite_before: names that may be nonfinite.
        passed_over: names that retention must not touch.
        rollbacks: those that count.
    """
    arena = bytearray()
    staged: list[StagedFile] = []
    tensors: list[TensorEntry] = []
    spans: list[HealthSpan] = []
    for number in range(files):
        chosen = dict(list(arrays.items())[number::files])
        file = data_file(0, number)
        offset = len(arena)
        image, starts = _image(chosen)
        arena += image.ljust(-(-len(image) // PAGE) * PAGE, b"\0")
        staged.append(StagedFile(name=file, arena_offset=offset, size=len(image)))
        for key, array in chosen.items():
            role = (roles or {}).get(key, "parameter")
            tensors.append(_entry(key, array, file=file, start=starts[key], role=role))
            spans.append(
                HealthSpan(
                    tensor=key,
                    arena_offset=offset + starts[key],
                    nbytes=array.nbytes,
                    dtype=array.dtype.name,
                    role=role,
                )
            )
    job = SaveJob(
        name=name,
        run=run,
        parent=parent,
        reason="interval",
        created=1_700_000_000.0 + name.step,
        world_size=1,
        rank=0,
        metrics=metrics or {},
        files=tuple(staged),
        tensors=tuple(tensors),
        state={},
        session={"step": name.step},
        health=tuple(spans),
        nonfinite_before=nonfinite_before,
        keep=keep or latest(2),
        resumed_from=parent,
        passed_over=passed_over,
        rollbacks=rollbacks,
    )
    return StagedSave(job=job, arena=memoryview(arena))


class Attempt:
    """One start of a run as a session makes it: look, claim, then save after save in this thread.

    Args:
        store: the run.
        emit: is told what happens.
        keep: retention of its saves.
        ended: as for `Uploader`.

    Attributes:
        record: the claim.
        resumed_from: the newest published checkpoint before the claim, of those that no rollback set aside.
        results: of the saves so far.
    """

    def __init__(
        self,
        store: Store,
        *,
        emit: Callable[[Event], object] | None = None,
        keep: Keep | None = None,
        ended: Callable[[int], bool] | None = None,
    ) -> None:
        self._keep = keep
        listing = look(store)
        there = candidates(store, listing.on(read_branch(store, listing)))
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
        self._uploader = Uploader(store, emit=emit or (lambda _: None), monotonic=lambda: 0.0, ended=ended)
        self.results: list[SaveResult] = []

    def save(self, step: int, *, arrays: Arrays | None = None, files: int = 2, **options: Any) -> SaveResult:
        """Save some arrays that tell the step; `options` as for `stage`."""
        name = CheckpointName(self.record.attempt, step, len(self.results) + 1, self.record.nonce)
        parent = None if self.resumed_from is None else str(self.resumed_from.name)
        filled = arrays or {f"weight{i}": np.full((3, i + 1), step, dtype=np.float32) for i in range(files)}
        given = {"keep": self._keep, "rollbacks": self.record.rollbacks, **options}
        save = stage(name, filled, files=files, run=self.record.run, parent=parent, **given)
        result = self._uploader.run(save.job, save.arena)
        self.results.append(result)
        return result


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
