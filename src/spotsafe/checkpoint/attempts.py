"""The record of an attempt: one small object for each start of a run. Creating it is the claim."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from spotsafe.checkpoint import sealed
from spotsafe.checkpoint.branch import Branch, until
from spotsafe.checkpoint.candidates import Listing
from spotsafe.checkpoint.layout import ATTEMPTS, CheckpointName, attempt_published, attempt_record
from spotsafe.errors import DamagedCheckpoint, StorageNotFound, UnsupportedFormat
from spotsafe.identity import new_nonce
from spotsafe.storage.store import Store, creates_exclusively

FORMAT = 1
MAX_BYTES = 8 << 20
"""A command line may be long (2 MiB on Linux), and a character may take several bytes in JSON."""
_MARK_BYTES = 4096

_NONCE = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One start of a run. Written once, never changed, never deleted."""

    run: str
    """The run's id: the nonce of attempt 1."""
    attempt: int
    nonce: str
    """Eight hexadecimal digits that no other attempt has."""
    host: str
    pid: int
    boot: str
    job: str
    arguments: tuple[str, ...]
    """As `printable` makes them."""
    newest_seen: str | None
    """The newest published checkpoint that was there when the attempt looked, before it claimed."""
    started: float
    """Unix time in seconds; for people and for finding restart loops, never for an order."""
    resumed_from: str | None = None
    """The checkpoint that the look before the claim chose."""
    passed_over: tuple[str, ...] = ()
    """Newer checkpoints that this choice left aside."""
    passed_over_unhealthy_to: str | None = None
    """If unhealthy checkpoints were passed over: the healthy one that was chosen instead."""
    version: str = ""
    """The version of spotsafe that wrote the record."""
    rollbacks: Branch = ()
    """The rollbacks that count, oldest first. If the last one is of this attempt, the attempt is a rollback."""

    @property
    def is_rollback(self) -> bool:
        """Whether the attempt only says where to go on: it has trained nothing and nothing of it is alive."""
        return bool(self.rollbacks) and self.rollbacks[-1].attempt == self.attempt


def printable(arguments: Sequence[str]) -> tuple[str, ...]:
    r"""Arguments as text that JSON can hold: bytes that are no UTF-8 become ``\xNN``."""
    raw = (argument.encode("utf-8", "surrogateescape") for argument in arguments)
    return tuple(argument.decode("utf-8", "backslashreplace") for argument in raw)


def encode_record(record: AttemptRecord) -> bytes:
    """The record as JSON behind its own digest."""
    return sealed.seal({"format": FORMAT, "requires": [], **dataclasses.asdict(record)})


def decode_record(data: bytes, *, attempt: int) -> AttemptRecord:
    """The record that `data` holds, checked against the number in its name.

    Raises:
        DamagedCheckpoint: it is not what was written.
        UnsupportedFormat: a newer spotsafe wrote it.
    """
    try:
        members = sealed.unseal(data, max_bytes=MAX_BYTES)
        _check_format(members, attempt=attempt)
        record = msgspec.convert(members, AttemptRecord)
    except UnsupportedFormat:
        raise
    except (ValueError, msgspec.ValidationError) as error:
        _damaged(attempt, str(error))
    if record.attempt != attempt:
        _damaged(attempt, f"it says that it is attempt {record.attempt}")
    if not _NONCE.fullmatch(record.nonce) or not _NONCE.fullmatch(record.run):
        _damaged(attempt, "run and nonce must be eight hexadecimal digits")
    _check_rollbacks(record)
    return record


def read_attempt(store: Store, attempt: int) -> AttemptRecord:
    """Read the record of an attempt by its key. Damage is believed after a second read.

    Raises:
        StorageNotFound: there is no such attempt.
        StorageError: it could not be read.
        DamagedCheckpoint: it is no record.
        UnsupportedFormat: a newer spotsafe wrote it.
    """
    path = attempt_record(attempt)
    try:
        return decode_record(store.read(path, max_bytes=MAX_BYTES), attempt=attempt)
    except DamagedCheckpoint:
        return decode_record(store.read(path, max_bytes=MAX_BYTES), attempt=attempt)


def read_run(store: Store, listing: Listing) -> str:
    """The run's id: the nonce of attempt 1.

    Where a store may not refuse to overwrite (rule 12), a late claim of a start that is dead can arrive over the
    record of attempt 1, at any later time. There the mark of the first attempt that published has the last word.

    Args:
        store: the run.
        listing: a look at it.

    Raises:
        StorageNotFound: there is no record of attempt 1.
        StorageError: it could not be read.
        DamagedCheckpoint: it is no record.
        UnsupportedFormat: a newer spotsafe wrote it.
    """
    recorded = read_attempt(store, 1).run
    first = min(listing.published, default=None)
    if first is None or creates_exclusively(store) is True or _marked_run(store, first) in {None, recorded}:
        return recorded
    return _marked_run(store, first) or recorded  # believed after a second read: a mark has no digest


