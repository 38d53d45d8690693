"""Sources of notices end to end in one process, and the events that a run tells."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

import spotsafe
from spotsafe import events as ev
from spotsafe.ledger.reading import read_end, read_events
from spotsafe.testing.aws import FakeAwsMetadata
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.sinks import RecordingSink
from tests.session.places import manifests, steps_there, train, trained
from tests.session.rig import Program


def test_a_notice_file_ends_the_run_with_its_state_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """watch="auto" finds the file's name in the environment; the file is the notice."""
    notice = tmp_path / "notice"
    monkeypatch.setenv("SPOTSAFE_NOTICE_FILE", str(notice))
    store = MemoryStore()
    program = Program()
    with (
        pytest.raises(spotsafe.Reclaimed) as caught,
        program.session(store, watch="auto", save_every=None) as run,
    ):
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            if step == 2:
                notice.write_text('{"deadline_s": 60, "action": "preempt"}')
                program.sink.wait_for(ev.NoticeReceived)
                assert run.notice is not None
                assert run.notice.action == "preempt"
    assert caught.value.code == 143
    assert steps_there(store) == [3]
    assert manifests(store)[3].reason == "notice"
    assert program.of(ev.RunStarted)[0].watching == ("file", "SIGTERM")
    [received] = program.of(ev.NoticeReceived)
    assert (received.source, received.kind) == ("file", "reclaim")
    assert 0 < received.seconds_left <= 60

    notice.unlink()
    rest = Program()
    with rest.session(store, watch="auto") as run:
        train(rest, run)
    whole = trained(MemoryStore(), until=6)
    assert program.seen + rest.seen == whole.seen
    assert rest.weights() == whole.weights()


def test_a_notice_that_is_taken_back_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is deleted before the safe point: the run goes on to its end."""
    notice = tmp_path / "notice"
    notice.write_text("")
    monkeypatch.setenv("SPOTSAFE_NOTICE_FILE", str(notice))
    program = Program()
    with program.session(MemoryStore(), watch="auto", save_every=None) as run:
        for step, batch in run.steps(program.loader, until=3):
            if step == 0:
                program.sink.wait_for(ev.NoticeReceived)
                notice.unlink()
                program.sink.wait_for(ev.NoticeCancelled)
                assert run.notice is None
            program.train(step, batch)
    assert program.checkpoint_steps() == [3]
    assert program.of(ev.RunEnded)[0].outcome == "finished"


def test_grace_is_the_time_that_is_really_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With none nothing new is begun, whatever the source promises; the newest checkpoint stays the newest."""
    notice = tmp_path / "notice"
    monkeypatch.setenv("SPOTSAFE_NOTICE_FILE", str(notice))
    store = MemoryStore()
    program = Program()
    with (
        pytest.raises(spotsafe.Reclaimed),
        program.session(store, watch="auto", save_every=2, grace=timedelta(0)) as run,
    ):
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            run.wait()
            if step == 2:
                notice.write_text("60")
                program.sink.wait_for(ev.NoticeReceived)
    assert program.of(ev.NoticeReceived)[0].seconds_left == 0
    assert steps_there(store) == [2]
    assert program.of(ev.RunEnded)[0].newest == program.of(ev.CheckpointPublished)[0].checkpoint


@pytest.mark.slow
def test_aws_from_a_rebalance_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recommendation saves early and goes on; a notice taken back stops nothing; a notice saves and exits 143."""
    store = MemoryStore()
    program = Program()
    with FakeAwsMetadata() as aws:
        for name, value in aws.environ.items():
            monkeypatch.setenv(name, value)
        with (
            pytest.raises(spotsafe.Reclaimed) as caught,
            program.session(store, watch="auto", save_every=None, keep=10) as run,
        ):
            for step, batch in run.steps(program.loader, until=50):
                program.train(step, batch)
                if step == 1:
                    aws.rebalance()
                    program.sink.wait_for(ev.NoticeReceived, count=1)
                    assert run.notice is None
                if step == 2:
                    run.wait()
                    assert steps_there(store) == [2]
                    aws.notice("stop")
                    program.sink.wait_for(ev.NoticeReceived, count=2)
                    assert run.notice is not None
                    aws.cancel()
                    program.sink.wait_for(ev.NoticeCancelled)
                    assert run.notice is None
                if step == 4:
                    aws.notice("terminate", in_seconds=120)
                    program.sink.wait_for(ev.NoticeReceived, count=3)
        assert {
            request.headers.get("x-aws-ec2-metadata-token")
            for request in aws.requests
            if request.method == "GET"
        }
    assert caught.value.code == 143
    assert {step: one.reason for step, one in manifests(store).items()} == {2: "risk", 5: "notice"}
    kinds = [(one.kind, one.action) for one in program.of(ev.NoticeReceived)]
    assert kinds == [("risk", "rebalance"), ("reclaim", "stop"), ("reclaim", "terminate")]
    assert program.of(ev.RunStarted)[0].watching == ("aws", "SIGTERM")
    assert program.of(ev.RunEnded)[0].outcome == "reclaimed"


def test_a_source_that_cannot_be_asked_is_told_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blind once, recovered once; training does not notice."""
    program = Program()
    with FakeAwsMetadata() as aws:
        aws.faults.refuse_all = 503
        for name, value in aws.environ.items():
            monkeypatch.setenv(name, value)
        with program.session(MemoryStore(), watch="auto", save_every=None) as run:
            program.sink.wait_for(ev.WatcherBlind)
            train(program, run, 2)
            aws.faults.refuse_all = None
            program.sink.wait_for(ev.WatcherRecovered)
            assert run.notice is None
    assert len(program.of(ev.WatcherBlind)) == 1
    assert program.of(ev.RunEnded)[0].outcome == "finished"


