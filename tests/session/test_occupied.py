"""Who else is, or was, in the folder: jobs that start at once, stores that keep nobody apart, odd records."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spotsafe
from spotsafe import events as ev
from spotsafe.checkpoint.attempts import AttemptRecord, encode_record, read_attempt
from spotsafe.checkpoint.candidates import look
from spotsafe.checkpoint.layout import MAX_NUMBER, attempt_published, attempt_record, ledger_heartbeat
from spotsafe.clock import SystemClock
from spotsafe.console import Console
from spotsafe.testing.memory import MemoryStore
from tests.session.places import attempts, run_of_two, start_fails, train, trained
from tests.session.rig import Program


class Patient(SystemClock):
    """Waiting takes no time, and is counted."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.waited = 0.0
        self.meanwhile = meanwhile

    def wait(self, event: Any, timeout_s: float | None = None) -> bool:
        if event.is_set() or timeout_s is None or not 1 <= timeout_s < 10:
            return super().wait(event, timeout_s)
        self.waited += timeout_s
        self.meanwhile()
        return False


class Contested(MemoryStore):
    """Another job claims the first attempt in the instant before we do."""

    def __init__(self, **other: Any) -> None:
        super().__init__()
        self.other = other
        self.beats = 0

    def create(self, path: str, data: bytes) -> bool:
        if path == attempt_record(1) and path not in self.objects:
            mine = MemoryStore()
            mine.objects[path] = data
            theirs = dataclasses.replace(
                read_attempt(mine, 1), nonce="ffffffff", run="ffffffff", **self.other
            )
            self.objects[path] = encode_record(theirs)
        return super().create(path, data)

    def beat(self) -> None:
        self.beats += 1
        self.objects[ledger_heartbeat(1)] = b'{"step": %d}' % self.beats


ELSEWHERE = {"job": "SLURM_JOB_ID=99", "host": "there"}


def test_two_jobs_that_start_at_once() -> None:
    """Neither saw the other before the claim; the one that lost the number meets the other's record there."""
    store = Contested(**ELSEWHERE)
    with pytest.raises(spotsafe.RunInUse, match="attempt 1 of another job"):
        spotsafe.session(store, watch=None, clock=Patient(store.beat)).start()
    assert attempts(store) == (1,)


def test_two_starts_of_one_job_at_once() -> None:
    """A launcher that started twice: nobody waits, the later one takes over."""
    store, clock = Contested(), Patient()
    with spotsafe.session(store, watch=None, clock=clock) as run:
        assert run.attempt == 2
    assert clock.waited == 0


@pytest.mark.parametrize("takeover", [False, True])
def test_the_other_one_died_right_after_its_claim(takeover: bool) -> None:
    """No heart beats: after an interval the folder is free; `takeover` does not even look."""
    store, clock = Contested(**ELSEWHERE), Patient()
    with spotsafe.session(store, watch=None, clock=clock, takeover=takeover) as run:
        assert run.attempt == 2
    assert (clock.waited >= 30) is not takeover


# -- a store that keeps nobody apart ----------------------------------------------------------------------------


class Lying(MemoryStore):
    """Creates over what is there, as servers do that ignore conditions."""

    exclusive = None

    def create(self, path: str, data: bytes) -> bool:
        self.objects[path] = bytes(data)
        return True


def test_a_store_without_create_if_absent_is_told_of() -> None:
    """By an event, by the start line, and in words that say what it means; the run itself works."""
    store, screen = Lying(), io.StringIO()
    program = Program()
    with program.session(store, events=[program.sink, Console(screen)], save_every=1, keep=2) as run:
        train(program, run, 6)

    assert [event.attempt for event in program.of(ev.SingleWriter)] == [1]
    [started] = program.of(ev.RunStarted)
    assert started.single_writer
    lines = screen.getvalue().splitlines()
    assert sum("never let two run on it at once" in line for line in lines) == 1
    assert [line.endswith("; single writer") for line in lines if "fresh start" in line] == [True]
    assert len(look(store).names) == 2, "retention works on what is our own"


def test_an_honest_store_is_not() -> None:
    """No word about it."""
    program = trained(MemoryStore())
    assert program.of(ev.SingleWriter) == []
    assert not program.of(ev.RunStarted)[0].single_writer


def test_there_only_attempts_with_an_end_are_cleaned_up_after() -> None:
    """The end is read from the ledger: a first attempt that ended well is retained like our own."""
    for ended in (True, False):
        store = Lying()
        trained(store, until=4)
        if not ended:
            for path in [path for path in store.objects if path.startswith("ledger/000001/events")]:
                del store.objects[path]
        program = Program()
        with program.session(store, save_every=1, keep=2) as run:
            train(program, run, 8)
        old = [name.step for name in look(store).names if name.attempt == 1 and store.list(name.folder)[1:]]
        assert old == ([] if ended else [4, 2])


