"""What a person sees: three lines in a run that goes well, and a line for each thing that does not.

`Console` prints them to stderr, whether or not anybody set up logging. `LogSink` gives every event to the
logger ``spotsafe``; where that logger's records reach the terminal too, `Console` leaves the lines to it, so
that nothing is shown twice. What takes long has a line that changes on a terminal, and a line every half minute
elsewhere. The environment variable ``SPOTSAFE_LOG`` shows more.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TextIO

from spotsafe import human
from spotsafe.bar import LINE_EVERY_S, Bar, can_draw, words
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.events import (
    AttemptSuperseded,
    CheckpointPassedOver,
    CheckpointPublished,
    DeleteRefused,
    EndAwaited,
    Event,
    FirstStep,
    IntervalChosen,
    LoopStopped,
    NoticeCancelled,
    NoticeReceived,
    Progress,
    RunEnded,
    RunStarted,
    SaveFailed,
    SingleWriter,
    Warned,
    WriterReplaced,
)

LOGGER = "spotsafe"
ENVIRONMENT = "SPOTSAFE_LOG"
LEVELS = ("debug", "info", "warning", "error", "critical")

_SHOWN = 4  # names in a line
_INFO = (CheckpointPublished, FirstStep, NoticeCancelled, LoopStopped)
"""Events that have no line of their own, but are worth more than debugging."""


class Lines:
    """Renders events as lines; remembers what the last line of a run needs from the first."""

    def __init__(self) -> None:
        self._started: RunStarted | None = None
        self._interval_shown = False
        self._refusal_shown = False
        self._waited_s: dict[type[Event], float] = {}
        """Of each kind of wait that goes on, when its last line was."""

    def render(self, event: Event) -> tuple[int, str] | None:
        """The level and the text of the event's line, or None if it has none."""
        if isinstance(event, RunStarted):
            self._started, self._interval_shown, self._refusal_shown = event, False, False
            return logging.INFO, _start(event)
        if isinstance(event, RunEnded):
            return logging.INFO, _end(event, started=self._started)
        if isinstance(event, IntervalChosen):
            # It is chosen anew whenever a save is measured; one line is enough.
            shown, self._interval_shown = self._interval_shown, True
            return None if shown else (logging.INFO, f"saving {event.text}")
        if isinstance(event, DeleteRefused):
            # Whoever may not delete one object may not delete the others; the log has each.
            told, self._refusal_shown = self._refusal_shown, True
            return None if told else (logging.WARNING, _refused(event))
        if isinstance(event, Progress):
            return self._progress(event)
        warning = _WARNINGS.get(type(event))
        return None if warning is None else (logging.WARNING, warning(event))

    def _progress(self, event: Progress) -> tuple[int, str] | None:
        kind = type(event)
        if event.over:
            self._waited_s.pop(kind, None)
            return None
        last = self._waited_s.get(kind)
        if last is not None and event.waited_s - last < LINE_EVERY_S:
            return None
        self._waited_s[kind] = event.waited_s
        return logging.INFO, words(event)


class Console:
    """A sink that prints the lines on rank 0, and what takes long as a bar if that is a terminal.

    Args:
        stream: where to; standard error as it is at the time if None.
        rank: other ranks than 0 print nothing.
    """

    def __init__(self, stream: TextIO | None = None, *, rank: int = 0) -> None:
        self._stream = stream
        self._rank = rank
        self._lines = Lines()
        self._bar = Bar()

    def emit(self, event: Event) -> None:
        """Print the event's line, if it has one and logging does not show it."""
        line = self._lines.render(event)
        if self._rank != 0:
            return
        try:
            if not isinstance(event, Progress) or not self._draw(event):
                self._print(line)
        except (OSError, ValueError, UnicodeError):
            return  # a closed terminal is no reason to complain, least of all on it

    def _draw(self, event: Progress) -> bool:
        """Show it on the bar, or end that; false if there can be none."""
        stream = self._stream or sys.stderr
        if self._logged(logging.INFO) or not can_draw(stream, given=self._stream is not None):
            return False
        if not event.over:
            self._bar.draw(stream, event)
        elif self._bar.shown:
            stream.write(self._bar.over())
            stream.flush()
        return True

    def _print(self, line: tuple[int, str] | None) -> None:
        if line is None or self._logged(line[0]):
            return
        stream = self._stream or sys.stderr
        stream.write(f"{self._bar.over()}spotsafe: {human.one_line(line[1])}\n")
        stream.flush()

    def _logged(self, level: int) -> bool:
        return self._stream is None and shown_by_logging(logging.getLogger(LOGGER), level)


