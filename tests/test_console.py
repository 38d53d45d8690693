"""What a person sees: the three lines, the warnings, and nothing twice."""

from __future__ import annotations

import dataclasses
import io
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotsafe import console
from spotsafe.console import Console, LogSink, configure_logging, describe, shown_by_logging
from spotsafe.events import (
    AttemptSuperseded,
    CheckpointPassedOver,
    CheckpointPublished,
    CheckpointRetired,
    DeleteRefused,
    Event,
    EventSink,
    FileWritten,
    FirstStep,
    IntervalChosen,
    NoticeReceived,
    RestoreFinished,
    RestoreStarted,
    RestoreVerified,
    RunEnded,
    RunStarted,
    SaveFailed,
    SaveStaged,
    SaveStarted,
    Warned,
    WriterAwaited,
    WriterReplaced,
)
from spotsafe.testing.sinks import EventSinkConformance, sample_events

NAME = "a000012-s000000300-0041-7f3a9c21"
NEWEST = "a000012-s000001000-0050-7f3a9c21"

FRESH = RunStarted(
    url="s3://bucket/run-0412",
    run="7f3a9c21",
    attempt=1,
    step=0,
    resumed_from=None,
    age_s=None,
    watching=("SIGTERM", "aws"),
)
RESUMED = RunStarted(
    url="s3://bucket/run-0412",
    run="7f3a9c21",
    attempt=12,
    step=300,
    resumed_from=NAME,
    age_s=312.0,
    watching=("SIGTERM", "aws"),
)
INTERVAL = IntervalChosen(text="every 5 min (auto: by what a save costs)")
FINISHED = RunEnded(step=1000, outcome="finished", code=None, newest=NEWEST)

NORMAL: list[Event] = [
    RestoreStarted(checkpoint=NAME, total_bytes=10),
    RestoreVerified(checkpoint=NAME, seconds=1.0),
    RestoreFinished(checkpoint=NAME, seconds=1.0),
    RESUMED,
    INTERVAL,
    FirstStep(step=301, seconds_since_start=1.0, parts=(("read", 0.75), ("loaded", 0.25))),
    SaveStarted(checkpoint=NEWEST, step=1000, reason="interval"),
    SaveStaged(checkpoint=NEWEST, total_bytes=10, blocked_s=0.1),
    FileWritten(checkpoint=NEWEST, file="data-00000-000.safetensors", total_bytes=10),
    CheckpointPublished(checkpoint=NEWEST, step=1000, total_bytes=10, write_s=1.0, healthy=True),
    CheckpointRetired(checkpoint=NAME),
    IntervalChosen(text="every 7 min (auto)"),
    FINISHED,
]

START = (
    f"spotsafe: resumed s3://bucket/run-0412 at step 300 from {NAME}, published 5 min 12 s ago (attempt 12); "
    "watching SIGTERM, aws"
)
END = (
    f"spotsafe: finished at step 1,000 (700 steps in this attempt); newest checkpoint {NEWEST}; "
    "a larger until= or epochs= goes on from there"
)
LINES = [START, "spotsafe: saving every 5 min (auto: by what a save costs)", END]


def shown(*events: Event, rank: int = 0) -> list[str]:
    stream = io.StringIO()
    sink = Console(stream, rank=rank)
    for event in events:
        sink.emit(event)
    return stream.getvalue().splitlines()


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    """Each test begins and ends with the logging of a program that set nothing up."""
    ours, root = logging.getLogger("spotsafe"), logging.getLogger()
    before = (ours.level, list(ours.handlers), ours.propagate, root.level, list(root.handlers))
    yield
    ours.setLevel(before[0])
    ours.handlers[:] = before[1]
    ours.propagate = before[2]
    root.setLevel(before[3])
    root.handlers[:] = before[4]


# -- the three lines


def test_a_normal_run_has_three_lines() -> None:
    """Start, interval, end; everything else is for logs."""
    assert shown(*NORMAL) == LINES