def test_a_start_whose_record_is_taken_ends_superseded() -> None:
    """Another start took the same number: found at the next publish."""
    store = Lying()
    program = Program()
    with pytest.raises(spotsafe.Superseded), program.session(store, save_every=1, keep=100) as run:
        train(program, run, 2)
        mine = read_attempt(store, 1)
        store.objects[attempt_record(1)] = encode_record(dataclasses.replace(mine, nonce="ffffffff"))
        train(program, run, 6)
    assert program.of(ev.AttemptSuperseded)[0].newer == 1


# -- odd records and names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["7.json", "0000007.json", "000000.json", "-00007.json", "000007.JSON", "000007.json.tmp", "000007", "x.json",
     "\u0661\u0661\u0661\u0661\u0661\u0661.json", f"{MAX_NUMBER + 1}.json", "9" * 30 + ".published"],
)  # fmt: skip
def test_strange_names_are_nobodys(name: str) -> None:
    """They count for nothing, stop nothing, and stay."""
    store, _, newer = run_of_two()
    store.put(f"attempts/{name}", b"strange")
    with Program().session(store) as run:
        assert (run.attempt, run.resumed_from) == (2, str(newer))
    assert store.objects[f"attempts/{name}"] == b"strange"


def record_of(store: MemoryStore, number: int) -> AttemptRecord:
    return dataclasses.replace(read_attempt(store, 1), attempt=number, nonce="0badcafe")


def test_numbers_that_jump() -> None:
    """A record far above the others is the newest; the next start comes after it."""
    store, _, newer = run_of_two()
    store.put(attempt_record(900), encode_record(record_of(store, 900)))
    with Program().session(store) as run:
        assert (run.attempt, run.resumed_from) == (901, str(newer))


def test_the_highest_number_is_an_error_that_names_it() -> None:
    """No number is left: nothing that a file says makes the names wrap around or break."""
    store, _, _ = run_of_two()
    store.put(attempt_published(MAX_NUMBER), b"")
    error = start_fails(store, spotsafe.StorageError)
    assert str(MAX_NUMBER) in str(error)
    assert "remove it" in str(error)


@pytest.mark.parametrize("cut", [0, 1, 70, 200])
def test_a_truncated_record_of_an_attempt_that_left_nothing(cut: int) -> None:
    """It may have been a rollback: an error with the way out. Nothing is guessed, nothing is written."""
    store, _, _ = run_of_two()
    store.put(attempt_record(2), encode_record(record_of(store, 2))[:cut])
    error = start_fails(store, spotsafe.DamagedCheckpoint)
    assert attempt_record(2) in str(error)
    assert "spotsafe rollback" in str(error)


@pytest.mark.parametrize("content", [b"", b"not JSON", b"[]", b'{"attempt": 1}', b"\xff\xfe", b"null"])
def test_a_record_that_is_none_of_an_attempt_that_trained(content: bytes) -> None:
    """It left checkpoints, so it was no rollback: the start goes on and says what it left out of account."""
    store, _, newer = run_of_two()
    store.objects[attempt_record(1)] = content
    program = Program()
    with program.session(store) as run:
        assert run.resumed_from == str(newer)
    assert any("left out of account" in event.message for event in program.of(ev.Warned))


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_record_of_another_version_stops(number: int) -> None:
    """Whatever the newest record is that must be read: a newer spotsafe knows more than we do."""
    from spotsafe.checkpoint import sealed

    store, _, _ = run_of_two()
    document = sealed.unseal(encode_record(record_of(store, number)), max_bytes=1 << 20)
    store.objects[attempt_record(number)] = sealed.seal({**document, "requires": ["leases"]})
    error = start_fails(store, spotsafe.UnsupportedFormat)
    assert attempt_record(number) in str(error)


def test_a_record_that_is_another_ones() -> None:
    """A record that was copied under another number is damaged, not believed."""
    store, _, _ = run_of_two()
    store.put(attempt_record(2), store.objects[attempt_record(1)])
    error = start_fails(store, spotsafe.DamagedCheckpoint)
    assert "it says that it is attempt 1" in str(error)


def test_a_folder_that_may_say_written_too_soon_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, at the start, in the words of the doubt; a folder on a disk is not."""
    for doubt in ("the mount has a write cache", None):
        monkeypatch.setattr("spotsafe.opening.durability_doubt", lambda _url, doubt=doubt: doubt)
        program = trained(str(tmp_path / str(doubt)))
        assert [event.message for event in program.of(ev.Warned)] == ([doubt] if doubt else [])
