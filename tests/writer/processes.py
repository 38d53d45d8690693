"""What tests ask of a writer process: where it is, what it is, and that it stands still for a while."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spotsafe.writer.boot import NAME

PATIENCE_S = 60.0


def status(pid: int) -> dict[str, str]:
    """``/proc/PID/status``; empty if there is no such process any more."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def writers(parent: int | None = None) -> list[int]:
    """The writer processes of a process, this one by default, that have named themselves and are no zombies."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            of = status(int(name))
            mine = of.get("PPid") == str(os.getpid() if parent is None else parent)
            if mine and of.get("Name") == NAME and not of["State"].startswith("Z"):
                found.append(int(name))
    return found


def lives(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    return status(pid).get("State", "Z")[0] not in "ZX"


def until(condition: Callable[[], bool], *, what: str) -> None:
    """Return when the condition holds.

    Raises:
        TimeoutError: it never did.
    """
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.005)


def the_writer(parent: int | None = None) -> int:
    """The one writer process, as soon as it is there."""
    until(lambda: len(writers(parent)) == 1, what="one writer process")
    return writers(parent)[0]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing inside of the block."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: status(pid)["State"].startswith("T"), what="stopped")
    try:
        yield
    finally:
        if lives(pid):
            os.kill(pid, signal.SIGCONT)


def runtime_files(folder: Path) -> list[str]:
    """What lies in the runtime folder of this user below `folder`."""
    inner = folder / f"spotsafe-{os.getuid()}"
    return sorted(os.listdir(inner)) if inner.is_dir() else []
