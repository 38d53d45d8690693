"""How the demo tells what it does and what came out."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from spotsafe import human
from spotsafe.cli.demo_compare import Check
from spotsafe.cli.demo_story import Attempt, Audience
from spotsafe.cli.output import print_table


class Lines:
    """Progress for a pipe or a log: one line when a process starts, one when it ends."""

    def begin(self, text: str) -> None:
        """Say what is started."""
        click.echo(f"{text} ...", err=True)

    def step(self, step: int) -> None:
        """Steps are too many for lines."""

    def end(self, text: str) -> None:
        """Say how it ended."""
        click.echo(f"  {text}", err=True)


@contextmanager
def progress(*, steps: int) -> Iterator[Audience]:
    """Bars on a terminal, lines elsewhere; on stderr, so that the result can be piped."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:34}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[outcome]}"), console=Console(stderr=True)) as bars:

        class Bars:
            """One bar for each process."""

            task = TaskID(0)

            def begin(self, text: str) -> None:
                """Add a bar."""
                self.task = bars.add_task(text, total=steps, outcome="")

            def step(self, step: int) -> None:
                """Move it."""
                bars.update(self.task, completed=step + 1)

            def end(self, text: str) -> None:
                """Stop it where it is."""
                bars.update(self.task, outcome=text)
                bars.stop_task(self.task)

        yield Bars()


def report(attempts: Sequence[Attempt], checks: Sequence[Check], *, seconds: float) -> dict[str, Any]:
    """Everything that came out, for programs."""
    return {
        "identical": all(check.equal for check in checks),
        "as_planned": not any(attempt.problem for attempt in attempts),
        "seconds": round(seconds, 1),
        "attempts": [
            {
                "what": attempt.what,
                "event": attempt.event,
                "exit_status": attempt.status,
                "problem": attempt.problem,
                "first_step": attempt.steps[0].step,
                "last_step": attempt.steps[-1].step,
                "steps_lost": steps_lost(attempt, following),
                "seconds_to_first_step": attempt.first_step_s,
            }
            for attempt, following in zip(attempts, [*attempts[1:], None], strict=True)
        ],
        "checks": [{"what": check.what, "equal": check.equal, "detail": check.detail} for check in checks],
    }


def print_report(attempts: Sequence[Attempt], checks: Sequence[Check], *, seconds: float) -> None:
    """Two tables and a verdict, for people."""
    rows = []
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        lost = steps_lost(attempt, following)
        first = "-" if attempt.first_step_s is None else f"{attempt.first_step_s:.1f}"
        ran = f"{attempt.steps[0].step} - {attempt.steps[-1].step}"
        event = f"NOT AS PLANNED: {attempt.problem}; {attempt.event}" if attempt.problem else attempt.event
        status = status_text(attempt.status)
        rows.append((attempt.what, status, ran, "-" if lost is None else str(lost), first, event))
    columns = ("interruption", "exit", "steps", "steps lost>", "start to first step (s)>", "event")
    print_table(columns, rows, title="What happened")
    click.echo()
    print_table(
        ("compared with the reference", "bit for bit", "what"),
        [(check.what, "identical" if check.equal else "DIFFERENT", check.detail) for check in checks],
        title="What came of it",
    )
    click.echo()
    verdict = "as if nothing had happened" if good(attempts, checks) else "NOT as if nothing had happened"
    click.echo(f"{human.count(len(attempts) - 1, 'interruption')}, {seconds:.0f} s in all: {verdict}.")


def good(attempts: Sequence[Attempt], checks: Sequence[Check]) -> bool:
    """Whether everything is equal and every interruption was what it should have been."""
    return all(check.equal for check in checks) and not any(attempt.problem for attempt in attempts)


def steps_lost(attempt: Attempt, following: Attempt | None) -> int | None:
    """Steps that were done and had to be done again; None for the last attempt."""
    if following is None:
        return None
    return max(0, attempt.steps[-1].step + 1 - following.steps[0].step)


def status_text(status: int) -> str:
    """``143``; of a killed process ``SIGKILL``."""
    return signal.Signals(-status).name if status < 0 else str(status)
