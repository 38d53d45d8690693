"""Which writer processes live on this host, and for which run: so that a start can wait for one that is left over.

A writer holds a lock on a file of its own as long as it lives, whatever ends it. The file says whose writer it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import stat
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass

from spotsafe.clock import Clock
from spotsafe.events import Event, WriterAwaited
from spotsafe.identity import Identity, is_running
from spotsafe.telling import Telling

_LOOK_EVERY_S = 0.05
_MOST = 1 << 12

LOCK, LOG = ".lock", ".log"
"""How the names of a writer's files end."""


def runtime_folder() -> str:
    """A folder of this user on this host, that nobody else can look into; made if it is not there.

    Raises:
        OSError: there is none to be had, or somebody else has made it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.isdir(base) or not os.access(base, os.W_OK | os.X_OK):
        base = tempfile.gettempdir()
    folder = os.path.join(base, f"spotsafe-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is no folder of this user alone; remove it")
    return folder


@dataclass(frozen=True, slots=True)
class Presence:
    """The lock of a writer, before it has one of its own."""

    fd: int
    """To be passed to the writer, and closed here: the lock lasts as long as anybody has it open."""
    path: str


def log_of(lock: str) -> str:
    """Where the writer that has this lock writes what nobody expected."""
    return lock.removesuffix(LOCK) + LOG


def announce(place: str, *, folder: str, identity: Identity) -> Presence:
    """Take a lock for a writer that is about to be started.

    Args:
        place: the run, as `same_place` spells it.
        folder: from `runtime_folder`.
        identity: of the trainer.

    Raises:
        OSError: the folder cannot be written to.
    """
    while True:
        path = os.path.join(folder, f"{_key(place)}.{secrets.token_hex(8)}{LOCK}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        _open_here.add(fd)
        presence = Presence(fd, path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, json.dumps({"trainer": identity.pid, "boot": identity.boot}).encode())
            if os.path.exists(path):  # else a start took it for one that nobody holds, right before the lock
                return presence
        except BaseException:
            release(presence)
            raise
        release(presence)


def release(presence: Presence) -> None:
    """Close it here."""
    if presence.fd in _open_here:
        _open_here.discard(presence.fd)
        os.close(presence.fd)


def await_writers(
    place: str, *, identity: Identity, clock: Clock, limit_s: float, emit: Callable[[Event], object]
) -> bool:
    """Wait until no writer of a trainer that has ended works on the run; at once if there is none.

    One whose trainer lives is not waited for: whether that job may be joined is not decided here.

    Args:
        place: the run, as `same_place` spells it.
        identity: of this process.
        clock: measures, and waits.
        limit_s: seconds to wait at most.
        emit: is told every few seconds.

    Returns:
        False if one still works.
    """
    try:
        folder = runtime_folder()
    except OSError:
        return True

    def awaited(waited_s: float, over: bool) -> WriterAwaited:
        return WriterAwaited(waited_s=waited_s, limit_s=limit_s, over=over)

    end = clock.monotonic() + limit_s
    with Telling(awaited, emit=emit, clock=clock, first_s=0.0) as telling:
        while _left_over(folder, place, identity):
            if clock.monotonic() >= end:
                return False
            telling.look()
            clock.wait(threading.Event(), _LOOK_EVERY_S)
    return True


def _left_over(folder: str, place: str, identity: Identity) -> bool:
    with contextlib.suppress(OSError):
        key = f"{_key(place)}."
        names = [name for name in os.listdir(folder) if name.startswith(key) and name.endswith(LOCK)]
        left = [
            _is_left_over(os.path.join(folder, name), identity) for name in names
        ]  # all: it also tidies up
        return any(left)
    return False


def _is_left_over(path: str, identity: Identity) -> bool:
    """Whether a writer holds the lock whose trainer has ended. A file that nobody holds is removed."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # on a network's disk only a writer gets the lock
    except OSError:
        return False
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _trainer_has_ended(os.pread(fd, _MOST, 0), identity)
        except OSError:  # no locks here: then nobody can be waited for
            return False
        with contextlib.suppress(OSError):
            os.unlink(path)
            if not os.path.getsize(log_of(path)):
                os.unlink(log_of(path))
        return False
    finally:
        os.close(fd)


def _trainer_has_ended(data: bytes, identity: Identity) -> bool:
    try:
        whose = json.loads(data)
        pid, boot = int(whose["trainer"]), whose["boot"]
    except (ValueError, TypeError, KeyError):
        return False  # being written
    return boot == identity.boot and not is_running(pid)


def _key(place: str) -> str:
    return hashlib.sha256(place.encode(errors="surrogateescape")).hexdigest()[:32]


_open_here: set[int] = set()


def _close_in_child() -> None:
    for fd in _open_here:
        os.close(fd)
    _open_here.clear()


os.register_at_fork(after_in_child=_close_in_child)