class LogSink:
    """A sink that gives every event to the logger ``spotsafe``, on all ranks.

    Lines are INFO or WARNING on rank 0. On other ranks only a failed save is more than DEBUG: the rest is the
    same for all.
    """

    def __init__(self, *, rank: int = 0) -> None:
        self._rank = rank
        self._lines = Lines()
        self._logger = logging.getLogger(LOGGER)

    def emit(self, event: Event) -> None:
        """Log the event, unless nobody set up logging: then `Console` has shown what matters."""
        if not self._logger.hasHandlers():
            self._lines.render(event)
            return
        level, text = self._lines.render(event) or (_level(event), describe(event))
        if self._rank != 0:
            text = f"[rank {self._rank}] {text}"
            level = level if isinstance(event, SaveFailed) else logging.DEBUG
        self._logger.log(level, "%s", human.one_line(text))


def describe(event: Event) -> str:
    """An event as one line for a log: ``SaveStarted checkpoint=... step=300 reason=interval``."""
    parts = (f"{field.name}={_worth(getattr(event, field.name))}" for field in fields(event))
    return " ".join((type(event).__name__, *parts))


def _worth(value: object) -> object:
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):  # seconds of parts
        return "(" + ", ".join(f"{part}: {seconds:.2f}" for part, seconds in value) + ")"
    return value


def configure_logging(environ: Mapping[str, str] | None = None) -> None:
    """Do what ``SPOTSAFE_LOG=debug|info|warning|error|critical`` asks for; nothing if it is not set.

    Called again it only changes the level. Where the application's own handlers show a record on the
    terminal, ours keeps quiet.

    Raises:
        ValueError: the variable names no level.
    """
    text = (os.environ if environ is None else environ).get(ENVIRONMENT, "").strip().lower()
    if not text:
        return
    if text not in LEVELS:
        raise ValueError(f"{ENVIRONMENT}={text} is no level; use one of {', '.join(LEVELS)}")
    logger = logging.getLogger(LOGGER)
    logger.setLevel(text.upper())
    if not any(isinstance(handler, _TerminalHandler) for handler in logger.handlers):
        logger.addHandler(_TerminalHandler())


def shown_by_logging(logger: logging.Logger, level: int) -> bool:
    """Whether a record of this level reaches the terminal through the logger's handlers."""
    return logger.isEnabledFor(level) and any(
        level >= handler.level and _is_terminal(handler) for handler in _handlers(logger)
    )


class _TerminalHandler(logging.Handler):
    """Writes to standard error as it is at the time, unless another handler shows the record there."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record."""
        others = (one for one in _handlers(logging.getLogger(record.name)) if one is not self)
        if any(record.levelno >= one.level and _is_terminal(one) for one in others):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - logging's own way: report by its rules, never raise
            self.handleError(record)


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    current: logging.Logger | None = logger
    while current is not None:
        yield from current.handlers
        current = current.parent if current.propagate else None


def _is_terminal(handler: logging.Handler) -> bool:
    if isinstance(handler, _TerminalHandler):
        return True
    stream = getattr(handler, "stream", None)
    if stream is None:
        # rich and others that draw on a console hold it under this name
        return getattr(handler, "console", None) is not None
    return any(stream is one for one in (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__))


def _level(event: Event) -> int:
    return logging.INFO if isinstance(event, _INFO) else logging.DEBUG


# -- the words


def _start(event: RunStarted) -> str:
    watching = f"watching {', '.join(event.watching)}" if event.watching else "watching for no reclaim"
    if event.single_writer:
        watching += "; single writer"
    if event.resumed_from is None:
        source = "" if event.initialized_from is None else f", {_given(event)} from {event.initialized_from}"
        return f"fresh start of {event.url} (attempt {event.attempt}){source}; {watching}"
    published = "" if event.age_s is None else f", published {human.age(event.age_s)}"
    return (
        f"resumed {event.url} at step {event.step:,} from {event.resumed_from}{published} "
        f"(attempt {event.attempt}); {watching}"
    )


def _given(event: RunStarted) -> str:
    """Which objects `init_from` gave values to."""
    more = len(event.initialized) - _SHOWN
    names = ", ".join(event.initialized[:_SHOWN])
    return names if more <= 0 else f"{names} and {more} more"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """How an outcome is told: what happened, and how to go on."""

    happened: str
    next: str