def encode_mark(name: CheckpointName, *, run: str) -> bytes:
    """The mark of an attempt's first publish: what it published, in which run, and that no other mark is this one."""
    return f"{name} {run} {new_nonce()}\n".encode("ascii")


def _marked_run(store: Store, attempt: int) -> str | None:
    """The run that the mark of an attempt's first publish names; None if it names none, or is gone."""
    try:
        words = (
            store.read(attempt_published(attempt), max_bytes=_MARK_BYTES).decode("ascii", "replace").split()
        )
    except StorageNotFound:
        return None
    return words[1] if len(words) == 3 and _NONCE.fullmatch(words[1]) else None


def attempt_exists(store: Store, attempt: int) -> bool:
    """Whether the attempt was claimed: one read by key, never a listing, which may be old.

    Raises:
        StorageError: the store could not say.
    """
    try:
        store.read(attempt_record(attempt), max_bytes=MAX_BYTES)
    except StorageNotFound:
        return False
    return True


def newer_attempt(store: Store, attempt: int, *, nonce: str | None = None) -> int | None:
    """The attempt that has superseded `attempt`. Attempts have no gaps, so one look is enough.

    Args:
        store: the run.
        attempt: ours.
        nonce: ours, on a store without create-if-absent: there another start can have taken the same number,
            and then `attempt` itself is the answer (rule 12).

    Raises:
        StorageError: the store could not say.
    """
    if attempt_exists(store, attempt + 1):
        return attempt + 1
    if nonce is not None and not _is_held(store, attempt, nonce):
        return attempt
    return None


def read_branch(store: Store, listing: Listing) -> Branch:
    """The rollbacks that count: what the newest record says.

    A record that is damaged may be passed over if its attempt left a checkpoint, for then it was no rollback and
    the record before it says the same.

    Raises:
        DamagedCheckpoint: nobody knows whether the newest attempt was a rollback.
        UnsupportedFormat: a newer spotsafe wrote the record.
        StorageError: it could not be read.
    """
    trained = listing.published | {name.attempt for name in listing.names}
    for attempt in listing.numbers:
        try:
            return read_attempt(store, attempt).rollbacks
        except StorageNotFound:
            if attempt in listing.attempts:
                raise
        except DamagedCheckpoint as error:
            if attempt not in trained and attempt > 1:
                _undecided(store, error)
    return ()


def branch_at(store: Store, listing: Listing, name: CheckpointName) -> Branch:
    """The branch that a checkpoint lies on: what the record of its attempt says.

    Where that record is gone or damaged, the newest one's history up to it.

    Raises:
        UnsupportedFormat: a newer spotsafe wrote a record.
        StorageError: one could not be read.
    """
    try:
        return read_attempt(store, name.attempt).rollbacks
    except (StorageNotFound, DamagedCheckpoint):
        pass
    try:
        return until(read_branch(store, listing), name.attempt)
    except DamagedCheckpoint:
        return ()


def _is_held(store: Store, attempt: int, nonce: str) -> bool:
    try:
        return read_attempt(store, attempt).nonce == nonce
    except (StorageNotFound, DamagedCheckpoint):
        return False


def _undecided(store: Store, error: DamagedCheckpoint) -> NoReturn:
    reason = (
        f"{error.reason}. It may say that the run was rolled back, so nobody knows which checkpoint counts; "
        f"decide it: spotsafe rollback {store.url}@STEP"
    )
    raise DamagedCheckpoint(checkpoint=error.checkpoint, file=error.file, reason=reason) from error


def _check_rollbacks(record: AttemptRecord) -> None:
    numbers = [rollback.attempt for rollback in record.rollbacks]
    if numbers != sorted(set(numbers)) or not all(0 < number <= record.attempt for number in numbers):
        _damaged(record.attempt, f"rollbacks of attempts {numbers}")
    for rollback in record.rollbacks:
        try:
            earlier = rollback.name.attempt < rollback.attempt
        except ValueError as error:
            _damaged(record.attempt, str(error))
        if not earlier:
            _damaged(record.attempt, f"attempt {rollback.attempt} cannot have gone back to {rollback.to}")


def _check_format(members: dict[str, Any], *, attempt: int) -> None:
    version, requires = members.get("format"), members.get("requires", [])
    if type(version) is not int or not isinstance(requires, list):
        _damaged(attempt, "no format number")
    if version > FORMAT or requires:
        found = ", ".join([f"format {version}", *(f"requires {need}" for need in requires)])
        path = attempt_record(attempt)
        raise UnsupportedFormat(
            f"{path} was written by a newer spotsafe ({found}); upgrade spotsafe to use this run",
            checkpoint=path,
            found=found,
        )


def _damaged(attempt: int, reason: str) -> NoReturn:
    file = attempt_record(attempt).rpartition("/")[2]
    raise DamagedCheckpoint(checkpoint=ATTEMPTS, file=file, reason=reason)
