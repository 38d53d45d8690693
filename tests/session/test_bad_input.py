"""Places that cannot hold a run, storage that fails, and two sessions on one run: each with its clear error."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

import spotsafe
from spotsafe import events as ev
from spotsafe.errors import StorageNotFolder
from spotsafe.ledger.reading import writes_no_more
from spotsafe.storage.local import LocalStore
from spotsafe.storage.retrying import RetryingStore
from spotsafe.testing.faults import CountingStore, FailingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.writer.arena import _maps
from spotsafe.writer.thread import NAME as WRITER_THREAD
from tests.session.places import attempts, published, run_of_two, start_fails, steps_there, train, trained
from tests.session.rig import Cut, Program

IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0

PATIENCE_S = 10.0


# -- places ---------------------------------------------------------------------------------------------------------


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    """Said before anything is built up, and the file is left as it is."""
    path = tmp_path / "weights.pt"
    path.write_bytes(b"precious")
    with pytest.raises(StorageNotFolder, match=r"weights\.pt") as caught:
        Program().session(path)
    assert isinstance(caught.value, NotADirectoryError)
    with pytest.raises(StorageNotFolder, match=r"weights\.pt"), Program().session(path / "run"):
        pytest.fail("it started")
    assert path.read_bytes() == b"precious"


def test_a_folder_that_holds_runs_is_no_run(tmp_path: Path) -> None:
    """A forgotten name would begin a run among runs, which nobody lists and nobody finds again."""
    trained(str(tmp_path / "runs" / "gpt"))
    (tmp_path / "runs" / "notes.txt").write_text("x")
    (tmp_path / "runs" / "a b").mkdir()
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(
        ValueError, match=r"runs is no run but a folder with runs, such as .*/runs/gpt; name one"
    ):
        Program().session(tmp_path / "runs").start()
    assert sorted(tmp_path.rglob("*")) == before
    with Program().session(tmp_path / "runs" / "other") as run:
        assert run.attempt == 1
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "link").symlink_to(tmp_path / "runs" / "gpt")
    with Program().session(tmp_path / "beside") as run:
        assert run.attempt == 1, "a link is not followed, and what is no run is nobody's business"


def test_a_store_that_cannot_say_whether_it_holds_runs() -> None:
    """No answer is no permission."""
    inner = MemoryStore()
    store = FailingStore(
        inner, fail=lambda name, *_: spotsafe.StorageUnavailable("down") if name == "names" else None
    )
    start_fails(store, spotsafe.StorageUnavailable)
    assert not inner.objects


def test_a_protocol_that_nobody_knows() -> None:
    """A typing error in a url is no folder of that name."""
    with pytest.raises(ValueError, match="s33"):
        Program().session("s33://bucket/run")


CLOSED = """
import sys
import spotsafe

for folder in sys.argv[1:]:
    try:
        with spotsafe.session(folder, watch=None):
            print("started")
    except spotsafe.SpotsafeError as error:
        print(type(error).__name__, isinstance(error, PermissionError), folder in str(error), error)
