"""A file is a notice as long as it exists, whatever is in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from spotsafe.errors import WatcherUnavailable
from spotsafe.reclaim.file import LONGEST_NOTICE_S, FileWatcher, from_environment
from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.watchers import WatcherConformance

WALL = 1_700_000_000.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall=WALL)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "notice"


def write(path: Path, content: str | bytes, *, modified: float = WALL) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    os.utime(path, (modified, modified))


def look(path: Path, clock: ManualClock, *, booted: float = 0.0) -> ReclaimNotice:
    notice = FileWatcher(path, clock=clock, booted=booted).poll()
    assert notice is not None
    return notice


class TestConformance(WatcherConformance):
    @pytest.fixture(autouse=True)
    def world(self, tmp_path: Path):
        self.folder = tmp_path / "folder"
        self.folder.mkdir()
        self.path = self.folder / "notice"

    def make_watcher(self) -> FileWatcher:
        return FileWatcher(self.path)

    def restore(self) -> None:
        if self.folder.is_symlink():
            self.folder.unlink()
            self.folder.mkdir()
        self.path.unlink(missing_ok=True)

    def quiet(self) -> None:
        self.restore()

    def announce(self) -> None:
        self.restore()
        self.path.touch()

    def break_(self) -> None:
        self.restore()
        self.folder.rmdir()
        self.folder.symlink_to(self.folder)  # a path that no user, root included, can look at


def test_an_empty_file_is_a_notice_of_unknown_deadline(path: Path, clock: ManualClock):
    """`touch` is enough."""
    write(path, "")
    assert look(path, clock) == ReclaimNotice(
        source="file", kind=NoticeKind.RECLAIM, action="reclaim", deadline=None, received=1000.0
    )


@pytest.mark.parametrize("content", ["30", "30.0", " 30\n", '{"deadline_s": 30}'])
def test_a_number_of_seconds_is_the_deadline(content: str, path: Path, clock: ManualClock):
    """A bare number and JSON say the same."""
    write(path, content)
    assert look(path, clock).deadline == 1030.0


def test_json_names_deadline_and_action(path: Path, clock: ManualClock):
    """What a script writes is what the notice says; unknown members are ignored."""
    write(path, '{"deadline_s": 12.5, "action": "drain", "node": "n17"}')
    notice = look(path, clock)
    assert (notice.deadline, notice.action) == (1012.5, "drain")


def test_the_time_counts_from_when_the_file_was_written(path: Path, clock: ManualClock):
    """Thirty seconds that were promised ten seconds ago are twenty now, and never less than none."""
    write(path, "30", modified=WALL - 10)
    assert look(path, clock).deadline == 1020.0
    write(path, "30", modified=WALL - 3000)
    assert look(path, clock).deadline == 1000.0


def test_a_file_from_the_future_gets_no_more_than_it_says(path: Path, clock: ManualClock):
    """A file server whose clock runs ahead does not lengthen the notice."""
    write(path, "30", modified=WALL + 5000)
    assert look(path, clock).deadline == 1030.0


@pytest.mark.parametrize(
    ("content", "deadline"),
    [
        ("-5", 1000.0),
        ("1e9", 1000.0 + LONGEST_NOTICE_S),
        ("Infinity", 1000.0 + LONGEST_NOTICE_S),
        ("NaN", None),
    ],
)
def test_odd_numbers_are_clamped(content: str, deadline: float | None, path: Path, clock: ManualClock):
    """Negative is now, huge is the most that a file can promise, not a number is unknown."""
    write(path, content)
    assert look(path, clock).deadline == deadline


@pytest.mark.parametrize(
    "content",
    [
        '{"deadline_s": 30, "act',
        "soon",
        "\x00\xff",
        "[1, 2]",
        "true",
        "null",
        '"30"',
        '{"deadline_s": "30", "action": 7}',
        '{"deadline_s": true, "action": ""}',
        "[" * 50_000,
        "x" * 200_000,
    ],
)
def test_content_that_makes_no_sense_does_not_lose_the_notice(content: str, path: Path, clock: ManualClock):
    """The file exists, so the machine goes; a half-written one says the rest a second later."""
    write(path, content)
    notice = look(path, clock)
    assert (notice.kind, notice.action, notice.deadline) == (NoticeKind.RECLAIM, "reclaim", None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(content=st.binary(max_size=200))
def test_no_content_at_all_breaks_it(content: bytes, path: Path, clock: ManualClock):
    """Any bytes give a notice whose deadline is unknown or within what a file can promise."""
    write(path, content)
    deadline = look(path, clock).deadline
    assert deadline is None or 1000.0 <= deadline <= 1000.0 + LONGEST_NOTICE_S


def test_a_file_that_is_completed_later_sharpens_its_notice(path: Path, clock: ManualClock):
    """First seen empty, then with a deadline: received stays, the deadline comes."""
    watcher = FileWatcher(path, clock=clock, booted=0.0)
    write(path, "")
    first = watcher.poll()
    clock.advance(1.0)
    write(path, "30", modified=clock.wall())
    second = watcher.poll()
    assert first is not None
    assert second is not None
    assert (first.received, second.received) == (1000.0, 1000.0)
    assert (first.deadline, second.deadline) == (None, 1031.0)


def test_a_file_that_is_there_at_the_start_counts(path: Path, clock: ManualClock):
    """The node may have been told before this process began."""
    write(path, "", modified=WALL - 3600)
    assert FileWatcher(path, clock=clock, booted=WALL - 7200).poll() is not None


def test_a_file_from_before_the_boot_does_not_count_until_it_is_written_again(path: Path, clock: ManualClock):
    """It spoke of an earlier life of the machine, and would end every start from then on."""
    watcher = FileWatcher(path, clock=clock, booted=WALL - 60)
    write(path, "", modified=WALL - 3600)
    assert [watcher.poll(), watcher.poll()] == [None, None]
    write(path, "")
    assert watcher.poll() is not None


def test_the_boot_time_of_this_machine_is_in_the_past(path: Path):
    """Asked without a boot time, a file written now counts."""
    path.touch()
    assert FileWatcher(path).poll() is not None


def test_a_folder_that_does_not_exist_yet_is_no_notice(tmp_path: Path, clock: ManualClock):
    """The path may come into being later; until then nothing is announced."""
    assert FileWatcher(tmp_path / "not" / "yet", clock=clock).poll() is None


def test_what_cannot_be_looked_at_is_not_no_notice(tmp_path: Path, clock: ManualClock):
    """A path below a file, or a loop of links, is an error that names the path and the variable."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(WatcherUnavailable, match=r"SPOTSAFE_NOTICE_FILE") as caught:
        FileWatcher(loop, clock=clock).poll()
    assert str(loop) in str(caught.value)


def test_a_folder_is_reported_as_what_it_is(tmp_path: Path, clock: ManualClock):
    """A folder in place of the file cannot be read, which is said."""
    with pytest.raises(WatcherUnavailable, match="directory"):
        FileWatcher(tmp_path, clock=clock, booted=0.0).poll()


def test_the_variable_turns_it_on(path: Path, clock: ManualClock):
    """SPOTSAFE_NOTICE_FILE names the file; unset or empty watches nothing."""
    watcher = from_environment({"SPOTSAFE_NOTICE_FILE": str(path)}, clock=clock)
    assert watcher is not None
    path.touch()
    assert watcher.poll() is not None
    assert from_environment({}, clock=clock) is None
    assert from_environment({"SPOTSAFE_NOTICE_FILE": " "}, clock=clock) is None
