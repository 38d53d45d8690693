"""The start of an attempt: look, check, claim, look again, read. Everything before the first tracked object changes.

The order is the protocol's (rules 2, 3, 8, 9 and 11 of docs/DESIGN.md): whatever can be refused is refused before
the claim, and what is loaded is chosen after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from spotsafe.checkpoint.attempts import AttemptRecord, read_attempt
from spotsafe.checkpoint.catalog import Candidate, Listing, check_history, look
from spotsafe.checkpoint.claim import claim, in_use
from spotsafe.clock import Clock
from spotsafe.errors import (
    CheckpointNotFound,
    RestartLoop,
    RunInUse,
    StateMismatch,
    StorageNotFound,
)
from spotsafe.events import Event
from spotsafe.identity import Identity, is_running
from spotsafe.ledger.record import past_attempts, read_end, read_heartbeat
from spotsafe.options import Options
from spotsafe.policy.restarts import PastAttempt, restart_loop
from spotsafe.reader import Choice, Loaded, choose, load_chosen, read_description
from spotsafe.storage.store import Store
from spotsafe.tracking import Tracker


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A claimed attempt, and the state it goes on from."""

    record: AttemptRecord
    choice: Choice | None
    """Which checkpoint, and which newer ones were passed over; None for a fresh start."""
    loaded: Loaded | None
    """Its content, every byte verified."""


def open_attempt(
    store: Store,
    *,
    options: Options,
    identity: Identity,
    tracker: Tracker,
    emit: Callable[[Event], None],
) -> Opened:
    """Claim the next attempt of the run and read what it resumes from.

    Raises:
        StorageError: the store could not say what is there. Never taken for "nothing".
        StateMismatch: the newest checkpoint does not fit the tracked objects; nothing was claimed.
        NoUsableCheckpoint: there are or were checkpoints, none can be used.
        UnsupportedFormat: a newer spotsafe wrote the newest.
        RunInUse: another job lives on this folder.
        RestartLoop: the run keeps dying without getting anywhere.
    """
    listing = look(store)
    choice = choose(store, listing, emit=emit)
    if choice is None:
        check_history(store, listing=listing)
    _check_resume(store, options, choice)
    if choice is not None:
        _check_shapes(store, choice.candidate, tracker)
    previous = _previous(store, listing)
    _check_in_use(store, previous, identity=identity, options=options)
    _check_restarts(store, listing, choice, options=options)
    record = claim(
        store,
        listing=listing,
        identity=identity,
        newest_seen=None if choice is None else str(choice.newest),
        wall=options.clock.wall(),
        resumed_from=None if choice is None else str(choice.candidate.name),
        passed_over=() if choice is None else sorted(choice.passed_over),
        passed_over_unhealthy_to=None if choice is None else choice.unhealthy_passed_to,
        run=_run_of(choice),
    )
    return _load(store, record, emit=emit)


def _load(store: Store, record: AttemptRecord, *, emit: Callable[[Event], None]) -> Opened:
    """Choose again, now that the claim keeps others from publishing, and read it whole."""
    damaged: dict[str, str] = {}
    for _ in range(10):
        listing = look(store)
        choice = choose(store, listing, emit=emit, unusable=damaged)
        if choice is None:
            check_history(store, listing=listing, reasons=damaged)
            return Opened(record=record, choice=None, loaded=None)
        try:
            loaded = load_chosen(store, choice, emit=emit, unusable=damaged)
        except StorageNotFound:
            continue  # an older attempt's retention took it away meanwhile: list and choose again
        if loaded is not None:
            return Opened(record=record, choice=choice, loaded=loaded)
    raise CheckpointNotFound(
        f"{store.url}: checkpoints vanish faster than they can be read; does another job delete in this folder?"
    )
