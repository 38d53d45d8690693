"""What the ledgers of earlier attempts say.

A storage error is passed on. A piece that is damaged, of a newer format or with events that this version does
not know is read as far as it goes: a ledger is evidence, not state.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from spotsafe import events
from spotsafe.checkpoint import layout
from spotsafe.checkpoint.attempts import AttemptRecord
from spotsafe.errors import EXIT_RESTART_LOOP, StorageNotFound
from spotsafe.events import Event
from spotsafe.ledger.record import FORMAT, MAX_BYTES, EndRecord, Entry, Piece
from spotsafe.policy.restarts import STOPPED, Limits, PastAttempt
from spotsafe.storage.store import Store

_HEARTBEAT_BYTES = 1 << 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beat:
    """What is read of a heartbeat."""

    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """An event as the ledger holds it."""

    n: int
    """Its number within the attempt, from 1; a gap means that events were dropped."""
    wall: float
    """Unix time in seconds."""
    offset_s: float
    """Seconds since the ledger began, by the monotonic clock."""
    event: Event


def read_end(store: Store, attempt: int) -> EndRecord | None:
    """How an attempt ended; None if it has not, or did not live to say so.

    Raises:
        StorageError: the store could not say.
    """
    numbers = _numbers(store, attempt)
    piece = _read_piece(store, attempt, numbers[-1]) if numbers else None
    return piece.end if piece else None


def writes_no_more(store: Store, attempt: int) -> bool:
    """Whether an attempt recorded its end, and nothing of it was still being written then.

    Raises:
        StorageError: the store could not say.
    """
    return ended_at(store, attempt) is not None


def ended_at(store: Store, attempt: int) -> float | None:
    """When an attempt ended, in Unix seconds of its machine; None if something of it was still being written then.

    Raises:
        StorageError: the store could not say.
    """
    end = read_end(store, attempt)
    return None if end is None or end.in_flight else end.wall


def read_events(store: Store, attempt: int) -> list[Recorded]:
    """Everything that an attempt recorded, in order; types that this version does not know are left out.

    Raises:
        StorageError: the store could not say.
    """
    entries: dict[int, Entry] = {}
    for number in _numbers(store, attempt):
        piece = _read_piece(store, attempt, number)
        for entry in piece.events if piece else ():
            entries.setdefault(entry.n, entry)
    return [recorded for n in sorted(entries) if (recorded := _recorded(entries[n])) is not None]


def read_heartbeat(store: Store, attempt: int) -> bytes | None:
    """The heartbeat as it is now; other bytes at a later look mean that the attempt lives. None: never beat.

    Raises:
        StorageError: the store could not say.
    """
    try:
        return store.read(layout.ledger_heartbeat(attempt), max_bytes=_HEARTBEAT_BYTES)
    except StorageNotFound:
        return None


def read_step(store: Store, attempt: int) -> int:
    """The furthest step that an attempt is known to have reached; 0 if nothing is known.

    Raises:
        StorageError: the store could not say.
    """
    numbers = _numbers(store, attempt)
    piece = _read_piece(store, attempt, numbers[-1]) if numbers else None
    steps = [0 if piece is None else piece.step]
    beat = read_heartbeat(store, attempt)
    try:
        steps.append(msgspec.json.decode(beat or b"{}", type=_Beat).step)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        _log.warning("the heartbeat of attempt %d cannot be read: %s", attempt, error)
    return max(steps)


def past_attempts(
    store: Store, records: Sequence[AttemptRecord], *, limits: Limits | None = None
) -> list[PastAttempt]:
    """What `policy.restarts.restart_loop` has to know of the newest attempts, in their order.

    The ledgers are asked only about the few newest attempts, those that a verdict can depend on.

    Args:
        store: the run.
        records: the attempts' records, in any order, with that of the attempt that is starting or without.
        limits: those that will be applied.

    Raises:
        StorageError: the store could not say.
    """
    limits = limits or Limits()
    newest = sorted(records, key=lambda one: one.attempt)[-(limits.starts_per_hour + 1) :]
    asked = {one.attempt for one in newest[-max(limits.fruitless, limits.same_parent) - 1 :]}
    return [
        _past(record, read_end(store, record.attempt) if record.attempt in asked else None)
        for record in newest
    ]


def _past(record: AttemptRecord, end: EndRecord | None) -> PastAttempt:
    outcome = end.outcome if end else None
    return PastAttempt(
        attempt=record.attempt,
        started_wall=record.started,
        end=STOPPED if end and end.code == EXIT_RESTART_LOOP else outcome,
        new_published=end is not None and end.published > 0,
        passed_over_unhealthy_to=record.passed_over_unhealthy_to,
    )


def _numbers(store: Store, attempt: int) -> list[int]:
    found = map(layout.parse_ledger_events, store.names(layout.ledger_folder(attempt)))
    return sorted(number for number in found if number is not None)


def _read_piece(store: Store, attempt: int, number: int) -> Piece | None:
    path = layout.ledger_events(attempt, number)
    try:
        piece = msgspec.json.decode(store.read(path, max_bytes=MAX_BYTES), type=Piece)
    except StorageNotFound:
        return None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        _log.warning("%s is no piece of a ledger: %s", path, error)
        return None
    if piece.format > FORMAT:
        _log.warning("%s was written by a newer spotsafe (format %d)", path, piece.format)
        return None
    return piece


def _recorded(entry: Entry) -> Recorded | None:
    kind = getattr(events, entry.type, None)
    if not (isinstance(kind, type) and issubclass(kind, Event)):
        return None
    try:
        event = msgspec.convert(entry.data, kind)
    except msgspec.ValidationError:
        return None
    return Recorded(n=entry.n, wall=entry.wall, offset_s=entry.offset_s, event=event)
