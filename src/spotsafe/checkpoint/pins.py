"""Pins: a reader keeps a checkpoint from being deleted while it reads it.

A pin is an object in ``pins/``. Whoever deletes looks there twice: before anything is withdrawn, and again when the
manifests are withdrawn and before the first file is touched. A reader creates its pin and then reads the manifest
again. So either the deleter sees the pin in time, or the reader sees that the checkpoint is gone. In between is one
case: the reader has seen the manifest, and the deleter, which withdrew it right after, sees the pin at its second
look and leaves the files. That is why a pin holds a copy of the manifest: what was pinned can be read.

A pin ends when it is deleted, or at its time: a reader that was killed must not keep a checkpoint for ever. Times
are those of the machines' clocks; a pin counts for `SLACK_S` longer than it says.
"""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import msgspec

from spotsafe.checkpoint import manifest as manifest_format, sealed
from spotsafe.checkpoint.layout import PINS, CheckpointName, parse_pin, pin as pin_path
from spotsafe.checkpoint.manifest import ABANDONED, Manifest, Marker, encode_marker
from spotsafe.checkpoint.versions import VERSION, check_version
from spotsafe.errors import (
    CheckpointNotFound,
    DamagedCheckpoint,
    StorageError,
    StorageNotFound,
    UnsupportedFormat,
)
from spotsafe.identity import Identity, new_nonce
from spotsafe.storage.store import Store

SLACK_S = 900.0
"""Seconds by which the clocks of reader and deleter may differ."""
MAX_BYTES = 4 << 20
"""A manifest in base64, and a few words."""

READER, ROLLBACK, TRIAL = "reader", "rollback", "trial"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A reader's wish that a checkpoint stays."""

    checkpoint: str
    nonce: str
    until: float
    """Unix time in seconds."""
    host: str
    pid: int
    manifest: str
    """The bytes of the checkpoint's manifest in base64."""
    purpose: str = READER
    """Who needs the checkpoint: a reader, or the start after a rollback; nobody, if it is a trial of the store."""

    @property
    def path(self) -> str:
        """Where it lies in the run."""
        name = CheckpointName.parse(self.checkpoint)
        assert name is not None, "checked when it was made or read"
        return pin_path(name, self.nonce)

    def lasts(self, now: float) -> bool:
        """Whether it still counts at `now` (Unix seconds of the machine that asks)."""
        return now <= self.until + SLACK_S


def place_pin(
    store: Store, name: CheckpointName, *, until: float, identity: Identity, purpose: str = READER
) -> Pin:
    """Keep a published checkpoint until `until` (Unix seconds) or until `remove_pin`.

    Raises:
        CheckpointNotFound: it is not published, or was withdrawn at this very moment; no pin is left.
        DamagedCheckpoint: its manifest cannot be read.
        StorageError: it is unknown whether the pin is there; if it is, it ends by itself.
    """
    before = _read_manifest(store, name)
    pin = Pin(
        checkpoint=str(name),
        nonce=new_nonce(),
        until=until,
        host=identity.host,
        pid=identity.pid,
        manifest=base64.b64encode(before).decode("ascii"),
        purpose=purpose,
    )
    store.create(pin.path, _encode(pin))
    try:
        if _read_manifest(store, name) != before:  # only now: see above
            raise CheckpointNotFound(f"{name} changed while it was being pinned")
    except (CheckpointNotFound, DamagedCheckpoint):
        store.delete(pin.path)
        raise
    return pin


def refuses_second_pin(store: Store, name: CheckpointName, *, now: float) -> bool:
    """Whether the store refuses to create what is there: tried with a pin that ends now, and is removed again.

    Its path is nobody else's, so that neither the trial nor a request of it that arrives late harms anything.

    Args:
        store: the run.
        name: a checkpoint that is garbage.
        now: Unix seconds.

    Raises:
        StorageError: the store could not say; a pin that is left keeps the garbage for `SLACK_S`.
    """
    nothing = base64.b64encode(encode_marker(Marker(state=ABANDONED))).decode("ascii")
    pin = Pin(
        checkpoint=str(name), nonce=new_nonce(), until=now, host="", pid=0, manifest=nothing, purpose=TRIAL
    )
    first, second = (_encode(replace(pin, until=until)) for until in (now, now - 1))
    store.create(pin.path, first)
    try:
        refused = not store.create(pin.path, second)
        return refused and store.read(pin.path, max_bytes=MAX_BYTES) == first
    except StorageNotFound:
        return False  # somebody whose clock is ahead has removed it
    finally:
        store.delete(pin.path)