"""


@pytest.mark.slow
def test_a_folder_without_permission(tmp_path: Path) -> None:
    """Neither one that cannot be looked at nor one that cannot be written is a fresh start; both name the path."""
    prefix: list[str] = []
    if IS_ROOT:
        if shutil.which("setpriv") is None:
            pytest.skip("root writes everywhere, and there is no setpriv to drop that")
        drop = "-dac_override,-dac_read_search"
        prefix = ["setpriv", f"--bounding-set={drop}", f"--inh-caps={drop}"]
    closed, read_only, below = tmp_path / "closed", tmp_path / "read-only", tmp_path / "below"
    for folder in (closed, read_only):
        trained(LocalStore(str(folder)), until=2)
    below.mkdir()
    closed.chmod(0o000)
    (read_only / "attempts").chmod(0o555)
    below.chmod(0o555)
    try:
        done = subprocess.run(
            [*prefix, sys.executable, "-c", CLOSED, str(closed), str(read_only), str(below / "run")],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        for folder in (closed, read_only / "attempts", below):
            folder.chmod(0o755)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    for line in lines:
        assert line.startswith("StorageRefused True True"), line
    assert attempts(LocalStore(str(read_only))) == (1,)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MB."""
    if not IS_ROOT or shutil.which("mount") is None:
        pytest.skip("mounting a file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"mount is not permitted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_full_disk_in_the_middle_of_a_save(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Training goes on, the failure is shown everywhere, what was saved stays good; with space it goes on saving."""
    ballast = small_disk / "ballast"
    program = Program()
    large = torch.zeros(300_000)  # 1.2 MB
    with program.session(small_disk / "run", save_every=1, keep=10, large=large) as run:
        for step, batch in run.steps(program.loader, until=5):
            program.train(step, batch)
            large += 1
            if step == 1:
                run.wait()
                ballast.write_bytes(b"x" * 2_000_000)
            if step == 3:
                program.sink.wait_for(ev.SaveFailed)
                assert steps_there(LocalStore(str(small_disk / "run"))) == [1]
                ballast.unlink()
        run.wait()
        failures = run.failures
    assert len(program.seen) == 5
    failed = program.of(ev.SaveFailed)
    assert len(failed) == len(failures) > 0
    assert "free some space" in failed[0].error
    assert "StorageFull" in failures[0]
    assert "training goes on, earlier checkpoints are untouched" in capfd.readouterr().err
    assert not any(path.rpartition("/")[2].startswith(".tmp") for path in files_below(small_disk))
    assert program.of(ev.RunEnded)[0].outcome == "finished"

    again, restored = Program(), torch.zeros(300_000)
    with again.session(small_disk / "run", large=restored) as run:
        assert run.step == 5
    assert again.weights() == program.weights()
    assert torch.equal(restored, large)


def test_a_disk_that_is_full_from_the_start(small_disk: Path) -> None:
    """The claim shows it: nobody trains for an hour to learn it."""
    ballast = os.open(small_disk / "ballast", os.O_CREAT | os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space"):
            while True:
                os.write(ballast, bytes(4096))
    finally:
        os.close(ballast)
    with pytest.raises(spotsafe.StorageFull, match="free some space"), Program().session(small_disk / "run"):
        pytest.fail("it started")


# -- storage that errors while looking ------------------------------------------------------------------------------


def failing(
    store: MemoryStore, operation: str, path: str, error: type[spotsafe.StorageError]
) -> FailingStore:
    """A store whose `operation` fails for paths that begin with `path`."""

    def fail(name: str, at: str, number: int) -> Exception | None:
        return (
            error(f"{at}: the store is ill", path=at) if name == operation and at.startswith(path) else None
        )

    return FailingStore(store, fail=fail)


@pytest.mark.parametrize(
    "error", [spotsafe.StorageUnavailable, spotsafe.StorageRefused, spotsafe.StorageError]
)
@pytest.mark.parametrize(
    ("operation", "path"),
    [("names", "attempts"), ("names", "checkpoints"), ("read", "checkpoints"), ("read", "attempts")],
)
def test_storage_that_errors_while_looking_is_never_a_fresh_start(
    operation: str, path: str, error: type[spotsafe.StorageError]
) -> None:
    """After the retries the error comes out as it is; nothing was claimed or written."""
    store, _, _ = run_of_two()
    before = dict(store.objects)
    waits: list[float] = []
    ill = RetryingStore(failing(store, operation, path, error), sleep=waits.append)
    assert "the store is ill" in str(start_fails(ill, error))
    assert store.objects == before
    assert len(waits) == (5 if error is spotsafe.StorageUnavailable else 0)


def test_storage_that_errors_on_an_empty_folder_is_no_fresh_start_either() -> None:
    """Nobody knows that it is empty."""
    store = MemoryStore()
    start_fails(
        failing(store, "names", "checkpoints", spotsafe.StorageUnavailable), spotsafe.StorageUnavailable
    )
    assert store.objects == {}


@pytest.mark.parametrize("operation", ["read_into", "size"])
def test_data_that_cannot_be_read_stops_the_start(operation: str) -> None:
    """A storage error is not damage: no walk-back, nothing restored; the next start finds all as it was."""
    store, _, newer = run_of_two()
    program = Program()
    before = program.weights()
    ill = failing(store, operation, newer.folder, spotsafe.StorageUnavailable)
    with pytest.raises(spotsafe.StorageUnavailable), program.session(ill):
        pytest.fail("it started")
    assert program.of(ev.CheckpointPassedOver) == []
    assert program.weights() == before
    with Program().session(store) as run:
        assert run.resumed_from == str(newer)


def test_a_lack_of_memory_is_not_damage() -> None:
    """The newest is still good on a larger machine."""
    store, _, newer = run_of_two()

    def fail(name: str, at: str, number: int) -> Exception | None:
        return MemoryError("16 GiB") if name == "read_into" else None

    program = Program()
    with pytest.raises(MemoryError), program.session(FailingStore(store, fail=fail)):
        pytest.fail("it started")
    assert program.of(ev.CheckpointPassedOver) == []
    with Program().session(store) as run:
        assert run.resumed_from == str(newer)


def test_a_checkpoint_that_vanishes_while_it_is_read_is_chosen_again() -> None:
    """An older attempt's retention may take it away between the look and the read."""
    store, older, newer = run_of_two()

    def fail(name: str, at: str, number: int) -> Exception | None:
        if name == "read_into" and at.startswith(newer.folder):
            for path in [path for path in store.objects if path.startswith(newer.folder)]:
                del store.objects[path]
        return None

    with Program().session(FailingStore(store, fail=fail)) as run:
        assert run.resumed_from == str(older)


def test_a_claim_that_is_refused_stops_the_start() -> None:
    """A folder that can be read but not written: said at once, with nothing restored and nothing left running."""
    store, _, _ = run_of_two()
    before, threads = dict(store.objects), set(threading.enumerate())
    error = start_fails(
        failing(store, "create", "attempts", spotsafe.StorageRefused), spotsafe.StorageRefused
    )
    assert "attempts/000002.json" in str(error)
    assert store.objects == before
    assert set(threading.enumerate()) == threads


def test_a_ledger_that_cannot_be_written_stops_nothing() -> None:
    """It is evidence, not state: one warning, and the run trains and saves."""
    store = MemoryStore()

    def fail(name: str, at: str, number: int) -> Exception | None:
        return (
            spotsafe.StorageRefused(f"{at}: no", path=at)
            if at.startswith("ledger") and name not in {"names", "begun"}
            else None
        )

    program = trained(FailingStore(store, fail=fail))
    assert steps_there(store) == [4, 2]
    assert sum("ledger" in event.message for event in program.of(ev.Warned)) == 1
    with Program().session(store) as run:
        assert run.step == 4


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_sink_that_raises_does_not_reach_training(error: type[BaseException]) -> None:
    """A broken logger is a broken logger, also one that calls `sys.exit()`."""

    class Broken:
        def emit(self, event: ev.Event) -> None:
            raise error("wandb is down")

    program = Program()
    with program.session(MemoryStore(), events=[Broken(), program.sink]) as run:
        train(program, run)
    assert program.checkpoint_steps()[-1] == 6


# -- two sessions ---------------------------------------------------------------------------------------------------


def test_two_sessions_on_one_run_are_an_error() -> None:
    """They would supersede each other; the first one is not disturbed, and closing it makes room."""
    store = MemoryStore()
    first = Program()
    with first.session(store) as run:
        assert "already has a session" in str(start_fails(store, spotsafe.RunInUse))
        train(first, run)
        assert attempts(store) == (1,)
    assert first.of(ev.RunEnded)[0].outcome == "finished"
    with Program().session(store) as run:
        assert run.step == 6


@pytest.mark.parametrize("spelling", ["slash", "relative", "dots", "link", "file url"])
def test_another_spelling_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    """A link, a relative path or a url of the same folder is recognised."""
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    other = {
        "slash": f"{folder}/",
        "relative": "run",
        "dots": f"{tmp_path}/elsewhere/../run",
        "link": str(tmp_path / "link"),
        "file url": f"file://{folder}",
    }[spelling]
    with (
        Program().session(str(folder)),
        pytest.raises(spotsafe.RunInUse, match="already has a session"),
        Program().session(other),
    ):
        pytest.fail("it started")
    with Program().session(other) as run:
        assert run.attempt == 2


def test_a_start_that_failed_makes_room_too() -> None:
    """Whatever stopped it, a later session may try again; the same object may not."""
    store = MemoryStore()
    start_fails(store, spotsafe.CheckpointNotFound, resume="must")
    with Program().session(store) as run:
        assert run.attempt == 1


def test_an_end_tells_of_a_manifest_that_may_still_arrive() -> None:
    """The next attempt must not take the files of such a save for those of an attempt that writes no more."""
    store = MemoryStore()
    ill = failing(store, "create", "checkpoints", spotsafe.StorageUnavailable)
    program = Program()
    with pytest.raises(spotsafe.SaveFailed), program.session(ill, save_every=None) as run:
        train(program, run)
    assert program.of(ev.RunEnded)[0].in_flight
    assert not writes_no_more(store, 1)


def test_leaving_that_fails_makes_room_too() -> None:
    """The block ended with a failed save: the session is closed all the same."""
    store = MemoryStore()
    ill = failing(store, "put_large", "checkpoints", spotsafe.StorageFull)
    program = Program()
    with pytest.raises(spotsafe.SaveFailed), program.session(ill, save_every=None) as run:
        train(program, run)
    assert program.of(ev.RunEnded)[0].outcome == "storage_failed"
    with Program().session(store) as run:
        assert run.attempt == 2


def test_a_session_can_be_entered_once() -> None:
    """A second start would be a second attempt with half-used state."""
    session = Program().session(MemoryStore())
    with pytest.raises(spotsafe.RunError, match="not entered"):
        list(session.range(3))
    with session, pytest.raises(spotsafe.RunError, match="once"):
        session.start()


# -- what a session leaves behind -----------------------------------------------------------------------------------


def traces() -> dict[str, object]:
    """What a session could forget to hand back."""
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "handlers": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)],
        "wakeup": wakeup_fd(),
        "optimizer hooks": len(_global_optimizer_post_hooks),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "arenas": sum(not one.closed for one in _maps),
    }


