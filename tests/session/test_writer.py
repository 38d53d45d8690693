"""Which writer a session has, and that training does not see which."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import spotsafe
from spotsafe import events as ev, writing
from spotsafe.checkpoint.candidates import candidates, look
from spotsafe.policy.retention import Keep, Saved
from spotsafe.storage.local import LocalStore
from spotsafe.testing.clock import ManualClock
from spotsafe.writer.process import ProcessWriter, can_run
from spotsafe.writer.thread import WriterThread
from tests.session.rig import MANY_STARTS, Program
from tests.writer.processes import the_writer, until, writers

needs_process = pytest.mark.skipif(not can_run(), reason="this system cannot have a writer process")


class All(Keep):
    """A policy of a program's own."""

    def select(self, saved: Any) -> frozenset[str]:
        return frozenset(one.name for one in saved if isinstance(one, Saved))


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A runtime folder of its own; no process is left at the end."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
    yield
    assert not writers()


def writer_of(url: Any, **options: Any) -> tuple[type, list[str]]:
    """The kind of the writer, and what was warned of."""
    program = Program()
    with program.session(url, **options) as run:
        assert run._attempt is not None
        kind = type(run._attempt.saver.writer)
    return kind, [one.message for one in program.of(ev.Warned)]


@needs_process
@pytest.mark.parametrize("writer", ["auto", "process"])
def test_a_process_where_there_can_be_one(tmp_path: Path, writer: str) -> None:
    """For a path, and nobody has to be told."""
    assert writer_of(tmp_path / "run", writer=writer) == (ProcessWriter, [])


def test_a_thread_if_one_is_asked_for(tmp_path: Path) -> None:
    """No process is started."""
    assert writer_of(tmp_path / "run", writer="thread") == (WriterThread, [])


