"""Claiming an attempt: creating ``attempts/<n>.json`` is what makes a start the newest one.

Whoever creates the record owns the number; everybody with a lower number is superseded from then on and finds
out by reading that one key. A lost creation is answered by trying the next number, never by listing again: a
listing may be old, the answer of the creation is not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from importlib import metadata

from spotsafe.checkpoint.attempts import (
    MAX_BYTES,
    AttemptRecord,
    attempt_exists,
    branch_at,
    encode_record,
    newer_attempt,
    printable,
    read_attempt,
    read_branch,
    read_run,
)
from spotsafe.checkpoint.branch import rolled_back
from spotsafe.checkpoint.candidates import Listing
from spotsafe.checkpoint.layout import ATTEMPTS, MAX_NUMBER, CheckpointName, attempt_record
from spotsafe.errors import DamagedCheckpoint, StorageError, StorageNotFound, StorageUnavailable
from spotsafe.identity import Identity, new_nonce
from spotsafe.storage.store import Store, creates_exclusively

__all__ = [
    "AttemptRecord",
    "attempt_exists",
    "claim",
    "in_use",
    "is_exclusive",
    "newer_attempt",
    "read_attempt",
]

HEARTBEAT_S = 30.0
"""Seconds after which a living attempt replaces its heartbeat."""

WATCHED_S = 1.25 * HEARTBEAT_S
"""How long a heartbeat is watched: a quarter more than the interval, for the beat itself takes time to arrive."""

_TRIAL = "(a trial of the store)"
_TRIES = 1000
_LOOKS = 6


def claim(
    store: Store,
    *,
    listing: Listing,
    identity: Identity,
    newest_seen: str | None,
    wall: float,
    resumed_from: str | None = None,
    passed_over: Sequence[str] = (),
    passed_over_unhealthy_to: str | None = None,
    run: str | None = None,
    rollback_to: CheckpointName | None = None,
    met: Callable[[AttemptRecord], None] = lambda _: None,
) -> AttemptRecord:
    """Claim the next attempt of the run.

    The record repeats the rollbacks of the one right before it, whoever wrote that one and however late: so a
    rollback that comes between our look and our claim counts.

    Args:
        store: the run.
        listing: what the look before the claim saw.
        identity: who claims.
        newest_seen: name of the newest published checkpoint of that look.
        wall: now, in Unix seconds.
        resumed_from: the checkpoint that the look chose.
        passed_over: newer checkpoints that were left aside.
        passed_over_unhealthy_to: set if unhealthy ones were among them: the one chosen instead.
        run: the run id that the newest manifest names; used only if attempt 1's record is gone or damaged,
            as in a folder of which only the checkpoints were copied.
        rollback_to: the claim is a rollback to this checkpoint.
        met: is called with the record of each attempt that was claimed since the look, before the next number is
            tried; may raise to give up.

    Returns:
        The record as it lies on storage; its attempt and nonce are ours alone.

    Raises:
        DamagedCheckpoint: the record before ours is damaged, so that nobody knows which checkpoints count.
        StorageError: nothing was claimed, or it is unknown whether it was; an unused attempt does no harm.
    """
    nonce = new_nonce()
    number = listing.highest + 1
    back = None if rollback_to is None else branch_at(store, listing, rollback_to)
    branch = read_branch(store, listing) if back is None else back
    for _ in range(_TRIES):
        if number > MAX_NUMBER:
            raise StorageError(
                f"{store.url}: a name there says attempt {number - 1}; remove it", path=ATTEMPTS
            )
        if rollback_to is not None and back is not None:
            branch = rolled_back(back, to=rollback_to, attempt=number)
        record = AttemptRecord(
            run=_run_id(store, listing, number=number, nonce=nonce, hint=run),
            attempt=number,
            nonce=nonce,
            host=identity.host,
            pid=identity.pid,
            boot=identity.boot,
            job=identity.job,
            arguments=printable(identity.arguments),
            newest_seen=newest_seen,
            started=wall,
            resumed_from=resumed_from,
            passed_over=tuple(passed_over),
            passed_over_unhealthy_to=passed_over_unhealthy_to,
            version=_version(),
            rollbacks=branch,
        )
        if store.create(attempt_record(number), encode_record(record)):
            return record
        other = _taken(store, number)
        met(other)
        branch = other.rollbacks
        number += 1
    raise StorageError(
        f"{store.url}: {_TRIES} attempts in a row were taken by others; does the store do what it says?",
        path=attempt_record(number),
    )


def is_exclusive(store: Store, record: AttemptRecord) -> bool:
    """Whether the store's create-if-absent can be relied on (rule 12): what it says, else what it does.

    The trial is on our own record: a second one with other bytes must be refused. A store that takes it is
    given ours back. The second one bears our nonce too: it may arrive late, or stay if we die here or the store loses
    what we give back, and must not make us believe that another start has taken our number.

    Args:
        store: the run.
        record: ours, just claimed.

    Raises:
        StorageError: the store could not say; the attempt stays unused.
    """
    said = creates_exclusively(store)
    if said is not None:
        return said
    path, ours = attempt_record(record.attempt), encode_record(record)
    rival = encode_record(dataclasses.replace(record, version=f"{record.version} {_TRIAL}"))
    refused = not store.create(path, rival)
    if refused and store.read(path, max_bytes=MAX_BYTES) == ours:
        return True
    store.replace(path, ours)
    return False


def in_use(
    previous: AttemptRecord | None,
    *,
    ended: Callable[[], bool],
    identity: Identity,
    is_running: Callable[[int], bool],
    read_heartbeat: Callable[[], bytes | None],
    wait: Callable[[float], None],
) -> bool:
    """Whether another job still runs on this folder, so that starting here would be a mistake.

    A restart of the same job with the same arguments is never a mistake: the older attempt, if it still
    lives, is superseded. For any other job the previous attempt's heartbeat is watched for a little more than
    one interval (`WATCHED_S`), unless that attempt is known to be over, or ends meanwhile.

    Args:
        previous: the newest attempt's record; None if there is none.
        ended: whether that attempt has recorded its end by now.
        identity: who wants to start.
        is_running: whether a process of this host lives.
        read_heartbeat: that attempt's heartbeat as it is now; None if there is none.
        wait: blocks for so many seconds.
    """
    if previous is None:
        return False
    if (previous.job, previous.arguments) == (identity.job, printable(identity.arguments)):
        return False
    if ended():
        return False
    same_machine = bool(identity.boot) and (previous.host, previous.boot) == (identity.host, identity.boot)
    if same_machine and not is_running(previous.pid):
        return False
    first = read_heartbeat()
    for _ in range(_LOOKS):
        wait(WATCHED_S / _LOOKS)
        if read_heartbeat() != first:
            return not ended()  # its last beat may have come just before its end
    return False


def _taken(store: Store, number: int) -> AttemptRecord:
    try:
        return read_attempt(store, number)
    except StorageNotFound as error:
        path = attempt_record(number)
        raise StorageUnavailable(
            f"{path}: the store says both that it exists and that it does not", path=path
        ) from error


def _run_id(store: Store, listing: Listing, *, number: int, nonce: str, hint: str | None) -> str:
    if number == 1:
        return nonce
    try:
        return read_run(store, listing)
    except StorageNotFound:
        return hint or nonce
    except DamagedCheckpoint:
        if hint is None:
            raise
        return hint


@functools.cache
def _version() -> str:
    try:
        return metadata.version("spotsafe")
    except metadata.PackageNotFoundError:
        return ""
