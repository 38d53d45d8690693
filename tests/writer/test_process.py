"""The writer as a process: it does what the thread does, is nobody's burden, and can be replaced."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spotsafe.checkpoint.catalog import candidates, look
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.verify import verify
from spotsafe.clock import SystemClock
from spotsafe.errors import StorageError, WriterDied
from spotsafe.events import CheckpointPublished, FileWritten, IndexWritten, SaveFailed, WriterReplaced
from spotsafe.identity import Identity
from spotsafe.storage.local import LocalStore
from spotsafe.storage.open import S3_CLIENT, Reopening, open_store, reopening
from spotsafe.testing.saves import StagedSave, stage, steps_of
from spotsafe.testing.sinks import RecordingSink
from spotsafe.writer import process as process_module
from spotsafe.writer.arena import Arena
from spotsafe.writer.job import SaveJob
from spotsafe.writer.process import DEATHS, ProcessWriter, can_run
from spotsafe.writer.thread import NAME
from tests.interrupting import interrupt
from tests.servers import BUCKET, Server
from tests.writer.processes import lives, runtime_files, stopped, the_writer, until, writers

pytestmark = pytest.mark.skipif(not can_run(), reason="this system cannot have a writer process")

PATIENCE_S = 60.0


def save(step: int, *, files: int = 1, frozen: bool = False) -> StagedSave:
    """A small save."""
    arrays = {name: np.full(3, step, dtype=np.float32) for name in "abcd"[:files]}
    idle = [{"idle": np.arange(4, dtype=np.float32)}] if frozen else []
    return stage(CheckpointName(1, step, step, "00000000"), arrays, files=files, frozen=idle)


def published(folder: Path) -> list[int]:
    """The steps of what is published, each of them whole."""
    store = LocalStore(folder)
    found = [one for one in candidates(store, look(store)) if one.manifest is not None]
    assert all(verify(store, one.name) == [] for one in found)
    return steps_of(found)


Make = Callable[..., ProcessWriter]


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


@pytest.fixture
def made(tmp_path: Path, runtime: Path, sink: RecordingSink) -> Iterator[Make]:
    """Makes writers that are closed at the end, so that nothing of them is left."""
    made: list[ProcessWriter] = []

    def make(folder: Path | None = None) -> ProcessWriter:
        run = folder or tmp_path / "run"
        writer = ProcessWriter(
            LocalStore(run),
            Reopening(url=str(run)),
            emit=sink.emit,
            clock=SystemClock(),
            identity=Identity.of_this_process(),
        )
        made.append(writer)
        return writer

    yield make
    for writer in made:
        assert writer.drain(PATIENCE_S)
        writer.close()
    assert not writers()
    assert not [thread for thread in threading.enumerate() if thread.name == NAME]
    assert [name for name in runtime_files(runtime) if not name.endswith(".log")] == []


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def write(writer: ProcessWriter, one: StagedSave) -> None:
    """Give it a save and wait."""
    writer.submit(one.job, one.arena, one.frozen)
    assert writer.drain(PATIENCE_S)


# -- as the thread does ---


def test_saves_in_the_background(made: Make, run: Path, sink: RecordingSink, runtime: Path) -> None:
    """A save is written by the process; its result comes once, its events before that, in order."""
    writer = made()
    write(writer, save(1, files=2, frozen=True))
    assert writer.idle
    [result] = writer.poll()
    assert (result.published, result.healthy, result.error) == (True, True, None)
    assert [one.checkpoint for one in result.frozen] == [None]
    assert writer.poll() == []
    assert published(run) == [1]
    names = [type(event) for event in sink.events]
    assert names == [*[FileWritten] * 3, IndexWritten, CheckpointPublished]
    assert not writer.undecided


def test_save_after_save(made: Make, run: Path) -> None:
    """What is not sent again, since it is the same, is still there; what is new is taken."""
    writer = made()
    for step in range(1, 5):
        write(writer, save(step, files=1 + step % 2, frozen=step == 2))
        [result] = writer.poll()
        assert result.published, result
    assert published(run) == [4, 3]


def test_submit_does_not_wait(made: Make, run: Path) -> None:
    """While the process stands still the caller goes on; one save waits behind another, a third is a mistake."""
    writer = made()
    write(writer, save(1))
    one, two, three = save(2), save(3), save(4)
    with stopped(the_writer()):
        began = time.thread_time()
        writer.submit(one.job, one.arena)
        assert time.thread_time() - began < 1.0
        assert not writer.idle
        assert not writer.drain(0.05)
        writer.submit(two.job, two.arena)
        assert not writer.drain(0.0, left=1)
        with pytest.raises(RuntimeError, match="2 others are in flight"):
            writer.submit(three.job, three.arena)
    assert writer.drain(left=1)
    assert writer.drain()
    assert [result.name.step for result in writer.poll()] == [1, 2, 3]


def test_a_save_given_at_once(made: Make, run: Path) -> None:
    """A save does not wait for the process to be ready: it is there when that is."""
    writer = made()
    one = save(1)
    writer.submit(one.job, one.arena)
    assert not writer.idle
    assert writer.drain(PATIENCE_S)
    assert published(run) == [1]


def test_nothing_starts_after_close(made: Make, run: Path) -> None:
    """A closed writer takes no save, and closing again is no error."""
    writer = made()
    write(writer, save(1))
    writer.close()
    writer.close()
    with pytest.raises(RuntimeError, match="closed"):
        writer.submit(save(2).job, save(2).arena)
    assert [result.name.step for result in writer.poll()] == [1]


def test_close_does_not_wait_for_a_save(made: Make, run: Path) -> None:
    """A writer that is closed over a save finishes it; its result comes all the same."""
    writer = made()
    write(writer, save(1))
    one, pid = save(2), the_writer()
    with stopped(pid):
        writer.submit(one.job, one.arena)
        writer.close()
        assert not writer.idle
    assert writer.drain(PATIENCE_S)
    assert [result.name.step for result in writer.poll()] == [1, 2]
    until(lambda: not lives(pid), what="ended")
    until(lambda: not [one for one in threading.enumerate() if one.name == NAME], what="nobody tends it")


def test_close_does_not_wait_for_one_that_stands_still(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has nothing to do any more: it is ended."""
    monkeypatch.setattr(process_module, "LEAVE_S", 0.2)
    writer = made()
    write(writer, save(1))
    pid = the_writer()
    with stopped(pid):
        closing = threading.Thread(target=writer.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S / 4)
        assert not closing.is_alive()
    assert not lives(pid)