def test_the_story_of_a_run_in_events() -> None:
    """A fresh start that saves twice, and the resume of it: every event in its place, none twice."""
    store = MemoryStore()
    first = trained(store)
    names = [name for name in first.sink.names if name not in {"FileWritten", "IndexWritten"}]
    save = ["SaveStarted", "SaveStaged", "CheckpointPublished"]
    assert names == ["RunStarted", "IntervalChosen", "FirstStep", *save, *save, "RunEnded"]

    second = trained(store, until=6)
    names = [name for name in second.sink.names if name not in {"FileWritten", "IndexWritten"}]
    assert names == [
        *[
            "RestoreStarted",
            "RestoreVerified",
            "RestoreFinished",
            "RunStarted",
            "IntervalChosen",
            "FirstStep",
        ],
        *save,
        "RunEnded",
    ]
    [first_step] = second.of(ev.FirstStep)
    parts = ["before the session", "waited for a writer", "claimed", "read", "loaded", "first step"]
    assert list(dict(first_step.parts))[-len(parts[1:]) :] == parts[1:]
    in_session = [dict(first_step.parts)[part] for part in parts[1:]]
    assert min(in_session) >= 0
    assert sum(in_session) == pytest.approx(first_step.seconds_since_start)
    [started] = second.of(ev.RunStarted)
    assert (started.attempt, started.step, started.url) == (2, 4, store.url)
    assert started.resumed_from == second.of(ev.RestoreFinished)[0].checkpoint
    assert started.age_s >= 0


def test_the_ledger_holds_what_the_sinks_got() -> None:
    """On storage beside the checkpoints, readable by whoever comes later; and how it ended."""
    store = MemoryStore()
    program = trained(store)
    recorded = [type(one.event).__name__ for one in read_events(store, 1)]
    assert recorded[0] == "RunStarted"
    assert recorded[-1] == "RunEnded"
    assert sorted(recorded) == sorted(program.sink.names)
    end = read_end(store, 1)
    assert end is not None
    assert (end.outcome, end.step, end.published) == ("finished", 4, 2)


def test_sinks_of_the_process_get_every_session() -> None:
    """What a launcher installs sees the runs of a script that knows nothing of it."""
    from spotsafe.events import install

    sink = RecordingSink()
    uninstall = install(sink)
    try:
        program = trained(MemoryStore(), until=2)
    finally:
        uninstall()
    assert sink.names == program.sink.names
    trained(MemoryStore(), until=2)
    assert sink.names == program.sink.names


@pytest.mark.parametrize(
    ("way", "reason"), [("stop", "late"), ("nested", "late"), ("limit", None), ("another loop", None)]
)
def test_the_end_names_what_stopped_the_run(way: str, reason: str | None) -> None:
    """That of the last loop; a stage that was stopped earlier says nothing about how the run came to its end."""
    program = Program()
    with program.session(MemoryStore()) as run:
        for epoch in run.epochs(3) if way == "nested" else [0]:
            for step, batch in run.steps(program.loader):
                program.train(step, batch)
                if step == 1 and way != "limit":
                    run.stop("late")
            assert epoch == 0
        if way == "another loop":
            for _ in run.range(1):
                pass
    [ended] = program.of(ev.RunEnded)
    assert (ended.outcome, ended.reason) == ("finished", reason)


def test_a_loop_that_is_left_was_not_stopped() -> None:
    """The word was given, and then the program broke off before it counted."""
    program = Program()
    with program.session(MemoryStore()) as run:
        for step, batch in run.steps(program.loader):
            program.train(step, batch)
            run.wait()
            if step == 2:
                run.stop("late")
                break
    [ended] = program.of(ev.RunEnded)
    assert (ended.outcome, ended.reason) == ("left", None)


def test_three_lines_and_no_more(capfd: pytest.CaptureFixture[str]) -> None:
    """A run that goes well says three things on the terminal: start, interval, end."""
    trained(MemoryStore(), until=2)
    captured = capfd.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split(" ")[1] for line in lines] == ["fresh", "saving", "finished"]