def test_what_stopped_a_run_stands_in_its_last_line() -> None:
    """Early stopping: whoever finds the run ended wants to know why it is shorter than asked for."""
    [_, line] = shown(RESUMED, dataclasses.replace(FINISHED, reason="no better\n for three epochs"))

    assert line == END.replace("; newest", ", by run.stop: no better for three epochs; newest")


def test_a_writer_process_that_ends_is_told() -> None:
    """With what was lost, how it ended, and who writes from now on."""
    first = WriterReplaced(reason="signal 9", lost=(NAME,), by="process")
    told = f"the writer process has ended over {NAME}, which is made again (signal 9); another one takes its place"
    assert shown(first, dataclasses.replace(first, lost=(), by="thread")) == [
        f"spotsafe: warning: {told}",
        "spotsafe: warning: the writer process has ended again (signal 9): from now on a thread writes",
    ]


def test_waiting_for_a_writer_is_told() -> None:
    """A start that seems to hang says what it waits for, and how long at most."""
    assert shown(WriterAwaited(waited_s=5.0, limit_s=65.0)) == [
        "spotsafe: the writer of a run that has ended is still writing its last save; waiting for it, 1 min at most"
    ]


def test_other_ranks_are_silent() -> None:
    """Eight processes do not say the same thing eight times, warnings neither."""
    assert shown(*NORMAL, Warned(message="one"), rank=3) == []


def test_a_fresh_start_says_so() -> None:
    """Nobody mistakes a run that began at zero for one that resumed."""
    assert shown(FRESH) == [
        "spotsafe: fresh start of s3://bucket/run-0412 (attempt 1); watching SIGTERM, aws"
    ]


def test_a_start_with_the_values_of_another_run_says_which() -> None:
    """Nobody finds out days later that a run began with random weights, or with those of another one."""
    initialized = dataclasses.replace(FRESH, initialized_from=f"runs/a@{NAME}", initialized=("model", "ema"))
    many = dataclasses.replace(initialized, initialized=tuple("abcdef"))

    (line,) = shown(initialized)
    assert line.endswith(f"(attempt 1), model, ema from runs/a@{NAME}; watching SIGTERM, aws")
    assert "(attempt 1), a, b, c, d and 2 more from" in shown(many)[0]


def test_the_first_refused_deletion_has_a_line() -> None:
    """A bucket that lets nothing be deleted grows for ever: worth one line, and not thousands."""
    refused = [DeleteRefused(path=f"checkpoints/{name}/x", error="denied") for name in "abc"]

    (line,) = shown(*refused)

    assert line == (
        "spotsafe: checkpoints/a/x could not be deleted (denied); saving goes on, and what is not needed stays"
    )


def test_nothing_watched_is_said() -> None:
    """A run that no reclaim can be announced to should not look like one that is watched."""
    blind = RunStarted(url="u", run="r", attempt=2, step=0, resumed_from=None, age_s=None, watching=())

    assert shown(blind) == ["spotsafe: fresh start of u (attempt 2); watching for no reclaim"]


def test_an_unknown_age_is_left_out() -> None:
    """Without an age there is no empty place in the line."""
    line = shown(
        RunStarted(url="u", run="r", attempt=2, step=3, resumed_from=NAME, age_s=None, watching=("aws",))
    )

    assert line == [f"spotsafe: resumed u at step 3 from {NAME} (attempt 2); watching aws"]


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        ("left", "left at step 1,000"),
        ("reclaimed", "stopped by a reclaim at step 1,000"),
        ("failed", "failed at step 1,000"),
        ("interrupted", "interrupted at step 1,000"),
        ("something new", "something new at step 1,000"),
    ],
)
def test_how_a_run_ended_and_how_to_go_on(outcome: str, text: str) -> None:
    """Whatever ended it, the line tells the newest checkpoint and that the same command goes on."""
    [_, line] = shown(RESUMED, RunEnded(step=1000, outcome=outcome, code=1, newest=NEWEST))

    assert line == (
        f"spotsafe: {text} (700 steps in this attempt); newest checkpoint {NEWEST}; "
        "the same command goes on from there"
    )


