"""Whole attempts of a run as processes of a schedule.

What runs is the code of a session: `claim_attempt` and `load_newest` of its start, the `Uploader` with publish,
sweep and retention behind it, a store that tries again. Left out are the tracked objects, the clock, and the
ledger, of which these attempts have none.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from spotsafe.checkpoint.candidates import read_index
from spotsafe.checkpoint.clearing import delete_garbage, find_garbage
from spotsafe.checkpoint.layout import (
    ATTEMPTS,
    CheckpointName,
    ledger_events,
    ledger_heartbeat,
    parse_attempt,
)
from spotsafe.checkpoint.markers import HOUR_S
from spotsafe.checkpoint.rollback import plan_rollback, roll_back
from spotsafe.errors import (
    CheckpointNotFound,
    StorageError,
    StorageNotFound,
    StorageUnavailable,
    Superseded,
)
from spotsafe.identity import NONCES, Identity
from spotsafe.ledger.reading import ended_at, writes_no_more
from spotsafe.ledger.record import FORMAT, EndRecord, Piece
from spotsafe.loading import Opened as OpenedForReading, with_selected
from spotsafe.opening import Claimed, Opened, claim_attempt, load_newest
from spotsafe.options import Options
from spotsafe.outcomes import FINISHED
from spotsafe.pinning import place
from spotsafe.policy.restarts import Limits
from spotsafe.policy.retention import Keep, latest
from spotsafe.reader import Loaded, load_verified
from spotsafe.storage.retrying import RetryingStore
from spotsafe.storage.store import Store
from spotsafe.storage.wrapping import Operation, WrappingStore
from spotsafe.testing.cloud import Objects, apply
from spotsafe.testing.parking import Answer, Body, Failure, Killed, Machine, ParkedStore, Request, nonces
from spotsafe.testing.saves import StagedSave, stage
from spotsafe.testing.seen import record_at
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
        claimed = _claim(store, _IDENTITY)
        _train(store, claimed, plan, _uploader(store, claimed), machine.note)

    return body


def attempt_alone(plan: Plan) -> Body:
    """One start on a store that ignores conditions (rule 12); it records its end, if it lives to see it."""

    def body(machine: Machine) -> None:
        store = _Client(machine.store.overwriting())
        _train_to_the_end(store, _claim(store, _IDENTITY), plan, machine.note)

    return body


def attempt_of(job: str, plan: Plan, *, takeover: bool = False) -> Body:
    """One start of a job that may not be alone in the folder (rule 11); it records its end. See `hearts` too.

    Args:
        job: its id.
        plan: what it does.
        takeover: whether it supersedes another job that lives.
    """

    def body(machine: Machine) -> None:
        store = _Client(machine.store)
        options = replace(_OPTIONS, clock=_RestingClock(machine.rest), takeover=takeover)
        claimed = _claim(store, replace(_IDENTITY, job=job), options=options)
        _train_to_the_end(store, claimed, plan, machine.note)

    return body


def hearts(objects: Objects, living: Collection[str]) -> list[Request]:
    """The heartbeats of the attempts whose processes live: for `Scenario.beats`."""
    theirs = {nonces(name)()[:4] for name in living}
    beats = []
    for path, data in objects.items():
        number = parse_attempt(path.removeprefix(f"{ATTEMPTS}/"))
        if number is not None and record_at(data, number).nonce[:4] in theirs:
            beat = ledger_heartbeat(number)
            count = msgspec.json.decode(objects.get(beat, b'{"beat":0}'))["beat"] + 1
            beats.append(Request("replace", beat, msgspec.json.encode({"beat": count})))
    return beats


def _claim(store: Store, identity: Identity, *, options: Options | None = None) -> Claimed:
    tracker = cast("Tracker", _NoState())
    return claim_attempt(store, options=options or _OPTIONS, identity=identity, tracker=tracker, emit=_ignore)


def _train_to_the_end(store: Store, claimed: Claimed, plan: Plan, note: Callable[..., None]) -> None:
    uploader = _uploader(store, claimed)
    try:
        _train(store, claimed, plan, uploader, note)
    finally:
        with suppress(StorageError):
            _record_end(store, claimed.record.attempt, in_flight=uploader.undecided)


def _uploader(store: Store, claimed: Claimed) -> Uploader:
    ended = partial(writes_no_more, store) if claimed.single_writer else None
    return Uploader(store, emit=_ignore, monotonic=float, ended=ended)


def _train(store: Store, claimed: Claimed, plan: Plan, uploader: Uploader, note: Callable[..., None]) -> None:
    record = claimed.record
    note("claimed", record.attempt)
    opened = load_newest(store, claimed, emit=_ignore, threads=1)
    origin = None if opened.loaded is None else opened.loaded.name
    passed = frozenset(opened.choice.passed_over) if opened.choice is not None else frozenset[str]()
    note("passed over", frozenset(map(CheckpointName.parse, passed)))
    note("resumed from", origin)
    held = _holding(store, opened) if plan.frozen else HeldFiles(float)
    for save in range(1, plan.saves + 1):
        name = CheckpointName(
            record.attempt, (origin.step if origin else 0) + save * plan.stride, save, record.nonce
        )
        staged = _staged(name, record.run, origin, passed, plan)
        job = replace(staged.job, rollbacks=record.rollbacks, frozen=_held(staged.job.frozen, held))
        note("saves", name)
        result = uploader.run(job, staged.arena, staged.frozen)
        held.note_result(result)
        if isinstance(result.error, Killed):
            raise result.error
        note("saved", result.published, result.superseded_by, type(result.error), result.error)
        if result.superseded_by is not None:
            raise Superseded


def _record_end(store: Store, attempt: int, *, in_flight: bool) -> None:
    """As the ledger does; of a process that is dead it has no effect."""
    end = EndRecord(
        outcome=FINISHED, code=None, step=0, published=0, newest=None, wall=_NOW, in_flight=in_flight
    )
    piece = Piece(format=FORMAT, attempt=attempt, published=0, end=end, events=())
    store.put(ledger_events(attempt, 1), msgspec.json.encode(piece))


def going_back(selector: str | int) -> Body:
    """A person who goes back to an older checkpoint, as ``spotsafe rollback`` does."""

    def body(machine: Machine) -> None:
        store = _Client(_WithoutLedger(machine.store))
        with suppress(CheckpointNotFound):  # retention was faster
            roll_back(store, plan_rollback(store, selector), identity=_IDENTITY, wall=_NOW)

    return body


def cleaning_up() -> Body:
    """A person who cleans up beside the attempts, as ``spotsafe gc --delete`` does."""
    return lambda machine: _clean_up(_Client(_WithoutLedger(machine.store)), now=0.0)


def cleaning_up_alone() -> Body:
    """The same on a store that ignores conditions, and two hours after the ends that attempts recorded."""
    return lambda machine: _clean_up(_Client(machine.store.overwriting()), now=_NOW + 2 * HOUR_S)


def _clean_up(store: Store, *, now: float) -> None:
    ends = partial(ended_at, store)
    found = find_garbage(store, ended_at=ends, now=now)
    if not found.obstacle:
        delete_garbage(store, found, ended_at=ends, now=now, on_event=_ignore)


def reading(selector: str | int = "latest", *, pinned: bool = True, releases: bool = True) -> Body:
    """A program that reads a checkpoint, as `spotsafe.load` does.

    Args:
        selector: which one.
        pinned: whether it pins it first, as `spotsafe.pin` does.
        releases: whether it lets it go afterwards.
    """

    def body(machine: Machine) -> None:
        store = _Client(_WithoutLedger(machine.store))
        try:
            held = place(store, selector, until=_TOMORROW, identity=_IDENTITY) if pinned else None
        except CheckpointNotFound:  # there is none yet, or retention was faster
            return
        if held is not None:
            machine.note("pinned", CheckpointName.parse(held.name))
        try:
            found = with_selected(store, selector if held is None else held.name, _read_all)
        except CheckpointNotFound:
            if held is not None:
                raise
            return
        machine.note("read", found.name, frozenset(found.saved.tensors["weight0"].tolist()))
        if held is not None and releases:
            held.release()

    return body


def rot(path: str) -> Body:
    """A disk that changes a bit of an object for good."""
    return lambda machine: machine.damage(path)


def loss(path: str) -> Body:
    """A person who deletes an object."""
    return lambda machine: machine.lose(path)


def alone(
    objects: Objects, plan: Plan, *, name: str = "alone", body: Callable[[Plan], Body] = attempt
) -> tuple[list[tuple[Any, ...]], Objects]:
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
            store=ParkedStore(ask),
            note=lambda *words: notes.append(words),
            damage=_ignore,
            rest=_pass,
            lose=_ignore,
        )
        try:
            body(plan)(machine)
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
        return _NOW

    def wait(self, event: threading.Event, timeout: float) -> bool:  # noqa: ARG002 - nobody else is there to set it
        return event.is_set()


class _RestingClock(_StillClock):
    """Waits by letting time pass for the others."""

    def __init__(self, rest: Callable[[], None]) -> None:
        self._rest = rest

    def wait(self, event: threading.Event, timeout: float) -> bool:  # noqa: ARG002 - one rest, however long
        self._rest()
        return event.is_set()


_NOW = 1_700_000_000.0
_OPTIONS = Options(clock=_StillClock(), restart_limits=Limits(starts_per_hour=10, same_parent=10))
_IDENTITY = Identity(
    rank=0, world_size=1, local_rank=0, host="host", pid=1, boot="", job="job", arguments=("train.py",)
)


_TOMORROW = _NOW + 86_400.0
"""When pins end, in Unix seconds: the saves of all attempts are made before."""


def _read_all(opened: OpenedForReading) -> Loaded:
    return load_verified(opened.store, opened.candidate, threads=1)


def _pass() -> None:
    """Nobody else is there whose heart could beat."""


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