def leaked(before: dict[str, Any], after: dict[str, Any]) -> dict[str, object]:
    """What there is more than before. Less there may be: what other tests have left goes when it likes."""
    found: dict[str, object] = {"threads": Counter(after["threads"]) - Counter(before["threads"])}
    found |= {name: max(0, after[name] - before[name]) for name in ("descriptors", "arenas")}
    found |= {name: after[name] for name in before if name not in found and after[name] != before[name]}
    return {name: value for name, value in found.items() if value}


def wakeup_fd() -> int:
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found)
    return found


def both_end_cleanly(first: Program, second: Program) -> None:
    with (
        first.session(MemoryStore("memory://one")) as one,
        second.session(MemoryStore("memory://two")) as two,
    ):
        train(first, one)
        train(second, two)


def the_first_ends_first(first: Program, second: Program) -> None:
    one = first.session(MemoryStore("memory://one")).start()
    two = second.session(MemoryStore("memory://two")).start()
    train(first, one)
    one.close()
    train(second, two)
    two.close()


def an_error_ends_both(first: Program, second: Program) -> None:
    with (
        pytest.raises(Cut),
        first.session(MemoryStore("memory://one")) as one,
        second.session(MemoryStore("memory://two")) as two,
    ):
        train(first, one, 2)
        train(second, two, 2)
        raise Cut


