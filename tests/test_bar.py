"""What takes long: its words, its lines, and the line that changes on a terminal."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from spotsafe.bar import Bar, can_draw, few_words, words
from spotsafe.console import Console, LogSink
from spotsafe.events import Event, Progress, RestoreProgress, SaveAwaited, Warned, WriterAwaited

NAME = "a000012-s000001300-0041-7f3a9c21"
GB = 10**9


def saving(
    waited_s: float = 3.0, *, written: int = 0, published: bool = False, over: bool = False
) -> SaveAwaited:
    return SaveAwaited(
        checkpoint=NAME,
        waited_s=waited_s,
        limit_s=600.0,
        written_bytes=written,
        total_bytes=4 * GB,
        published=published,
        over=over,
    )


def restoring(waited_s: float = 3.0, *, read: int = 0, over: bool = False) -> RestoreProgress:
    return RestoreProgress(checkpoint=NAME, waited_s=waited_s, read_bytes=read, total_bytes=4 * GB, over=over)


class Terminal(io.StringIO):
    """What is written to it, as somebody sees it who looks at every moment."""

    def isatty(self) -> bool:
        return True

    @property
    def plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue())

    @property
    def lines(self) -> list[str]:
        """What stands on it in the end: a line that is gone over or erased is not there."""
        lines, column = [""], 0
        for part in re.split(r"(\r|\n|\x1b\[2?K)", self.plain):
            if part == "\n":
                lines.append("")
                column = 0
            elif part == "\r":
                column = 0
            elif part == "\x1b[2K":
                lines[-1] = ""
            elif part == "\x1b[K":
                lines[-1] = lines[-1][:column]
            else:
                lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + len(part) :]
                column += len(part)
        return lines


@pytest.fixture(autouse=True)
def an_ordinary_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    """Each test ends with the handlers and level that it began with."""
    logger = logging.getLogger("spotsafe")
    before = (logger.level, list(logger.handlers))
    yield
    logger.setLevel(before[0])
    logger.handlers[:] = before[1]


def printed(*events: Event, stream: io.StringIO | None = None, rank: int = 0) -> list[str]:
    stream = stream or io.StringIO()
    sink = Console(stream, rank=rank)
    for event in events:
        sink.emit(event)
    return stream.getvalue().splitlines()


# -- words


@pytest.mark.parametrize(
    ("event", "line", "short"),
    [
        (
            saving(written=1_500_000_000),
            f"waiting for checkpoint {NAME}, 1.5 GB of 4 GB written, 9 min 57 s at most",
            "writing step 1,300, 1.5 GB of 4 GB, 9 min 57 s at most",
        ),
        (
            saving(300.0, written=4 * GB, published=True),
            f"checkpoint {NAME} is published; waiting for older ones to be deleted, 5 min at most",
            "deleting what step 1,300 replaces, 5 min at most",
        ),
        (
            restoring(read=2 * GB),
            f"restoring checkpoint {NAME}, 2 GB of 4 GB read",
            "reading step 1,300, 2 GB of 4 GB",
        ),
        (
            WriterAwaited(waited_s=5.0, limit_s=65.0),
            "the writer of a run that has ended is still writing its last save; waiting for it, 1 min at most",
            "waiting for the last save of a run that has ended, 1 min at most",
        ),
    ],
)
def test_the_words(event: Progress, line: str, short: str) -> None:
    """What is waited for, how much of it is done, and how long it may still take."""
    assert words(event) == line
    assert few_words(event) == short


def test_how_much_it_will_be_may_not_be_known_yet() -> None:
    """As long as the state is being copied."""
    event = SaveAwaited(
        checkpoint=NAME, waited_s=700.0, limit_s=600.0, written_bytes=0, total_bytes=None, published=False
    )
    assert words(event) == f"waiting for checkpoint {NAME}, 0 bytes written, 0 s at most"


# -- lines


def test_where_lines_stay_there_is_one_every_half_minute() -> None:
    """Ten minutes of waiting are twenty lines in a file, not a hundred and twenty; the end has none."""
    events = [saving(float(second)) for second in range(3, 80, 5)]
    lines = printed(*events, saving(80.0, over=True))
    assert [re.search("(?:, )([^,]*) at most", line)[1] for line in lines] == [  # type: ignore[index] # there is one
        "9 min 57 s",
        "9 min 27 s",
        "8 min 57 s",
    ]
    assert all(line.startswith(f"spotsafe: waiting for checkpoint {NAME}, ") for line in lines)


def test_each_wait_has_lines_of_its_own() -> None:
    """One that begins when another is over is told at once, and so is one of another kind."""
    lines = printed(saving(3.0), restoring(3.0), saving(8.0), saving(9.0, over=True), saving(3.0))
    assert [line.split()[1] for line in lines] == ["waiting", "restoring", "waiting"]


def test_other_ranks_are_silent() -> None:
    """One process tells."""
    assert printed(saving(), rank=1) == []
    assert printed(saving(), stream=Terminal(), rank=1) == []


def test_the_log_has_the_same_lines_and_the_rest_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever debugs gets every event."""
    sink = LogSink()
    with caplog.at_level(logging.DEBUG, logger="spotsafe"):
        for event in (restoring(3.0), restoring(8.0, read=GB), restoring(9.0, over=True)):
            sink.emit(event)
    assert [one.levelname for one in caplog.records] == ["INFO", "DEBUG", "DEBUG"]
    assert caplog.messages[0] == f"restoring checkpoint {NAME}, 0 bytes of 4 GB read"
    assert f"RestoreProgress checkpoint={NAME} waited_s=8.0 read_bytes=1000000000" in caplog.messages[1]


