"""What takes long, as people see it: a line now and then, or on a terminal one line that changes."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from spotsafe import human
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.events import Progress, RestoreProgress, SaveAwaited, WriterAwaited

LINE_EVERY_S = 30.0
"""Seconds between two lines of one wait, where they stay."""
_PREFIX = "spotsafe: "
_WIDEST, _NARROWEST = 30, 6
"""Columns of a bar."""
_CANNOT = ("dumb", "unknown")
"""Terminals, as the environment names them, that cannot go back on a line."""
_ERASE, _ERASE_REST = "\r\x1b[2K", "\x1b[K"


def words(event: Progress) -> str:
    """What is waited for, how far it is, and how long the wait may still take."""
    if isinstance(event, WriterAwaited):
        return f"the writer of a run that has ended is still writing its last save; waiting for it, {_left(event)}"
    name, amount = f"checkpoint {event.checkpoint}", _amount(event)
    if isinstance(event, RestoreProgress):
        return f"restoring {name}, {amount} read"
    if event.published:
        return f"{name} is published; waiting for older ones to be deleted, {_left(event)}"
    return f"waiting for {name}, {amount} written, {_left(event)}"


def few_words(event: Progress) -> str:
    """The same where a bar has to stand beside it."""
    if isinstance(event, WriterAwaited):
        return f"waiting for the last save of a run that has ended, {_left(event)}"
    step, amount = _step(event.checkpoint), _amount(event)
    if isinstance(event, RestoreProgress):
        return f"reading {step}, {amount}"
    if event.published:
        return f"deleting what {step} replaces, {_left(event)}"
    return f"writing {step}, {amount}, {_left(event)}"


class Bar:
    """One line on a terminal, drawn over itself. Nothing else may be written while it is `shown`, but by `over`.

    It starts no thread and hides no cursor: a process that is killed leaves the terminal as it was. Other output that
    comes all the same begins at the left end and goes over it.
    """

    def __init__(self) -> None:
        self.shown = False

    def draw(self, stream: TextIO, event: Progress) -> None:
        """Show it, in place of what is shown."""
        stream.write(f"\r{_drawn(stream, event)}{_ERASE_REST}\r")
        stream.flush()
        self.shown = True

    def over(self) -> str:
        """What is to be written before anything else. From then on nothing is shown."""
        shown, self.shown = self.shown, False
        return _ERASE if shown else ""


def can_draw(stream: TextIO, *, given: bool) -> bool:
    """Whether a stream is a terminal that can be drawn on.

    Args:
        stream: where to.
        given: whether somebody chose it. If not, it has to be the process's own: what else a program or a notebook
            has put there may look like a terminal, but writes lines.
    """
    own = given or stream is sys.__stderr__
    return own and stream.isatty() and os.environ.get("TERM", "dumb") not in _CANNOT


def _drawn(stream: TextIO, event: Progress) -> str:
    from rich.console import Console  # noqa: PLC0415 - most runs never wait for long
    from rich.progress_bar import ProgressBar  # noqa: PLC0415 - as above

    console = Console(file=stream)
    room = console.width - 1 - len(_PREFIX)
    text = human.one_line(few_words(event))[:room]
    done, total = _counted(event)
    width = min(_WIDEST, room - len(text) - 1)
    if not total or width < _NARROWEST:
        return _PREFIX + text
    with console.capture() as bar:
        console.print(ProgressBar(total=total, completed=min(done, total), width=width), end="")
    return f"{_PREFIX}{bar.get()} {text}"


def _counted(event: Progress) -> tuple[int, int | None]:
    if isinstance(event, RestoreProgress):
        return event.read_bytes, event.total_bytes
    return (event.written_bytes, event.total_bytes) if isinstance(event, SaveAwaited) else (0, None)


def _amount(event: RestoreProgress | SaveAwaited) -> str:
    done, total = _counted(event)
    return human.size(done) + ("" if total is None else f" of {human.size(total)}")


def _left(event: SaveAwaited | WriterAwaited) -> str:
    return f"{human.duration(max(0.0, event.limit_s - event.waited_s))} at most"


def _step(checkpoint: str) -> str:
    name = CheckpointName.parse(checkpoint)
    return checkpoint if name is None else f"step {name.step:,}"
