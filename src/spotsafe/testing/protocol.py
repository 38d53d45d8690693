"""Whole attempts of a run as processes of a schedule.

What runs is the code of a session: `claim_attempt` and `load_newest` of its start, the `Uploader` with publish,
sweep and retention behind it, a store that tries again. Left out are the tracked objects, the clock, and the
ledger, of which these attempts have none.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar, cast

import numpy as np

from spotsafe.checkpoint import gc
from spotsafe.checkpoint.candidates import read_index
from spotsafe.checkpoint.layout import (
    CheckpointName,
)
from spotsafe.checkpoint.rollback import plan_rollback, roll_back
from spotsafe.checkpoint.survey import survey
from spotsafe.errors import (
    CheckpointNotFound,
    StorageError,
    StorageNotFound,
    StorageUnavailable,
    Superseded,
)
from spotsafe.identity import NONCES, Identity
from spotsafe.opening import Opened, claim_attempt, load_newest
from spotsafe.options import Options
from spotsafe.policy.restarts import Limits
from spotsafe.policy.retention import Keep, latest
from spotsafe.storage.retrying import RetryingStore
from spotsafe.storage.store import Store
from spotsafe.storage.wrapping import Operation, WrappingStore
from spotsafe.testing.cloud import Objects, apply
from spotsafe.testing.parking import Answer, Body, Failure, Killed, Machine, ParkedStore, Request, nonces
from spotsafe.testing.saves import StagedSave, stage
from spotsafe.tracking import Tracker
from spotsafe.writer.job import FrozenFile
from spotsafe.writer.lending import HeldFiles
from spotsafe.writer.upload import Uploader

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an attempt does."""

    saves: int = 1
    stride: int = 1
    """Steps from one save to the next."""
    keep: Keep = field(default_factory=lambda: latest(2))
    sick: frozenset[int] = frozenset()
    """Which of its saves, from 1, hold a NaN."""
    files: int = 1
    """Data files of a save."""
    frozen: int = 0
    """Files of tensors that do not change, to which a save refers when it can."""


def attempt(plan: Plan) -> Body:
    """One start of the run: claim, restore, and save after save, until it is done or superseded."""

    def body(machine: Machine) -> None:
        store = _Client(_WithoutLedger(machine.store))
        claimed = claim_attempt(
            store, options=_OPTIONS, identity=_IDENTITY, tracker=cast("Tracker", _NoState()), emit=_ignore
        )
        record = claimed.record
        machine.note("claimed", record.attempt)
        opened = load_newest(store, claimed, emit=_ignore, threads=1)
        origin = None if opened.loaded is None else opened.loaded.name
        passed = frozenset(opened.choice.passed_over) if opened.choice is not None else frozenset[str]()
        machine.note("passed over", frozenset(map(CheckpointName.parse, passed)))
        machine.note("resumed from", origin)
        held = _holding(store, opened) if plan.frozen else HeldFiles(float)
        uploader = Uploader(store, emit=_ignore, monotonic=float)
        for save in range(1, plan.saves + 1):
            name = CheckpointName(
                record.attempt, (origin.step if origin else 0) + save * plan.stride, save, record.nonce
            )
            staged = _staged(name, record.run, origin, passed, plan)
            job = replace(staged.job, rollbacks=record.rollbacks, frozen=_held(staged.job.frozen, held))
            machine.note("saves", name)
            result = uploader.run(job, staged.arena, staged.frozen)
            held.note_result(result)
            if isinstance(result.error, Killed):
                raise result.error
            machine.note("saved", result.published, result.superseded_by, type(result.error), result.error)
            if result.superseded_by is not None:
                raise Superseded

    return body


def going_back(selector: str | int) -> Body:
    """A person who goes back to an older checkpoint, as ``spotsafe rollback`` does."""

    def body(machine: Machine) -> None:
        store = _Client(_WithoutLedger(machine.store))
        with suppress(CheckpointNotFound):  # retention was faster
            roll_back(store, plan_rollback(store, selector), identity=_IDENTITY, wall=1_700_000_000.0)

    return body