# -- the line that changes


def test_on_a_terminal_one_line_changes_and_is_gone_in_the_end() -> None:
    """Every event moves it; nothing of it stays."""
    terminal = Terminal()
    sink, seen = Console(terminal), []
    for event in (restoring(3.0), restoring(8.0, read=2 * GB), restoring(13.0, read=4 * GB)):
        sink.emit(event)
        seen.append(terminal.lines)
    amounts = ["0 bytes of 4 GB", "2 GB of 4 GB", "4 GB of 4 GB"]
    assert [one[0].partition(" reading step 1,300, ")[2] for one in seen] == amounts
    assert all(len(one) == 1 for one in seen)
    assert all(one[0].startswith("spotsafe: \u2501") for one in seen)
    sink.emit(restoring(14.0, read=4 * GB, over=True))
    assert terminal.lines == [""]


def test_other_lines_stand_above_it() -> None:
    """A warning while something is awaited is not drawn over, and the next event draws the bar anew."""
    terminal = Terminal()
    sink = Console(terminal)
    for event in (saving(3.0), Warned(message="a source is blind"), saving(8.0, written=GB)):
        sink.emit(event)
    above, bar = terminal.lines
    assert above == "spotsafe: warning: a source is blind"
    assert bar.endswith("writing step 1,300, 1 GB of 4 GB, 9 min 52 s at most")
    sink.emit(saving(9.0, over=True))
    sink.emit(saving(9.0, over=True))
    assert terminal.lines == [above, ""]


@pytest.mark.parametrize("columns", ["20", "45", "80", "200"])
def test_it_fits_on_one_line(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that wraps could not be drawn over: what is too long is cut, and the bar goes first."""
    monkeypatch.setenv("COLUMNS", columns)
    terminal = Terminal()
    Console(terminal).emit(saving(written=GB))
    [line] = terminal.lines
    assert len(line) < int(columns)
    assert ("\u2501" in line) == (int(columns) >= 80)


def test_without_an_amount_there_is_no_bar() -> None:
    """Only words: nobody knows how far the writer of another run is."""
    terminal = Terminal()
    Console(terminal).emit(WriterAwaited(waited_s=0.0, limit_s=60.0))
    [line] = terminal.lines
    assert line == "spotsafe: waiting for the last save of a run that has ended, 1 min at most"


def test_what_the_log_shows_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records on the same terminal would run into it."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "__stderr__", terminal)
    logger = logging.getLogger("spotsafe")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(terminal))
    for event in (saving(3.0), saving(4.0, over=True)):
        Console().emit(event)
    assert terminal.getvalue() == ""


def test_only_a_terminal_that_is_the_processs_own_is_drawn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a notebook or another progress bar has put in its place writes lines; so does a dumb one."""
    terminal = Terminal()
    assert not can_draw(terminal, given=False)
    assert can_draw(terminal, given=True)
    monkeypatch.setattr(sys, "__stderr__", terminal)
    assert can_draw(terminal, given=False)
    assert not can_draw(io.StringIO(), given=True)
    monkeypatch.setenv("TERM", "dumb")
    assert not can_draw(terminal, given=True)
    monkeypatch.delenv("TERM")
    assert not can_draw(terminal, given=True)


def test_a_closed_terminal_stops_nobody() -> None:
    """As with lines."""
    terminal = Terminal()
    sink = Console(terminal)
    sink.emit(saving())
    terminal.close()
    sink.emit(saving(8.0))
    sink.emit(saving(9.0, over=True))


def test_nothing_is_shown_before_it_is_drawn() -> None:
    """So nothing is erased that is somebody else's."""
    assert Bar().over() == ""
