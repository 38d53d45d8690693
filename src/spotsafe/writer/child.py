"""A child process that is started without a fork, and watched without a pipe.

`subprocess` learns of a failed start by a pipe. A DataLoader worker that another thread forks at that very instant
would hold it open, and whoever starts the child would wait until the worker ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time
from collections.abc import Mapping

from spotsafe.descriptors import close_if, file_at

CONNECTION = 3
"""The descriptor that a child finds its connection at; behind it there are only those that nobody meant for it."""
_LOOK_EVERY_S = 0.05
_ABOVE = 16


class Child:
    """A running child in a session of its own, with nothing on its standard input.

    Args:
        command: absolute path of the program, and its arguments.
        environment: its variables.
        log: descriptor that its standard output and error go to.
        connection: descriptor that is its `CONNECTION`.

    Attributes:
        pid: its number.

    Raises:
        OSError: it could not be started.
        NotImplementedError: not on this system.
    """

    def __init__(
        self, command: list[str], *, environment: Mapping[str, str], log: int, connection: int
    ) -> None:
        apart = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
        try:
            self.pid = os.posix_spawn(
                command[0],
                command,
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, log, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, apart, CONNECTION),
                ],
                setsid=True,
                setsigmask=[],
            )
        finally:
            os.close(apart)
        self._code: int | None = None
        self._watch = -1
        with contextlib.suppress(AttributeError, OSError):
            self._watch = os.pidfd_open(self.pid)
        self._file = file_at(self._watch)

    @property
    def watch(self) -> int | None:
        """A descriptor that can be read from when it has ended; None where there is none, or the program closed it."""
        return self._watch if self._file is not None and file_at(self._watch) == self._file else None

    @property
    def ended(self) -> bool:
        """Whether it has; then it is no zombie any more."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody waits for all children of this process
                self._code = 0
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is not None

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, negative for a signal; None if it lives on for so many seconds."""
        end = time.monotonic() + timeout_s
        while not self.ended:
            left = end - time.monotonic()
            if left <= 0:
                return None
            watch = self.watch
            if watch is None:
                time.sleep(min(left, _LOOK_EVERY_S))
            else:
                poll = select.poll()
                poll.register(watch, select.POLLIN)
                poll.poll(left * 1000)
        return self._code

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        with contextlib.suppress(OSError):  # gone, or just found to be so by another thread
            watch = self.watch
            if watch is not None:
                signal.pidfd_send_signal(watch, signal.SIGKILL)
            elif not self.ended:
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Watch it no more; when it has ended."""
        close_if(self._file, self._watch)
        self._file = None