@needs_process
@pytest.mark.parametrize(
    ("options", "why"),
    [({"keep": All()}, "policy of the program's own"), ({"clock": ManualClock()}, "clock of its own")],
    ids=["keep", "clock"],
)
def test_what_cannot_be_sent_is_for_the_thread(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    """Told only to who asked for the process."""
    kind, told = writer_of(tmp_path / "run", save_every=None, writer="auto", **options)
    assert (kind, told) == (WriterThread, [])
    kind, told = writer_of(tmp_path / "other", save_every=None, writer="process", **options)
    assert kind is WriterThread
    assert [why in one for one in told] == [True]


@needs_process
def test_a_store_of_the_programs_own_is_for_the_thread(tmp_path: Path) -> None:
    """It is an object of this process, and so is what lies in its memory."""
    for url in (LocalStore(tmp_path / "run"), "memory://test-writer"):
        kind, told = writer_of(url, writer="process")
        assert kind is WriterThread
        assert "only this process" in told[0]


@needs_process
def test_a_thread_if_no_process_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Always told: it should have been one."""

    def none(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(writing, "ProcessWriter", none)
    kind, told = writer_of(tmp_path / "run", writer="auto")
    assert kind is WriterThread
    assert "Too many open files" in told[0]


def test_where_the_system_has_no_such_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.setattr(writing, "can_run", lambda: False)
    assert writer_of(tmp_path / "run", writer="auto") == (WriterThread, [])


@needs_process
def test_the_environment_decides_what_is_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the program says counts more; another word is refused before anything begins."""
    monkeypatch.setenv("SPOTSAFE_WRITER", "thread")
    assert writer_of(tmp_path / "run", writer="auto") == (WriterThread, [])
    assert writer_of(tmp_path / "other", writer="process") == (ProcessWriter, [])
    monkeypatch.setenv("SPOTSAFE_WRITER", "subprocess")
    with pytest.raises(
        ValueError, match="SPOTSAFE_WRITER= is one of 'auto', 'process', 'thread', got 'subprocess'"
    ):
        Program().session(tmp_path / "run", writer="auto")


def test_other_words_are_refused(tmp_path: Path) -> None:
    """With those that there are."""
    with pytest.raises(ValueError, match="'auto', 'process', 'thread'"):
        Program().session(tmp_path / "run", writer="subprocess")


@needs_process
def test_training_goes_on_when_the_writer_dies(tmp_path: Path) -> None:
    """The step that was lost is made up for by the next, and nothing counts as failed."""
    program = Program()
    with program.session(tmp_path / "run", writer="process") as run:
        for step, batch in run.steps(program.loader, until=8):
            program.train(step, batch)
            if step in {2, 4}:
                os.kill(the_writer(), signal.SIGKILL)
            run.wait()
    assert run.failures == ()
    assert [one.by for one in program.of(ev.WriterReplaced)] == ["process", "process"]
    assert not program.of(ev.SaveFailed)
    assert program.checkpoint_steps()[-1] == 8


class Deadly:
    """The writer process dies over some saves, each of them before it could begin with it."""

    def __init__(self, *saves: int) -> None:
        self._saves, self._count = saves, 0

    def emit(self, event: ev.Event) -> None:
        if isinstance(event, ev.SaveStarted):
            self._count += 1
            if self._count in self._saves:
                self._writer = the_writer()
                os.kill(self._writer, signal.SIGSTOP)
        elif isinstance(event, ev.SaveStaged) and self._count in self._saves:
            os.kill(self._writer, signal.SIGKILL)


@needs_process
@pytest.mark.parametrize("deaths", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("end", ["end", "left", "notice"])
def test_the_last_save_is_made_again_if_the_writer_dies_over_it(
    tmp_path: Path, end: str, deaths: int
) -> None:
    """There is no later safe point that would: the way out does."""
    program = Program()
    deadly = Deadly(*range(1, 1 + deaths))
    session = program.session(
        tmp_path / "run",
        writer="process",
        save_every=None,
        events=[program.sink, deadly],
        on_reclaim="return",
    )
    with session as run:
        for step, batch in run.steps(program.loader, until=3):
            program.train(step, batch)
            if step == 1 and end == "left":
                break
            if step == 1 and end == "notice":
                signal.raise_signal(signal.SIGTERM)
    assert program.checkpoint_steps() == [3 if end == "end" else 2]
    assert len(program.of(ev.WriterReplaced)) == deaths
    assert run.failures == ()


@needs_process
def test_what_was_asked_for_is_kept_if_the_writer_dies_over_it(tmp_path: Path) -> None:
    """`wait` returns when it is published, with its metrics."""
    program = Program()
    folder = tmp_path / "run"
    session = program.session(
        folder,
        writer="process",
        save_every=None,
        events=[program.sink, Deadly(1)],
        keep=spotsafe.best("loss", mode="min"),
    )
    with session as run:
        for step, batch in run.steps(program.loader, until=2):
            program.train(step, batch)
        run.save(metrics={"loss": 0.5})
        run.wait()
        assert program.checkpoint_steps() == [2]
        [manifest] = [one.manifest for one in candidates(LocalStore(folder), look(LocalStore(folder)))]
        assert manifest is not None
        assert (dict(manifest.metrics), manifest.reason) == ({"loss": 0.5}, "asked")


@needs_process
def test_an_exact_resume_from_what_a_process_wrote(tmp_path: Path) -> None:
    """The same bits as without any interruption."""

    def train(program: Program, folder: str, until: int) -> list[float]:
        with program.session(tmp_path / folder, writer="process") as run:
            for step, batch in run.steps(program.loader, until=until):
                program.train(step, batch)
        return program.weights()

    whole = train(Program(), "whole", 6)
    train(Program(), "cut", 3)
    assert train(Program(), "cut", 6) == whole


def _memory(pid: int) -> int:
    """Proportional memory of a process in bytes, that which is shared included; libraries are not.

    Their share grows whenever another program that uses them ends.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(size.split()[0]) * 1024 for name, size in (line.split(":") for line in lines)}
    return sizes["Pss_Anon"] + sizes["Pss_Shmem"]


@needs_process
@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2])
def test_memory_and_descriptors_stay_as_they_are(tmp_path: Path, slots: int) -> None:
    """Two hundred saves in a row, one in ten of which fails: neither process grows, whatever is in flight at once."""
    weight = torch.zeros(64 << 18)  # 64 MiB
    folder = tmp_path / "run"
    measured: list[tuple[int, int, int]] = []
    together = 0
    with spotsafe.session(
        folder,
        writer="process",
        save_every=1,
        keep=2,
        watch=None,
        restart_limits=MANY_STARTS,
        staging_memory=slots * (80 << 20),
        state={"weight": weight},
    ) as run:
        attempt = run._attempt
        assert attempt is not None
        for step in run.range(220):
            settled = step % 10 in {5, 6} or step in {21, 219}
            if slots == 1 or settled:
                attempt.points.drain()
            else:
                run.save()  # waits for a slot
            together += len(attempt.saver._slots.saves) == 2
            checkpoints = folder / "checkpoints"
            if step % 10 == 5:  # nobody can write where a file is in the way
                checkpoints.rename(folder / "away")
                checkpoints.write_text("")
            elif step % 10 == 6:
                checkpoints.unlink()
                (folder / "away").rename(checkpoints)
            weight.fill_(step + 1)
            if step in {21, 219}:
                gc.collect()
                pid = the_writer()
                measured.append((_memory(os.getpid()), _memory(pid), _held(pid)))
                # A heartbeat may be being written right now; what stays open is what counts.
                until(lambda: _held(the_writer()) <= measured[0][2], what="no descriptor more is open")
    before, after = measured
    assert len(run.failures) >= 20
    assert slots == 1 or together > 100, together
    assert len(list((folder / "checkpoints").iterdir())) == 2
    for was, now in zip(before[:2], after[:2], strict=True):
        assert now < 1.02 * was + (2 << 20), (before, after)


def _held(writer: int) -> int:
    """Descriptors that are open in both processes."""
    return sum(len(os.listdir(f"/proc/{one}/fd")) for one in (writer, os.getpid()))


CLOSING = """
import os, sys
from pathlib import Path
import spotsafe
from tests.session.rig import Program

url, data = Path(sys.argv[1]), Path(sys.argv[2])
program = Program()
with program.session(url, writer="process") as run:
    for step, batch in run.steps(program.loader, until=8):
        program.train(step, batch)
        if step == 1:
            run.wait()  # all there is at a descriptor is there by now
        if step == 3:
            if sys.argv[3] == "idle":
                run.wait()
            os.closerange(3, 200)
            held = [os.open(data, os.O_RDWR) for _ in range(40)]
assert run.step == 8
"""


@needs_process
@pytest.mark.slow
@pytest.mark.parametrize("when", ["idle", "busy"])
def test_a_program_that_closes_all_descriptors_goes_on(tmp_path: Path, when: str) -> None:
    """And what it opens at their numbers is neither written to nor taken for a save."""
    data = tmp_path / "data"
    data.write_bytes(b"precious " * 10_000)
    command = [sys.executable, "-c", CLOSING, str(tmp_path / "run"), str(data), when]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "from now on a thread writes" in done.stderr
    assert data.read_bytes() == b"precious " * 10_000
    with Program().session(tmp_path / "run", resume="must") as run:
        assert run.step == 8
