"""``spotsafe watch``: runs a program that knows only SIGTERM, and sends it one when the machine is to go."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

import click

from spotsafe import human
from spotsafe.cli.output import say
from spotsafe.events import Event, NoticeCancelled, NoticeReceived, WatcherBlind, WatcherRecovered
from spotsafe.reclaim.detect import detect
from spotsafe.reclaim.notice import NoticeKind
from spotsafe.reclaim.watcher import Watch

_PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGWINCH")
_FROM_THE_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH})
"""The kernel sends these to everybody who runs in the foreground of a terminal."""
_SIGNALS = sorted(one.name.removeprefix("SIG") for one in signal.Signals)
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes for a program that could not be started, as shells have them."""


@click.command(
    "watch",
    short_help="Run a program, and signal to it that the machine goes.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
@click.option(
    "--signal",
    "name",
    default="TERM",
    show_default=True,
    type=click.Choice(_SIGNALS),
    metavar="NAME",
    help="What the program is sent.",
)
@click.option(
    "--grace", type=click.FloatRange(0), help="Seconds that remain after any notice, where you know better."
)
def command(program: tuple[str, ...], *, name: str, grace: float | None) -> None:
    """Run COMMAND, and send it a signal when a cloud announces that this machine goes.

    For programs that do not use spotsafe but save and leave at SIGTERM: spotsafe watch -- python train.py. A notice is
    passed on once, at once, and said on standard error with the seconds that are left. What is only a risk is said, and
    no signal is sent. Signals that come to this process are passed on.

    Exit codes: that of COMMAND; 128 and the signal's number if one ended it; 127 if there is no such program; 126 if
    it cannot be run.
    """
    child = _Child(program, signal.Signals[f"SIG{name}"])
    try:
        watch = Watch(detect(), emit=child.hear, grace_s=grace)
    except ValueError as error:  # a variable that says where to ask
        raise click.ClickException(str(error)) from error
    sources = ", ".join(watch.sources)
    _tell(
        f"watching: {sources}" if sources else "no cloud seen that announces a reclaim; signals are passed on"
    )
    child.start()
    watch.start()
    code = child.wait()
    watch.stop()
    _leave(code)


class _Child:
    """The program, from its start to its end.

    Args:
        program: what to run, with its arguments.
        number: the signal for a notice.
    """

    def __init__(self, program: tuple[str, ...], number: signal.Signals) -> None:
        self._program, self._number = program, number
        self._pid = 0
        self._lock = threading.RLock()  # as a handler of this thread may need it too
        self._noticed = False

    def start(self) -> None:
        """Start it; signals that come from now on are passed on."""
        # Some launchers leave it ignored: then the kernel keeps no exit code of a child.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        blocked = {getattr(signal, one) for one in _PASSED_ON if hasattr(signal, one)}
        # None may come between the start and the handlers. The program itself begins as this process did.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            self._pid = os.posix_spawnp(
                self._program[0], self._program, os.environ, setsigmask=before, setsigdef=_IGNORED_BY_PYTHON
            )
        except OSError as error:
            _tell(f"{self._program[0]}: {error.strerror}")
            _leave(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)
        for number in blocked:
            signal.signal(number, self._pass_on)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def hear(self, event: Event) -> None:
        """Take what the watch tells."""
        if isinstance(event, NoticeReceived):
            left = "" if event.seconds_left is None else f", {human.duration(event.seconds_left)} left"
            what = f"{event.source}: {event.action}{left}"
            if event.kind != NoticeKind.RECLAIM.value:
                _tell(f"{what}; only a risk, no signal is sent")
            elif self._noticed:
                _tell(f"{what}; the signal was sent before")
            else:
                self._noticed = True
                _tell(f"{what}; {self._number.name} is sent")
                self._send(self._number)
        elif isinstance(event, NoticeCancelled):
            self._noticed = False
            _tell(f"{event.source} has taken its notice back")
        elif isinstance(event, WatcherBlind):
            _tell(f"{event.source} cannot be asked: {event.error}")
        elif isinstance(event, WatcherRecovered):
            _tell(f"{event.source} answers again")

    def wait(self) -> int:
        """Wait for its end, and for that of orphans on the way, if this is the first process of a container.

        Returns:
            The exit code, as a shell gives it.
        """
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert ended is not None, "waited for"
            if ended.si_pid != self._pid:
                os.waitpid(ended.si_pid, 0)
                continue
            with self._lock:  # until it is waited for, its number is nobody else's
                _, status = os.waitpid(self._pid, 0)
                self._pid = 0
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code

    def _send(self, number: int) -> None:
        with self._lock:
            if self._pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self._pid, number)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if number not in _FROM_THE_TERMINAL or not _in_foreground():
            self._send(number)


def _in_foreground() -> bool:
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(0) == os.getpgrp()
    return False


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody has to read it
        say(f"spotsafe watch: {text}", err=True)


def _leave(code: int) -> NoReturn:
    sys.exit(code)
