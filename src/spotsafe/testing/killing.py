"""Die at a chosen event: the way to prove that a run survives being killed exactly there.

::

    python -m spotsafe.testing.killing --at FileWritten:2 -- train.py --lr 0.1

runs ``train.py --lr 0.1`` as ``python train.py --lr 0.1`` would, and kills the process with SIGKILL when the
second data file is durable. The script is not changed and does not know. Unless ``SPOTSAFE_WRITER`` says otherwise a
thread of the script's process writes, not a process of its own: that one would go on, and tell of what it did when it
has already done more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from spotsafe import events
from spotsafe.events import Event
from spotsafe.options import WRITER
from spotsafe.testing.sinks import event_types


class KillAt:
    """A sink that sends a signal to its own process at the `count`-th event of a type.

    Args:
        event: name of a type in `spotsafe.events`.
        count: at which of them, from 1. Later ones do nothing.
        signum: the signal; SIGKILL leaves no chance to clean up, which is the point.

    Raises:
        ValueError: there is no such event: a misspelt name would never kill, and the test prove nothing.
    """

    def __init__(self, event: str, *, count: int = 1, signum: int = signal.SIGKILL) -> None:
        kind = {one.__name__: one for one in event_types()}.get(event)
        if kind is None:
            raise ValueError(f"spotsafe.events has no event {event!r}")
        if count < 1:
            raise ValueError(f"events are counted from 1, got {count!r}")
        self._kind = kind
        self._left = count
        self._signal = signum
        self._lock = threading.Lock()

    @property
    def fired(self) -> bool:
        """Whether the signal was sent."""
        return self._left == 0

    def emit(self, event: Event) -> None:
        """Count the event; send the signal if it is the one."""
        if not isinstance(event, self._kind):
            return
        with self._lock:
            if self._left == 0:
                return
            self._left -= 1
            if self._left > 0:
                return
        os.kill(os.getpid(), self._signal)


def kill_machine(pid: int) -> None:
    """SIGKILL a process and what it has started, as if their machine had gone: none of them sees the other's end.

    Where there is no ``/proc`` only the process itself.
    """
    os.kill(pid, signal.SIGSTOP)
    for one in [*_children(pid), pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text(errors="replace").rpartition(")")[2].split()[1] == str(pid):
                found.append(int(stat.parent.name))
    return found


def run_script(arguments: Sequence[str]) -> None:
    """Run a script with its arguments as ``python script.py ...`` would: the rest of this process is its."""
    script = arguments[0]
    sys.argv = list(arguments)
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m spotsafe.testing.killing",
        description="Run a training script and kill it at a chosen event.",
    )
    parser.add_argument("--at", required=True, metavar="EVENT[:COUNT]", help="such as FileWritten:2")
    parser.add_argument("--signal", default="SIGKILL", help="name of the signal (default: SIGKILL)")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="-- script.py and its arguments")
    options = parser.parse_args(arguments)
    script = options.script[1:] if options.script[:1] == ["--"] else options.script
    if not script:
        parser.error("no script; write -- script.py behind the options")
    sink = _parse_sink(parser, at=options.at, signal_name=options.signal)
    events.install(sink)
    os.environ.setdefault(WRITER, "thread")
    try:
        run_script(script)
    finally:
        if not sink.fired:
            sys.stderr.write(f"spotsafe: the script ended before {options.at}; nothing was killed\n")


def _parse_sink(parser: argparse.ArgumentParser, *, at: str, signal_name: str) -> KillAt:
    name, _, count = at.partition(":")
    try:
        return KillAt(name, count=int(count or 1), signum=signal.Signals[signal_name])
    except KeyError:
        parser.error(f"no such signal: {signal_name}")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
