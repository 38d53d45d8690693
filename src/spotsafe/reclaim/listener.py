"""Hears signals while the main thread cannot, by the interpreter's wakeup descriptor.

The C handler of the interpreter writes each signal's number to one descriptor at once, whatever the main
thread is doing (`signal.set_wakeup_fd`, https://docs.python.org/3/library/signal.html). There is one such
descriptor in a process, and asyncio or others may hold it, so what arrives is passed on to the owner before
us.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from spotsafe.descriptors import File, close_if, file_at

_END = 0  # no signal has this number


class Listener:
    """A thread that hands each signal's number to a function. Only the main thread may start and stop it."""

    def __init__(self, heard: Callable[[int], None]) -> None:
        self._heard = heard
        self._reader = self._writer = -1
        self._pipe: File | None = None
        self._before: _Owner | None = None
        self._below: Listener | None = None
        self.stopped = False
        self._thread = threading.Thread(target=self._run, name="spotsafe-signals", daemon=True)

    def start(self) -> bool:
        """Take the descriptor and listen.

        Returns:
            False where that would get in somebody's way: an asyncio loop runs in this thread (it takes and
            gives up the descriptor as it likes), or the present owner's cannot be written to without waiting.
        """
        if _asyncio_runs_here():
            return False
        # Looked at before ours is opened, which would get the number of one that is closed.
        previous = signal.set_wakeup_fd(-1)
        self._below = next((each for each in _listening if each.has(previous)), None)
        self._before = _Owner.of(previous)
        if self._before is not None and self._before.can_wait:
            _hand_to(previous)
            return False
        self._reader, self._writer = os.pipe()
        self._pipe = file_at(self._writer)
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        _listening.append(self)
        self._thread.start()
        return True

    def stop(self) -> None:
        """Give the descriptor back, unless somebody has taken it since, and end the thread."""
        self._give_back()
        self.stopped = True
        _listening.remove(self)
        with contextlib.suppress(OSError):
            # Else the program has closed it, and the number is another's.
            if file_at(self._writer) == self._pipe:
                os.write(self._writer, bytes([_END]))
        self._thread.join(1.0)
        if not self._thread.is_alive():
            self._close()

    def forget_in_child(self) -> None:
        """In a forked child: signals of the child must not reach the parent's ear."""
        self._give_back()
        self.stopped = True
        _listening.remove(self)

    def has(self, descriptor: int) -> bool:
        """Whether it listens at that descriptor."""
        return descriptor == self._writer

    def _give_back(self) -> None:
        current = signal.set_wakeup_fd(-1)
        if current == self._writer:
            owner = self.owner()
            current = owner.descriptor if owner is not None and owner.lives() else -1
        _hand_to(current)

    def owner(self) -> _Owner | None:
        """Whose turn it is after us: who was there before, leaving out listeners that have stopped since."""
        if self._below is not None and self._below.stopped:
            return self._below.owner()
        return self._before

    def _run(self) -> None:
        for number in self._numbers():
            with contextlib.suppress(Exception):
                self._heard(number)

    def _numbers(self) -> Iterator[int]:
        while True:
            try:
                data = os.read(self._reader, 4096)
            except OSError:
                return
            numbers = data.replace(bytes([_END]), b"")
            owner = self.owner()
            if numbers and owner is not None:
                owner.pass_on(numbers)
            yield from numbers
            if len(numbers) != len(data) or not data:
                return

    def _close(self) -> None:
        close_if(self._pipe, self._reader)
        close_if(self._pipe, self._writer)


class _Owner:
    """A wakeup descriptor that was there before ours, and the open file it stood for."""

    def __init__(self, descriptor: int, file: File) -> None:
        self.descriptor = descriptor
        self.can_wait = os.get_blocking(descriptor)
        self._file = file

    @staticmethod
    def of(descriptor: int) -> _Owner | None:
        """None for -1, and for one that is closed: nobody reads there."""
        file = file_at(descriptor)
        return None if file is None else _Owner(descriptor, file)

    def lives(self) -> bool:
        """Whether the number still stands for the same file; by now it could be anybody's."""
        return file_at(self.descriptor) == self._file

    def pass_on(self, numbers: bytes) -> None:
        """Write the numbers there; a full or closed descriptor loses them, as it would without us."""
        with contextlib.suppress(OSError):
            if self.lives():
                os.write(self.descriptor, numbers)


def _hand_to(descriptor: int) -> None:
    """Give the interpreter another's descriptor; -1 and one that is closed by now mean none.

    The interpreter refuses one that blocks. An owner that made it so later still gets it back as it was.
    """
    if descriptor == -1:
        return
    with contextlib.suppress(OSError):
        blocks = os.get_blocking(descriptor)
        os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        os.set_blocking(descriptor, blocks)


def _asyncio_runs_here() -> bool:
    asyncio = sys.modules.get("asyncio")  # nobody's loop runs where nobody has imported it
    if asyncio is None:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_listening: list[Listener] = []