def cleaning_up() -> Body:
    """A person who cleans up beside the attempts, as ``spotsafe gc --delete`` does."""

    def body(machine: Machine) -> None:
        store = _Client(_WithoutLedger(machine.store))
        found = survey(store, ended_at=_never, now=0.0, may_delete=gc.anything)
        if not found.obstacle:
            gc.sweep(store, attempt=found.attempt, on_event=_ignore)

    return body


def rot(path: str) -> Body:
    """A disk that changes a bit of an object for good."""
    return lambda machine: machine.damage(path)


def loss(path: str) -> Body:
    """A person who deletes an object."""
    return lambda machine: machine.lose(path)


def alone(objects: Objects, plan: Plan, *, name: str = "alone") -> tuple[list[tuple[Any, ...]], Objects]:
    """What an attempt tells that has the store for itself and no bad luck, and the store after it."""
    now, notes = objects, list[tuple[Any, ...]]()

    def ask(request: Request) -> Answer:
        nonlocal now
        now, answer = apply(now, request)
        if isinstance(answer, Failure):
            raise answer.kind(answer.text, path=request.path)
        return answer

    def run() -> None:
        NONCES.set(nonces(name))
        machine = Machine(
            store=ParkedStore(ask), note=lambda *words: notes.append(words), damage=_ignore, lose=_ignore
        )
        try:
            attempt(plan)(machine)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, the rules tell it
            notes.append(("failed", error))

    contextvars.Context().run(run)
    return notes, now


class _NoState:
    """Stands for what a program tracks: everything fits."""

    def check(self, **_: Any) -> list[str]:
        return []


class _StillClock:
    """Time does not pass."""

    def monotonic(self) -> float:
        return 1000.0

    def wall(self) -> float:
        return 1_700_000_000.0

    def wait(self, event: threading.Event, timeout: float) -> bool:  # noqa: ARG002 - nobody else is there to set it
        return event.is_set()


_OPTIONS = Options(clock=_StillClock(), restart_limits=Limits(starts_per_hour=10, same_parent=10))
_IDENTITY = Identity(
    rank=0, world_size=1, local_rank=0, host="host", pid=1, boot="", job="job", arguments=("train.py",)
)


def _never(_attempt: int) -> None:
    """No attempt has recorded an end."""


def _ignore(_: object) -> None:
    pass


class _Client(RetryingStore):
    """Tries once more, by the code of every store; the first try goes without the price of that code."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, attempts=1)

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        try:
            return call()
        except StorageUnavailable:
            return super().around(operation, call)


class _WithoutLedger(WrappingStore):
    """Nothing was ever recorded; asking for it is no switch point."""

    def names(self, folder: str) -> list[str]:
        return [] if folder.startswith("ledger/") else super().names(folder)

    def read(self, path: str, *, max_bytes: int) -> bytes:
        if path.startswith("ledger/"):
            raise StorageNotFound("there is no ledger", path=path)
        return super().read(path, max_bytes=max_bytes)


@lru_cache(maxsize=4096)
def _staged(
    name: CheckpointName, run: str, origin: CheckpointName | None, passed: frozenset[str], plan: Plan
) -> StagedSave:
    value = np.nan if name.save in plan.sick else float(name.step)
    arrays = {f"weight{number}": np.full(3, value, dtype=np.float32) for number in range(plan.files)}
    parent = None if origin is None else str(origin)
    still = [{f"still{number}": np.full(3, 1.0, dtype=np.float32)} for number in range(plan.frozen)]
    return stage(
        name,
        arrays,
        files=plan.files,
        run=run,
        keep=plan.keep,
        parent=parent,
        passed_over=passed,
        frozen=still,
    )


def _holding(store: Store, opened: Opened) -> HeldFiles:
    held = HeldFiles(float)
    if opened.choice is not None:
        candidate = opened.choice.candidate
        with suppress(StorageError):  # a newer attempt may have taken it away, or the store does not answer
            held.note(candidate.name, read_index(store, candidate, opened.choice.manifest.parts[0]).files)
    return held


def _held(files: tuple[FrozenFile, ...], held: HeldFiles) -> tuple[FrozenFile, ...]:
    return tuple(replace(file, held=held.get(file.name)) for file in files)