def neither_starts(first: Program, second: Program) -> None:
    store, _, newer = run_of_two()
    del store.objects[newer.manifest]
    start_fails(store, spotsafe.StateMismatch, extra=torch.zeros(1))
    start_fails(store, spotsafe.RunInUse, resume="never")


@pytest.mark.parametrize("life", [both_end_cleanly, the_first_ends_first, an_error_ends_both, neither_starts])
def test_sessions_on_different_runs_leak_nothing(life: Callable[[Program, Program], None]) -> None:
    """Threads, handlers, hooks and descriptors are as before, and the two runs did not mix."""
    first, second = Program(), Program(seed=1)
    trained(MemoryStore(), until=1)  # what torch and the interpreter make once
    gc.collect()
    # Writers that other tests left to the collector end without being waited for. What a DCP writer has goes on.
    for thread in threading.enumerate():
        if thread.name == WRITER_THREAD:
            thread.join(PATIENCE_S)
    gc.disable()  # nothing may wait for the collector: an arena is as large as the whole state
    try:
        before = traces()
        life(first, second)
        assert leaked(before, traces()) == {}
    finally:
        gc.enable()


def test_two_runs_in_one_process_do_not_mix() -> None:
    """Each saves its own state at its own steps."""
    one, two = MemoryStore("memory://one"), MemoryStore("memory://two")
    first, second = Program(), Program(seed=1)
    with first.session(one, save_every=2) as run_one, second.session(two, save_every=3) as run_two:
        assert run_one.id != run_two.id
        for (step, batch), (other_step, other) in zip(
            run_one.steps(first.loader, until=6), run_two.steps(second.loader, until=6), strict=True
        ):
            first.train(step, batch)
            second.train(other_step, other)
            run_one.wait()
            run_two.wait()
    assert first.checkpoint_steps() == [2, 4, 6]
    assert second.checkpoint_steps() == [3, 6]
    for program, store in ((first, one), (second, two)):
        again = Program(seed=7)
        with again.session(store):
            assert again.weights() == program.weights()


def test_a_start_reads_no_more_than_it_must() -> None:
    """Of a long history only the newest manifest, so that a restore does not grow with the run."""
    store = MemoryStore()
    trained(store, until=8, save_every=1, keep=100)
    assert len(published(store)) == 8
    counting = CountingStore(store)
    with Program().session(counting, keep=100):
        read = {
            one.path
            for one in counting.operations
            if one.name == "read" and one.path.endswith("manifest.json")
        }
    assert len(read) == 1


@pytest.mark.parametrize("end", ["@60", "@latest", "@best", "@best:loss:min"])
def test_a_url_that_names_a_checkpoint(tmp_path: Path, end: str) -> None:
    """Nothing is begun in a folder that no command could name; the error says what was meant."""
    with pytest.raises(ValueError, match="spotsafe rollback"):
        spotsafe.session(f"{tmp_path}/run{end}")

    assert list(tmp_path.iterdir()) == []
    spotsafe.session(f"{tmp_path}/somebody@home")
    spotsafe.session(f"{tmp_path}/run@60/")  # the name of a folder, for whoever insists