def test_a_superseded_run_must_not_be_restarted() -> None:
    """The line says so, with and without a checkpoint."""
    for newest in (NEWEST, None):
        [line] = shown(RunEnded(step=5, outcome="superseded", code=94, newest=newest))
        assert line.endswith("a newer attempt goes on; do not restart this one")


def test_a_restart_loop_needs_a_person() -> None:
    """The line says to look first."""
    [line] = shown(RunEnded(step=5, outcome="restart_loop", code=93, newest=None))

    assert "find the cause first" in line


def test_a_run_that_is_finished_already_says_so() -> None:
    """The same command again does nothing, and that is no mystery."""
    finished = RunStarted(
        url="u", run="r", attempt=3, step=1000, resumed_from=NEWEST, age_s=60.0, watching=("aws",)
    )

    assert shown(finished, FINISHED)[1] == (
        f"spotsafe: already finished at step 1,000, nothing to do; newest checkpoint {NEWEST}; "
        "a larger until= or epochs= goes on from there"
    )


def test_steps_that_are_lost_are_said() -> None:
    """If the newest checkpoint is older than the last step, the line says by how much."""
    [line] = shown(RunEnded(step=1012, outcome="failed", code=1, newest=NEWEST))

    assert f"newest checkpoint {NEWEST} (without the last 12 steps);" in line


def test_nothing_saved_is_said() -> None:
    """Without a checkpoint the same command starts afresh."""
    [line] = shown(RunEnded(step=3, outcome="failed", code=1, newest=None))

    assert line == "spotsafe: failed at step 3; nothing is saved; the same command starts afresh"


def test_a_second_session_has_its_own_three_lines() -> None:
    """The same sink for two runs, one after the other, says everything twice."""
    assert shown(*NORMAL, *NORMAL) == LINES * 2


# -- warnings


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (Warned(message="no pidfd here"), "warning: no pidfd here"),
        (
            SaveFailed(checkpoint=NAME, step=3000, error="no space left"),
            "warning: saving step 3,000 failed: no space left; training goes on, earlier checkpoints are untouched",
        ),
        (
            NoticeReceived(source="aws", kind="reclaim", action="terminate", seconds_left=118.4),
            "aws announces reclaim: terminate, 1 min 58 s left",
        ),
        (
            NoticeReceived(source="file", kind="risk", action="rebalance", seconds_left=None),
            "file announces risk: rebalance",
        ),
        (
            CheckpointPassedOver(checkpoint=NAME, reason="index-00000.json: cut short"),
            f"warning: not resuming from {NAME}: index-00000.json: cut short",
        ),
        (
            AttemptSuperseded(attempt=12, newer=13),
            "warning: attempt 13 of this run was started; this attempt, 12, ends and deletes nothing",
        ),
    ],
)
def test_warnings_are_single_lines(event: Event, line: str) -> None:
    """Each thing that goes wrong is one line."""
    assert shown(event) == [f"spotsafe: {line}"]


def test_line_breaks_are_taken_out() -> None:
    """An error of several lines stays one line."""
    assert shown(Warned(message="first\n  second\r\n\tthird")) == ["spotsafe: warning: first second third"]


@pytest.mark.parametrize("event", sample_events(), ids=lambda event: type(event).__name__)
def test_no_event_makes_more_than_one_line(event: Event) -> None:
    """With any event of spotsafe, filled or not."""
    assert len(shown(event)) <= 1
    assert "\n" not in describe(event)


# -- as sinks


class TestConsole(EventSinkConformance):
    """The console takes whatever comes."""

    def make_sink(self) -> EventSink:
        return Console(io.StringIO())