def test_errors_keep_their_class(made: Make, run: Path, sink: RecordingSink) -> None:
    """What fails there is told here as what it is; the next save works."""
    run.mkdir()
    (run / "checkpoints").write_text("not a folder")
    writer = made()
    write(writer, save(1))
    (run / "checkpoints").unlink()
    write(writer, save(2))
    failed, good = writer.poll()
    assert isinstance(failed.error, StorageError)
    assert (failed.published, good.published) == (False, True)
    assert [event.step for event in sink.of(SaveFailed)] == [1]


def test_what_cannot_be_sent_is_a_failed_save(made: Make, sink: RecordingSink) -> None:
    """State that JSON has no form for fails its save, and no other."""
    from dataclasses import replace

    writer = made()
    one = save(1)
    writer.submit(replace(one.job, session={"a": float("nan")}), one.arena)
    assert writer.idle
    write(writer, save(2))
    failed, good = writer.poll()
    assert isinstance(failed.error, ValueError)
    assert sink.of(SaveFailed)
    assert good.published


def test_what_has_no_room_here_is_a_failed_save(
    made: Make, run: Path, sink: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has died if this process has no descriptor left: the failure counts, and the writer stays."""
    writer = made()
    write(writer, save(1))
    pid = the_writer()

    def full(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as here:
        here.setattr(process_module.channel, "send", full)
        writer.submit(save(2).job, save(2).arena)
        assert writer.idle
    write(writer, save(3))
    _, failed, good = writer.poll()
    assert (type(failed.error), failed.error and failed.error.args[0]) == (OSError, 24)
    assert [event.step for event in sink.of(SaveFailed)] == [2]
    assert good.published
    assert the_writer() == pid


def test_state_of_every_kind_arrives(made: Make, run: Path) -> None:
    """Trees that never change are sent once, others as they are; numbers stay what they are."""
    from dataclasses import replace

    from spotsafe.checkpoint.catalog import read_index
    from spotsafe.checkpoint.index import KeptTree

    writer, kept = made(), KeptTree(a=[1, "x"], b={"c": "d"})
    store = LocalStore(run)
    for step in (1, 2):
        one = save(step)
        state = {"kept": kept, "plain": {"n": step, "big": 1 << 80, "f": 0.1, "none": None}}
        job = replace(one.job, state=state, session={"step": step})
        writer.submit(job, one.arena)
        assert writer.drain(PATIENCE_S)
        newest = next(iter(candidates(store, look(store))))
        assert newest.manifest is not None
        index = read_index(store, newest, newest.manifest.parts[0])
        assert index.state == state
        assert index.session == {"step": step}
        assert type(index.state["plain"]["f"]) is float


@pytest.mark.slow
def test_into_a_bucket(
    seaweedfs: Server, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that may only be read is sent as it is, with the credentials of the environment."""
    for name, value in seaweedfs.env.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/{tmp_path.name}"
    store = open_store(url)
    arrays = {"large": np.arange(5 << 20, dtype=np.float32), "small": np.ones(3)}
    for step, client in enumerate(("obstore", "boto3", "s3fs"), start=1):
        monkeypatch.setenv(S3_CLIENT, client)
        again = reopening(url)
        assert again is not None
        sink = RecordingSink()
        writer = ProcessWriter(
            store, again, emit=sink.emit, clock=SystemClock(), identity=Identity.of_this_process()
        )
        one = stage(CheckpointName(1, step, step, "00000000"), arrays, files=2)
        write(writer, one)
        writer.close()
        [result] = writer.poll()
        assert result.published, (client, result, sink.events)
        assert verify(store, one.job.name) == []


# -- while it is copied ---


def test_a_file_is_written_as_soon_as_it_is_there(made: Make, run: Path, sink: RecordingSink) -> None:
    """Filled file by file, in memory that both see; the last one waits for the word that all went well."""
    writer, whole = made(), save(7, files=3)
    arena = Arena(len(whole.arena), shared=True)
    staging = writer.staging()
    writer.submit(whole.job, arena.view, staging=staging)
    for number, file in enumerate(whole.job.files):
        end = file.arena_offset + file.size
        assert len(sink.of(FileWritten)) == number
        arena.view[file.arena_offset : end] = whole.arena[file.arena_offset : end]
        if number < 2:
            staging.reached(end)
            sink.wait_for(FileWritten, count=number + 1)
    assert published(run) == []
    staging.finish()
    assert writer.drain(PATIENCE_S)
    assert published(run) == [7]
    arena.close()


def test_what_is_never_copied_is_never_published(made: Make, run: Path, sink: RecordingSink) -> None:
    """A copy that was given up leaves no checkpoint; its files go with the next save."""
    writer, one = made(), save(1, files=2)
    arena = Arena(len(one.arena), shared=True)
    staging = writer.staging()
    arena.view[: len(one.arena)] = one.arena
    writer.submit(one.job, arena.view, staging=staging)
    staging.reached(one.job.files[0].size)
    sink.wait_for(FileWritten)
    staging.fail()
    assert writer.drain(PATIENCE_S)
    [result] = writer.poll()
    assert (result.published, result.abandoned, result.error) == (False, True, None)
    write(writer, save(2))
    assert published(run) == [2]
    assert not (run / one.job.name.folder).exists()
    arena.close()


def test_two_copies_at_once_have_words_of_their_own(made: Make, run: Path) -> None:
    """A process that has not come to the first save yet does not take the progress of the second for it."""
    writer = made()
    write(writer, save(1))
    saves = [save(2, files=2), save(3, files=2)]
    arenas = [Arena(len(one.arena), shared=True) for one in saves]
    with stopped(the_writer()):
        for one, arena in zip(saves, arenas, strict=True):
            staging = writer.staging()
            writer.submit(one.job, arena.view, staging=staging)
            arena.view[: len(one.arena)] = one.arena
            staging.finish()
    assert writer.drain(PATIENCE_S)
    assert [result.published for result in writer.poll()] == [True] * 3
    for again in (4, 5):  # in memory that the process has mapped already
        one = save(again, files=2)
        arenas[again % 2].view[: len(one.arena)] = one.arena
        writer.submit(one.job, arenas[again % 2].view)
    assert writer.drain(PATIENCE_S)
    assert published(run) == [5, 4]
    for arena in arenas:
        arena.close()


# -- what it is ---


def test_a_message_that_was_made_ahead(made: Make, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent if nothing has been since it was made, and then says the same; else it is made anew."""
    writer, make, made_for = made(), process_module._message, list[int]()

    def message(sender: Any, job: SaveJob, *rest: Any) -> Any:
        made_for.append(job.name.step)
        return make(sender, job, *rest)

    monkeypatch.setattr(process_module, "_message", message)
    one, two, three = save(1), save(2, frozen=True), save(3)
    arenas = []
    for each in (one, two, three):
        arena = Arena(len(each.arena), shared=True)
        arena.view[: len(each.arena)] = each.arena
        arenas.append(arena)
    first, second, third = arenas
    writer.prepare(one.job, first.view)
    write_from(writer, one, first)
    writer.prepare(three.job, third.view)
    write_from(writer, two, second)
    write_from(writer, three, third)
    assert [result.published for result in writer.poll()] == [True] * 3
    writer.prepare(save(4).job, third.view)  # and then that save was not to be
    four = save(5)
    third.view[: len(four.arena)] = four.arena
    write_from(writer, four, third)
    assert published(run) == [5, 3]
    assert made_for == [1, 3, 2, 3, 4, 5]
    for arena in arenas:
        arena.close()


def write_from(writer: ProcessWriter, one: StagedSave, arena: Arena) -> None:
    writer.submit(one.job, arena.view, one.frozen)
    assert writer.drain(PATIENCE_S)


def test_it_is_nobodys_burden(made: Make, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of its own, a session of its own, none of our streams, no device, no torch."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    writer = made()
    write(writer, save(1))
    pid = the_writer()
    assert os.getsid(pid) == pid
    assert os.getpgid(pid) == pid
    streams = [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)]
    assert streams[0] == os.devnull
    assert (
        streams[1] == streams[2] == str(runtime / f"spotsafe-{os.getuid()}" / streams[1].rpartition("/")[2])
    )
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=" in environment
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


def test_it_imports_no_torch() -> None:
    """Not even by what it imports."""
    code = "import sys, spotsafe.helper; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_secrets_are_not_for_everybody(tmp_path: Path, runtime: Path) -> None:
    """What a url or settings hold stands neither on the command line, nor in the environment, nor in a file."""
    secret = "hunter2-0123456789"
    writer = ProcessWriter(
        LocalStore(tmp_path),
        Reopening(url=f"s3://user:{secret}@bucket/run", settings={"s3": {"secret": secret}}),
        emit=lambda _: None,
        clock=SystemClock(),
        identity=Identity.of_this_process(),
    )
    pid = the_writer()
    for name in ("cmdline", "environ"):
        assert secret.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    for path in (runtime / f"spotsafe-{os.getuid()}").iterdir():
        assert secret not in path.name
        assert secret.encode() not in path.read_bytes()
    writer.close()


def test_modules_of_the_working_folder_are_not_imported(
    made: Make, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may have a module named like one of Python's, or of ours."""
    for name in ("queue", "msgspec", "numpy", "spotsafe"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the module of the working folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write(made(), save(1))
    assert published(run) == [1]


def test_a_path_that_python_passes_over(
    made: Make, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a program has put on the path is no reason to have no writer, nor is a working folder that is gone."""
    for one in (tmp_path, os.fsencode(tmp_path), None):
        monkeypatch.setattr(sys, "path", [*sys.path, one])
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    write(made(), save(1))
    assert published(run) == [1]
    assert writers()
    os.chdir(tmp_path)


def test_a_frozen_program_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its executable is the program: started as a writer it would train, and start writers of its own."""
    assert can_run()
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not can_run()
    monkeypatch.delattr(sys, "frozen")
    monkeypatch.setattr(process_module.boot, "__file__", "/somewhere/app.pyz/spotsafe/writer/boot.py")
    assert not can_run()


def test_signals_for_everybody_do_not_end_it(made: Make, run: Path) -> None:
    """A launcher that signals each process does not take the writer away before the last save."""
    writer = made()
    write(writer, save(1))
    pid = the_writer()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    write(writer, save(2))
    assert the_writer() == pid
    assert published(run) == [2, 1]


def test_a_forked_child_holds_nothing_of_it(made: Make, run: Path) -> None:
    """Neither the connection, nor shared memory: a worker that lives on keeps no writer waiting and no page."""
    writer, arena = made(), Arena(1 << 20, shared=True)
    write(writer, save(1))
    pid = the_writer()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        held = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name.isdigit()
                and os.path.lexists(f"/proc/self/fd/{name}")]  # fmt: skip
        ours = [
            name
            for name in held
            if "memfd:spotsafe" in name or ("/spotsafe-" in name and name.endswith(".lock"))
        ]
        try:
            writer._link.ours.fileno()
            closed = writer._link.ours.fileno() == -1
        except OSError:
            closed = True
        os.read(read_end, 1)
        os._exit(0 if not ours and closed else 1)
    os.close(read_end)
    arena.close()
    writer.close()
    assert not lives(pid)
    os.write(write_end, b"x")
    os.close(write_end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- when it dies ---


def test_it_is_replaced_when_it_dies(made: Make, run: Path, sink: RecordingSink) -> None:
    """The save that it was writing is told as lost; another process writes the next one, and leaves no garbage."""
    writer = made()
    write(writer, save(1))
    pid, one = the_writer(), save(2)
    with stopped(pid):
        writer.submit(one.job, one.arena)
        os.kill(pid, signal.SIGKILL)
        assert writer.drain(PATIENCE_S)
    _, lost = writer.poll()
    assert isinstance(lost.error, WriterDied)
    [event] = sink.of(WriterReplaced)
    assert (event.lost, event.by) == ((str(one.job.name),), "process")
    assert "signal 9" in event.reason
    assert writer.undecided
    write(writer, save(3))
    assert published(run) == [3, 1]
    assert the_writer() != pid
    assert not writer.undecided


def test_both_saves_are_lost_when_it_dies(made: Make, run: Path, sink: RecordingSink) -> None:
    """The one that it was writing, and the one behind it; neither leaves garbage, or is published by halves."""
    writer = made()
    write(writer, save(1))
    pid, one, two = the_writer(), save(2), save(3)
    with stopped(pid):
        writer.submit(one.job, one.arena)
        writer.submit(two.job, two.arena)
        os.kill(pid, signal.SIGKILL)
        assert writer.drain(PATIENCE_S)
    results = writer.poll()[1:]
    assert [(one.name.step, type(one.error)) for one in results] == [(2, WriterDied), (3, WriterDied)]
    [event] = sink.of(WriterReplaced)
    assert event.lost == (str(one.job.name), str(two.job.name))
    write(writer, save(4))
    assert published(run) == [4, 1]
    assert not writer.undecided


def test_a_save_that_finds_it_dead_does_not_speak_for_the_one_before(
    made: Make, run: Path, sink: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows what became of that one, and whoever takes the place of the process has to find out."""
    writer, bury, seen = made(), ProcessWriter._bury, threading.Event()
    write(writer, save(1))

    def bury_later(self: ProcessWriter, link: Any) -> str:
        assert seen.wait(PATIENCE_S)
        return bury(self, link)

    monkeypatch.setattr(ProcessWriter, "_bury", bury_later)
    pid, one, two = the_writer(), save(2), save(3)
    with stopped(pid):
        writer.submit(one.job, one.arena)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not lives(pid), what="the end of the process")
        writer.submit(two.job, two.arena)
        assert (writer.has(one.job.name), writer.has(two.job.name)) == (True, False)
        seen.set()
        assert writer.drain(PATIENCE_S)
    assert {result.name.step for result in writer.poll() if isinstance(result.error, WriterDied)} == {2, 3}
    [event] = sink.of(WriterReplaced)
    assert event.lost == (str(one.job.name),)
    assert writer.undecided
    write(writer, save(4))
    assert published(run) == [4, 1]
    assert not writer.undecided


@pytest.mark.slow
def test_ctrl_c_anywhere_in_submit(made: Make, run: Path) -> None:
    """Nobody knows then what the process has got: it is replaced, and no save is in flight for ever."""
    writer, number, later = made(), itertools.count(1), False
    for at in range(0, 120, 7):
        one = save(next(number))
        interrupted = interrupt(
            partial(writer.submit, one.job, one.arena), at=at, inside=("submit", "add", "_give")
        )
        assert writer.drain(PATIENCE_S)
        steps = []
        while (
            not steps or steps[-1] == one.job.name.step
        ):  # the first may still go to the old one, and be lost
            write(writer, save(next(number)))
            steps += [result.name.step for result in writer.poll() if result.published]
        assert published(run)[: len(steps)] == steps[::-1]
        later = later or not interrupted
    assert later


def test_it_is_replaced_also_when_it_has_nothing_to_do(made: Make, run: Path, sink: RecordingSink) -> None:
    """Nothing is lost then."""
    writer = made()
    write(writer, save(1))
    os.kill(the_writer(), signal.SIGKILL)
    [event] = sink.wait_for(WriterReplaced)
    assert event.lost == ()
    write(writer, save(2))
    assert published(run) == [2, 1]


def test_a_thread_in_the_end(made: Make, run: Path, sink: RecordingSink) -> None:
    """What dies again and again is given up, and saving goes on."""
    writer = made()
    for number in range(DEATHS):
        os.kill(the_writer(), signal.SIGKILL)
        sink.wait_for(WriterReplaced, count=number + 1)
    assert [event.by for event in sink.of(WriterReplaced)] == ["process", "process", "thread"]
    until(lambda: not writers(), what="no process")
    write(writer, save(1))
    [result] = writer.poll()
    assert result.published
    assert published(run) == [1]
    arena, one, staging = Arena(1 << 20, shared=True), save(2), writer.staging()
    writer.submit(one.job, arena.view, staging=staging)
    arena.view[: len(one.arena)] = one.arena
    staging.finish()
    assert writer.drain(PATIENCE_S)
    assert published(run) == [2, 1]
    arena.close()


def test_one_that_cannot_start_says_why(
    made: Make, run: Path, sink: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last words are in the event, its log stays, and a thread writes."""
    monkeypatch.setattr(process_module, "MODULE", "spotsafe.no_such_module")
    writer = made()
    events = sink.wait_for(WriterReplaced, count=DEATHS)
    assert "no_such_module" in events[-1].reason
    assert "exit code 1" in events[-1].reason
    log = Path(events[-1].reason.rpartition("all of it in ")[2].rstrip(")"))
    assert "Traceback" in log.read_text()
    write(writer, save(1))
    assert published(run) == [1]


# -- what it costs ---


def test_many_saves_leave_nothing(made: Make, run: Path, runtime: Path) -> None:
    """Descriptors, maps and shared memory of both processes stay as they were."""

    def held(pid: int) -> tuple[int, int]:
        maps = Path(f"/proc/{pid}/maps").read_text().count("memfd:spotsafe")
        return len(os.listdir(f"/proc/{pid}/fd")), maps

    writer, arena = made(), Arena(1 << 16, shared=True)

    def save_many(steps: range) -> None:
        for step in steps:
            one = save(step, files=2, frozen=step % 5 == 0)
            arena.view[: len(one.arena)] = one.arena
            writer.submit(one.job, arena.view, one.frozen)
            assert writer.drain(PATIENCE_S)
            assert [result.published for result in writer.poll()] == [True]

    save_many(range(1, 10))
    gc.collect()
    before = held(os.getpid()), held(the_writer())
    save_many(range(11, 40))
    gc.collect()
    assert (held(os.getpid()), held(the_writer())) == before
    arena.close()


def test_closing_early_costs_little(made: Make) -> None:
    """A writer that was never used does not have to get ready first."""
    writer = made()
    writer.close()
    assert not writers()