def remove_pins(store: Store, name: CheckpointName, *, purpose: str = READER) -> int:
    """Delete the pins of a checkpoint that serve a purpose, whoever placed them; how many there were.

    What cannot be read counts as a reader's.

    Raises:
        StorageError: the store could not say or refused.
    """
    found = [one for one in store.names(PINS) if parse_pin(one) == name]
    doomed = [one for one in found if _purpose(_read_pin(store, one)) == purpose]
    for one in doomed:
        store.delete(f"{PINS}/{one}")
    return len(doomed)


def _purpose(pin: Pin | None) -> str:
    return READER if pin is None else pin.purpose


def pinned(store: Store, names: Iterable[CheckpointName], *, now: float) -> frozenset[CheckpointName]:
    """Which of these checkpoints a reader keeps; what retention and gc have to leave alone.

    A pin that cannot be read keeps its checkpoint: nobody knows how long. One that is over is deleted.

    Args:
        store: the run.
        names: what is about to be deleted.
        now: Unix seconds.

    Raises:
        StorageError: the store could not say; then nothing may be deleted.
    """
    wanted = frozenset(names)
    kept = set()
    for file in store.names(PINS) if wanted else ():
        name = parse_pin(file)
        if name is None or name not in wanted or name in kept:
            continue
        pin = _read_pin(store, file)
        if pin is None or pin.lasts(now):
            kept.add(name)
        else:
            with suppress(StorageError):  # it is over all the same
                store.delete(f"{PINS}/{file}")
    return frozenset(kept)


def read_pins(store: Store) -> list[tuple[CheckpointName, Pin | None]]:
    """Every pin of the run; None for what cannot be read.

    Raises:
        StorageError: the store could not say.
    """
    found = [(parse_pin(file), file) for file in store.names(PINS)]
    return [(name, _read_pin(store, file)) for name, file in found if name is not None]


def pinned_manifests(store: Store, *, now: float) -> list[Manifest] | None:
    """What readers keep, as it was when they pinned it; None if a pin cannot be read.

    A checkpoint that was withdrawn while it was pinned needs the files that it refers to.

    Raises:
        StorageError: the store could not say.
    """
    found = []
    for name, pin in read_pins(store):
        if pin is None:
            return None
        manifest = manifest_format.decode(base64.b64decode(pin.manifest), expected=name)
        if pin.lasts(now) and isinstance(manifest, Manifest):
            found.append(manifest)
    return found


def pinned_manifest(store: Store, name: CheckpointName) -> Manifest | None:
    """The manifest of a checkpoint that was withdrawn while a reader pinned it; None if no pin has it.

    Raises:
        StorageError: the store could not say.
    """
    for other, pin in read_pins(store):
        if other == name and pin is not None:
            found = manifest_format.decode(base64.b64decode(pin.manifest), expected=name)
            if isinstance(found, Manifest):
                return found
    return None


def _read_manifest(store: Store, name: CheckpointName) -> bytes:
    """The bytes of a published manifest. Damage is believed after a second read."""
    try:
        return _read_once(store, name)
    except DamagedCheckpoint:
        return _read_once(store, name)


def _read_once(store: Store, name: CheckpointName) -> bytes:
    try:
        data = store.read(name.manifest, max_bytes=manifest_format.MAX_BYTES)
    except StorageNotFound:
        raise CheckpointNotFound(f"{store.url} has no checkpoint {name} any more") from None
    if not isinstance(manifest_format.decode(data, expected=name), Manifest):
        raise CheckpointNotFound(f"{store.url} has no checkpoint {name} any more")
    return data


def _read_pin(store: Store, file: str) -> Pin | None:
    """What a pin says; None if that cannot be known, which keeps the checkpoint."""
    try:
        return _decode(store.read(f"{PINS}/{file}", max_bytes=MAX_BYTES), file=file)
    except StorageNotFound:
        return None  # removed at this moment; the next look knows
    except (DamagedCheckpoint, UnsupportedFormat) as error:
        _log.warning("%s; it keeps its checkpoint until somebody removes it", error)
        return None


def _encode(pin: Pin) -> bytes:
    return sealed.seal({**VERSION, **msgspec.to_builtins(pin)})


def _decode(data: bytes, *, file: str) -> Pin:
    try:
        members: dict[str, Any] = sealed.unseal(data, max_bytes=MAX_BYTES)
        pin = msgspec.convert(check_version(members, file=f"{PINS}/{file}", checkpoint=file), Pin)
        name = CheckpointName.parse(pin.checkpoint)
        if name is None or pin_path(name, pin.nonce) != f"{PINS}/{file}" or not math.isfinite(pin.until):
            _refuse(file, "it is not what its name says")
        manifest_format.decode(base64.b64decode(pin.manifest, validate=True), expected=name)
    except UnsupportedFormat:
        raise
    except (ValueError, msgspec.ValidationError) as error:
        _refuse(file, str(error))
    return pin


def _refuse(file: str, reason: str) -> NoReturn:
    raise DamagedCheckpoint(checkpoint=PINS, file=file, reason=reason)
