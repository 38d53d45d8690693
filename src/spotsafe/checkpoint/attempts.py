"""The record of an attempt: one small object for each start of a run. Creating it is the claim."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from spotsafe.checkpoint import sealed
from spotsafe.checkpoint.branch import Branch
from spotsafe.checkpoint.layout import ATTEMPTS, attempt_record
from spotsafe.errors import DamagedCheckpoint, StorageNotFound, UnsupportedFormat
from spotsafe.storage.store import Store

FORMAT = 1
MAX_BYTES = 8 << 20
"""A command line may be long (2 MiB on Linux), and a character may take several bytes in JSON."""

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


def newer_attempt(store: Store, attempt: int) -> int | None:
    """The attempt after `attempt` if it exists. Attempts have no gaps, so one look is enough.

    Raises:
        StorageError: the store could not say.
    """
    return attempt + 1 if attempt_exists(store, attempt + 1) else None


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
