"""Processes for tests: forked from a server that has imported torch, or new interpreters; always real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
"""After so long nothing comes any more, on the busiest machine."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Process:
    """A process that was started and has to be waited for."""

    def __init__(self, pid: int, wait: Callable[[float], int | None]) -> None:
        self.pid = pid
        self._wait = wait
        self._status: int | None = None

    def wait(self, timeout_s: float = PATIENCE_S) -> int | None:
        """Exit status, negative for a signal; None if it lives on."""
        if self._status is None:
            self._status = self._wait(timeout_s)
        return self._status

    def end(self) -> int:
        """Wait for its own end.

        Raises:
            TimeoutError: it did not come; the process is killed.
        """
        status = self.wait()
        if status is None:
            self.kill()
            raise TimeoutError(f"process {self.pid} did not end within {PATIENCE_S} s")
        return status

    def kill(self) -> int:
        """SIGKILL, unless it has ended by itself meanwhile; the exit status tells which."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
        status = self.wait()
        assert status is not None, "a killed process ends"
        return status


class Launcher:
    """Starts scripts. What they print goes to a file: DataLoader's workers would hold a pipe open.

    Args:
        *modules: what the scripts that are forked import, besides torch and the package.
    """

    def __init__(self, *modules: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.forkserver", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, **ONE_THREAD},
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline(), (
            "the fork server did not start; see its words on standard error"
        )

    def fork(self, script: Path, *, log: Path, environment: Mapping[str, str]) -> Process:
        """A child of the fork server: everything but the imports happens in it."""
        pid = self._ask(do="start", script=str(script), log=str(log), environment=dict(environment))
        return Process(pid, lambda timeout_s: self._ask(do="wait", pid=pid, timeout_s=timeout_s))

    def fresh(self, script: Path, *, log: Path, environment: Mapping[str, str]) -> Process:
        """A new interpreter."""
        with open(log, "ab") as file:
            popen = subprocess.Popen(
                [sys.executable, str(script)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **ONE_THREAD, **environment},
                start_new_session=True,
            )

        def wait(timeout_s: float) -> int | None:
            try:
                return popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None

        return Process(popen.pid, wait)

    def close(self) -> None:
        """End the server, and with it whatever a failed test left behind."""
        self._server.communicate()
        assert self._server.returncode == 0

    def _ask(self, **request: Any) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the fork server is gone; its last words are on standard error"
        return json.loads(answer)


@contextmanager
def launcher(*modules: str) -> Iterator[Launcher]:
    """A launcher that is closed at the end; see `Launcher`."""
    one = Launcher(*modules)
    try:
        yield one
    finally:
        one.close()


def until(condition: Callable[[], Any], *, what: str, patience_s: float = PATIENCE_S) -> Any:
    """Poll until the condition holds, and return what it gave.

    Raises:
        TimeoutError: it never did.
    """
    end = time.monotonic() + patience_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {patience_s} s: {what}")
        time.sleep(0.005)
    return value


def members(session: int) -> list[int]:
    """Processes of a session that live, zombies aside: a leader, and whatever it started and left behind."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            state, _, _, its_session = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state not in "ZX":
            found.append(int(name))
    return sorted(found)