_AGAIN = "the same command goes on from there"
_OUTCOMES = {
    "finished": _Outcome(happened="finished", next="a larger until= or epochs= goes on from there"),
    "left": _Outcome(happened="left", next=_AGAIN),
    "reclaimed": _Outcome(happened="stopped by a reclaim", next=_AGAIN),
    "superseded": _Outcome(happened="superseded", next="a newer attempt goes on; do not restart this one"),
    "failed": _Outcome(happened="failed", next=_AGAIN),
    "storage_failed": _Outcome(happened="stopped by its storage", next=_AGAIN),
    "interrupted": _Outcome(happened="interrupted", next=_AGAIN),
    "restart_loop": _Outcome(
        happened="stopped as a restart loop", next="find the cause first, then the same command tries again"
    ),
}


def _end(event: RunEnded, *, started: RunStarted | None) -> str:
    known = _OUTCOMES.get(event.outcome, _Outcome(happened=event.outcome, next=_AGAIN))
    done = None if started is None else event.step - started.step
    if event.outcome == "finished" and done == 0 and started and started.resumed_from is not None:
        happened = f"already finished at step {event.step:,}, nothing to do"
    else:
        steps = (
            "" if done is None or done == event.step else f" ({human.count(done, 'step')} in this attempt)"
        )
        happened = f"{known.happened} at step {event.step:,}{steps}"
    if event.reason is not None:
        happened += f", by run.stop: {event.reason}"
    if event.newest is None:
        restart = event.outcome in {"superseded", "restart_loop"}
        return f"{happened}; nothing is saved; {known.next if restart else 'the same command starts afresh'}"
    return f"{happened}; newest checkpoint {event.newest}{_behind(event)}; {known.next}"


def _behind(event: RunEnded) -> str:
    """How much of the work the newest checkpoint does not hold."""
    name = CheckpointName.parse(event.newest or "")
    missing = 0 if name is None else event.step - name.step
    return f" (without the last {human.count(missing, 'step')})" if missing > 0 else ""


def _notice(event: NoticeReceived) -> str:
    left = "" if event.seconds_left is None else f", {human.duration(event.seconds_left)} left"
    return f"{event.source} announces {event.kind}: {event.action}{left}"


def _failed(event: SaveFailed) -> str:
    return (
        f"warning: saving step {event.step:,} failed: {event.error}; "
        "training goes on, earlier checkpoints are untouched"
    )


def _refused(event: DeleteRefused) -> str:
    return f"{event.path} could not be deleted ({event.error}); saving goes on, and what is not needed stays"


def _passed_over(event: CheckpointPassedOver) -> str:
    return f"warning: not resuming from {event.checkpoint}: {event.reason}"


def _superseded(event: AttemptSuperseded) -> str:
    return (
        f"warning: attempt {event.newer} of this run was started; "
        f"this attempt, {event.attempt}, ends and deletes nothing"
    )


def _single_writer(event: SingleWriter) -> str:
    return (
        f"warning: {event.url} does not refuse to create what is already there, so only you keep two jobs apart: "
        "never let two run on it at once. What attempts without a recorded end left there is not deleted"
    )


def _replaced(event: WriterReplaced) -> str:
    again = "which is made again" if len(event.lost) == 1 else "which are made up for"
    lost = f" over {' and '.join(event.lost)}, {again}" if event.lost else ""
    if event.by == "thread":
        return (
            f"warning: the writer process has ended again{lost} ({event.reason}): from now on a thread writes"
        )
    return f"warning: the writer process has ended{lost} ({event.reason}); another one takes its place"


def _awaits_end(event: EndAwaited) -> str:
    return (
        f"everything is saved; now to be ended by {' in '.join(event.launchers)}, to which an exit would mean "
        f"something else: waits {human.duration(event.limit_s)} at most"
    )


def _warned(event: Warned) -> str:
    return f"warning: {event.message}"


_WARNINGS: Mapping[type[Event], Callable[..., str]] = {
    AttemptSuperseded: _superseded,
    CheckpointPassedOver: _passed_over,
    EndAwaited: _awaits_end,
    NoticeReceived: _notice,
    SaveFailed: _failed,
    SingleWriter: _single_writer,
    Warned: _warned,
    WriterReplaced: _replaced,
}