class TestConsoleOfAnotherEncoding(EventSinkConformance):
    """A terminal that can show ASCII only is no reason to fail."""

    def make_sink(self) -> EventSink:
        return Console(io.TextIOWrapper(io.BytesIO(), encoding="ascii"))


class TestLogSink(EventSinkConformance):
    """The log sink takes whatever comes."""

    def make_sink(self) -> EventSink:
        return LogSink()


class TestLogSinkOfAnotherRank(EventSinkConformance):
    """On other ranks too."""

    def make_sink(self) -> EventSink:
        return LogSink(rank=3)


def test_a_closed_stream_is_no_error() -> None:
    """The terminal may be gone before the run is."""
    stream = io.StringIO()
    stream.close()

    Console(stream).emit(FRESH)


def test_it_prints_to_standard_error_as_it_is_now(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever redirects sys.stderr later gets the lines; standard output stays clean."""
    sink = Console()
    sink.emit(FRESH)

    out, err = capsys.readouterr()
    assert out == ""
    assert err == "spotsafe: fresh start of s3://bucket/run-0412 (attempt 1); watching SIGTERM, aws\n"


# -- with logging


class Collecting(logging.Handler):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.levelno, record.getMessage()))


def collected(*events: Event, rank: int = 0) -> list[tuple[int, str]]:
    handler, logger = Collecting(), logging.getLogger("spotsafe")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    sink = LogSink(rank=rank)
    for event in events:
        sink.emit(event)
    return handler.records


def test_the_log_has_every_event() -> None:
    """The lines at INFO or WARNING, the rest at DEBUG, the first step and a published checkpoint at INFO."""
    records = collected(*NORMAL, Warned(message="one"))

    assert [level for level, _ in records] == [
        *[logging.DEBUG] * 3,
        *[logging.INFO] * 3,
        *[logging.DEBUG] * 3,
        logging.INFO,
        *[logging.DEBUG] * 2,
        logging.INFO,
        logging.WARNING,
    ]
    assert records[0][1] == f"RestoreStarted checkpoint={NAME} total_bytes=10"
    informed = [f"spotsafe: {text}" for level, text in records if level == logging.INFO]
    assert (informed[0], informed[-1]) == (LINES[0], LINES[2])
    assert informed[2].endswith("FirstStep step=301 seconds_since_start=1.0 parts=(read: 0.75, loaded: 0.25)")


def test_other_ranks_log_quietly() -> None:
    """Only a failed save of another rank is more than DEBUG, and the rank stands before it."""
    records = collected(FRESH, Warned(message="one"), SaveFailed(checkpoint=NAME, step=3, error="e"), rank=3)

    assert [level for level, _ in records] == [logging.DEBUG, logging.DEBUG, logging.WARNING]
    assert all(text.startswith("[rank 3] ") for _, text in records)


PROGRAM = """
import logging, sys
from spotsafe.console import Console, LogSink, configure_logging
from spotsafe.events import FileWritten, RunStarted, Warned

{setup}
configure_logging()
sinks = [LogSink(), Console()]
{late_setup}
for event in [
    RunStarted(url="u", run="r", attempt=1, step=0, resumed_from=None, age_s=None, watching=()),
    FileWritten(checkpoint="c", file="f", total_bytes=1),
    Warned(message="careful"),
]:
    for sink in sinks:
        sink.emit(event)
"""

RICH = """
from rich.console import Console as Terminal
from rich.logging import RichHandler
logging.basicConfig(level=logging.INFO, handlers=[RichHandler(console=Terminal(stderr=True, width=200))])
"""


@pytest.mark.parametrize(
    ("setup", "late_setup", "variable", "times"),
    [
        ("", "", "", (1, 0, 1)),
        ("logging.basicConfig(level=logging.INFO)", "", "", (1, 0, 1)),
        ("logging.basicConfig(level=logging.DEBUG)", "", "", (1, 1, 1)),
        ("logging.basicConfig(level=logging.WARNING)", "", "", (1, 0, 1)),
        ("logging.basicConfig(level=logging.ERROR)", "", "", (1, 0, 1)),
        ("logging.basicConfig(level=logging.INFO, stream=sys.stdout)", "", "", (1, 0, 1)),
        ("logging.basicConfig(level=logging.DEBUG, filename='log.txt')", "", "", (1, 0, 1)),
        ("logging.getLogger('spotsafe').addHandler(logging.NullHandler())", "", "", (1, 0, 1)),
        ("logging.disable(logging.CRITICAL)", "", "", (1, 0, 1)),
        (RICH, "", "", (1, 0, 1)),
        ("", "logging.basicConfig(level=logging.INFO)", "", (1, 0, 1)),
        ("", "", "debug", (1, 1, 1)),
        ("", "", "INFO", (1, 0, 1)),
        ("", "", "warning", (1, 0, 1)),
        ("", "", "error", (1, 0, 1)),
        ("logging.basicConfig(level=logging.INFO)", "", "debug", (1, 1, 1)),
        ("logging.basicConfig(level=logging.WARNING)", "", "debug", (1, 1, 1)),
        ("", "logging.basicConfig(level=logging.INFO)", "debug", (1, 1, 1)),
        (RICH, "", "debug", (1, 1, 1)),
        ("configure_logging()", "configure_logging()", "debug", (1, 1, 1)),
    ],
)
def test_nothing_is_shown_twice(
    setup: str, late_setup: str, variable: str, times: tuple[int, int, int], tmp_path: Path
) -> None:
    """However logging is set up, each line is on the terminal once; details only if they were asked for."""
    program = PROGRAM.format(setup=setup, late_setup=late_setup)

    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={"SPOTSAFE_LOG": variable, "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )

    terminal = ended.stdout + ended.stderr
    counts = tuple(terminal.count(text) for text in ("fresh start of u", "FileWritten", "careful"))
    assert counts == times, terminal


def test_a_log_file_gets_the_lines_too(tmp_path: Path) -> None:
    """A handler for a file shows nothing on the terminal, so both get them."""
    program = PROGRAM.format(
        setup="logging.basicConfig(level=logging.INFO, filename='log.txt')", late_setup=""
    )

    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )

    assert ended.stderr.count("fresh start of u") == 1
    assert (tmp_path / "log.txt").read_text().count("fresh start of u") == 1


def test_a_wrong_level_is_refused() -> None:
    """A typing mistake in the variable is told, with what there is."""
    with pytest.raises(ValueError, match="SPOTSAFE_LOG=verbose is no level; use one of debug, info"):
        configure_logging({"SPOTSAFE_LOG": "verbose"})


@pytest.mark.parametrize("environ", [{}, {"SPOTSAFE_LOG": ""}, {"SPOTSAFE_LOG": "  "}])
def test_without_the_variable_logging_is_left_alone(environ: dict[str, str]) -> None:
    """No handler, no level: logging belongs to the application."""
    logger = logging.getLogger("spotsafe")
    before = (logger.level, list(logger.handlers))

    configure_logging(environ)

    assert (logger.level, list(logger.handlers)) == before


def test_a_handler_for_the_terminal_is_known_by_its_stream() -> None:
    """Standard error and output count; a stream of one's own does not; the handler's level counts."""
    logger = logging.Logger("alone", logging.DEBUG)
    assert not shown_by_logging(logger, logging.INFO)

    logger.addHandler(logging.StreamHandler(io.StringIO()))
    assert not shown_by_logging(logger, logging.INFO)

    terminal = logging.StreamHandler(sys.stderr)
    terminal.setLevel(logging.WARNING)
    logger.addHandler(terminal)
    assert not shown_by_logging(logger, logging.INFO)
    assert shown_by_logging(logger, logging.WARNING)


def test_levels_are_documented() -> None:
    """Every level that is accepted stands in the docstring."""
    assert "|".join(console.LEVELS) in (configure_logging.__doc__ or "")
