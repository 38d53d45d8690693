"""One start of a training script as a process of its own, watched through the trace that it writes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import click

from spotsafe.cli.demo_compare import Step
from spotsafe.testing.killing import kill_machine

PATIENCE_S = 120.0
"""Seconds without a new step after which a process counts as hanging."""
_LOOK_S = 0.005  # between two looks at the trace
_LAST_LINES = 15

# A launcher's variables would make each process believe that it is one of many, or to be left in another way.
_OF_LAUNCHERS = ("SLURM", "SKYPILOT_", "TORCHELASTIC_", "SPOTSAFE_", "AWS_EC2_METADATA_")
_OF_RANKS = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}


class DemoFailed(click.ClickException):
    """The demo could not be carried out, as opposed to: it came out wrong."""


class Training:
    """A running training script. Leaving the context kills what still runs."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        name: str,
        environ: Mapping[str, str],
        on_step: Callable[[int], None],
    ) -> None:
        """Start ``python COMMAND --trace FOLDER/NAME.trace`` with its output in ``FOLDER/NAME.log``."""
        self.log = folder / f"{name}.log"
        self._trace = folder / f"{name}.trace"
        self._trace.touch()
        self._read = 0
        self._on_step = on_step
        self.steps: list[Step] = []
        self.started = time.time()
        with self.log.open("wb") as output:
            # Into a file, not a pipe: workers that outlive a killed trainer would hold a pipe open.
            self._process = subprocess.Popen(
                [sys.executable, *command, "--trace", str(self._trace)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environ),
            )

    def __enter__(self) -> Training:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def wait_for_step(self, step: int) -> None:
        """Return as soon as that step is done.

        Raises:
            DemoFailed: the process ended before, or hangs.
        """
        self._wait(lambda: bool(self.steps) and self.steps[-1].step >= step)
        if not self.steps or self.steps[-1].step < step:
            raise self.failed(f"training ended with status {self._process.returncode} before step {step}")

    def wait_for_end(self) -> int:
        """Return the exit status; of a killed process the signal's number, negative.

        Raises:
            DemoFailed: the process hangs.
        """
        self._wait(lambda: False)
        status: int = self._process.returncode
        return status

    def kill_in_step(self) -> float:
        """Kill it and what it started, half a step after the last one that is done; return those seconds."""
        spans = sorted(after.time - before.time for before, after in itertools.pairwise(self.steps))
        half = spans[len(spans) // 2] / 2 if spans else 0.0
        # The middle of a step is a point in time, so this sleep is no waiting for luck.
        time.sleep(max(0.0, self.steps[-1].time + half - time.time()))
        kill_machine(self._process.pid)
        return half

    @property
    def first_step_s(self) -> float | None:
        """Seconds from the start of the process to the end of its first step."""
        return self.steps[0].time - self.started if self.steps else None

    def failed(self, what: str) -> DemoFailed:
        """The error to raise, with the end of the process's output."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        return DemoFailed(f"{what}; the end of its output ({self.log}):\n" + "\n".join(lines))

    def _wait(self, reached: Callable[[], bool]) -> None:
        """Read the trace until a condition holds or the process has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ended = self._process.poll() is not None  # before reading: what it wrote last is then read too
            if self._read_new():
                deadline = time.monotonic() + PATIENCE_S
            if reached() or ended:
                return
            if time.monotonic() > deadline:
                raise self.failed(f"training made no step for {PATIENCE_S:.0f} s")
            try:
                self._process.wait(timeout=_LOOK_S)
            except subprocess.TimeoutExpired:
                continue

    def _read_new(self) -> bool:
        """Take over the whole lines that were written since the last look."""
        with self._trace.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode("utf-8").splitlines():
            self.steps.append(Step.parse(line))
            self._on_step(self.steps[-1].step)
        return bool(whole)


# What makes torch add in the same order in every process of the demo, which compares every bit. Sums are cut by the
# number of threads, which torch and oneMKL find out anew in each process: one that gets a thread less differs in the
# last bits without any fault of the resume. One thread also waits for no second one on
# a busy machine. oneMKL promises the same bits only in its own mode ("Conditional Numerical Reproducibility").
_SAME_BITS = {"OMP_NUM_THREADS": "1", "MKL_CBWR": "AUTO,STRICT"}


def plain_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what launchers and clouds add, and with `extra`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_LAUNCHERS) and name not in _OF_RANKS
    }
    return {**_SAME_BITS, **kept, **extra}
