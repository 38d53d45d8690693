"""Messages between the trainer and its writer process: whole ones or none, and descriptors with them.

A message goes at once or not at all: nobody reads half of one when a process dies in the middle, and sending never
waits for somebody to read. A large one lies in memory of its own, of which only the descriptor is sent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import weakref
from collections.abc import Sequence

from spotsafe.descriptors import File, file_at

_INLINE, _APART = b"\0", b"\1"
_MOST_INLINE = 32 << 10
_DESCRIPTORS = 8

_here: weakref.WeakKeyDictionary[socket.socket, File | None] = weakref.WeakKeyDictionary()


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends; neither is left open in a forked child, which would keep the other side from seeing an end."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for one in ends:
        one.setblocking(False)
        _here[one] = file_at(one.fileno())
    return ends


def close(end: socket.socket) -> None:
    """Close one end of a `pair`, unless the program has: then nothing is open there, or something of its own."""
    if _is_ours(end):
        end.close()
    else:
        end.detach()


def say_no_more(end: socket.socket, how: int) -> None:
    """Shut one end of a `pair` down, or a direction of it; nothing if that is gone already."""
    if _is_ours(end):
        with contextlib.suppress(OSError):
            end.shutdown(how)


def _is_ours(end: socket.socket) -> bool:
    """Whether that end is still what is open at its number; of one that came from elsewhere nobody knows."""
    return end not in _here or file_at(end.fileno()) == _here[end]


def _require_ours(end: socket.socket) -> None:
    if not _is_ours(end):
        raise ConnectionAbortedError(
            errno.ECONNABORTED, "the program has closed the connection to the writer process"
        )


def send(end: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one message; the descriptors stay open here, and are open there.

    Raises:
        BlockingIOError: the other side has not read for a long time.
        OSError: it is gone.
    """
    _require_ours(end)
    if len(data) <= _MOST_INLINE:
        socket.send_fds(end, [_INLINE, data], descriptors)
        return
    apart = os.memfd_create("spotsafe-message", os.MFD_CLOEXEC)
    try:
        with open(apart, "wb", closefd=False) as file:
            file.write(data)
        socket.send_fds(end, [_APART], [apart, *descriptors])
    finally:
        os.close(apart)


def receive(end: socket.socket) -> tuple[bytes, list[int]] | None:
    """The next message and its descriptors, which are the caller's to close; None if the other side is gone.

    Raises:
        BlockingIOError: there is none yet.
        ConnectionAbortedError: this side was closed by somebody else.
    """
    _require_ours(end)
    for _ in range(2):
        try:
            data, descriptors, _, _ = socket.recv_fds(
                end, _MOST_INLINE + 1, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            break
        except (
            ConnectionError
        ):  # told once if the other side has left something unread; what it sent is still here
            continue
    else:
        return None
    if data[:1] != _APART:
        return (data[1:], descriptors) if data else None
    with open(descriptors[0], "rb") as file:
        file.seek(0)  # the place in it is shared with whoever wrote it
        return file.read(), descriptors[1:]


def _close_in_child() -> None:
    for one in list(_here):
        with contextlib.suppress(OSError):
            close(one)


os.register_at_fork(after_in_child=_close_in_child)
