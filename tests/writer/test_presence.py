"""Who writes on this host is known to whoever starts here, whatever ended the trainer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from spotsafe.clock import SystemClock
from spotsafe.events import WriterAwaited
from spotsafe.identity import Identity
from spotsafe.testing.sinks import RecordingSink
from spotsafe.writer.presence import Presence, announce, await_writers, log_of, release, runtime_folder
from tests.writer.processes import runtime_files

PLACE = "file:///runs/one"


@pytest.fixture
def me() -> Identity:
    return Identity.of_this_process()


@pytest.fixture
def dead(me: Identity) -> Identity:
    """A trainer of this host that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return replace(me, pid=child.pid)


def waits(
    me: Identity, place: str = PLACE, *, limit_s: float = 0.0, sink: RecordingSink | None = None
) -> bool:
    """Whether a start finds a writer that is left over."""
    emit = (sink or RecordingSink()).emit
    return not await_writers(place, identity=me, clock=SystemClock(), limit_s=limit_s, emit=emit)


def lock(identity: Identity) -> Presence:
    return announce(PLACE, folder=runtime_folder(), identity=identity)


def test_a_writer_is_waited_for_as_long_as_it_lives(runtime: Path, me: Identity, dead: Identity) -> None:
    """The lock is what counts, and it goes with the last process that has it open."""
    assert not waits(me)
    held = lock(dead)
    copy = os.dup(held.fd)
    release(held)
    assert waits(me)
    assert not waits(me, "file:///runs/other")
    os.close(copy)
    assert not waits(me)
    assert runtime_files(runtime) == []


def test_what_a_killed_writer_leaves_goes(runtime: Path, me: Identity) -> None:
    """Its lock, and its log if nothing stands in it."""
    for number, words in enumerate(["", "Traceback"]):
        held = lock(me)
        Path(log_of(held.path)).write_text(words)
        release(held)
        assert not waits(me)
        assert len(runtime_files(runtime)) == number


def test_waiting_is_told_and_ends(runtime: Path, me: Identity, dead: Identity) -> None:
    """The start says for whom it waits, and goes on as soon as that one is gone."""
    held, sink, answers = lock(dead), RecordingSink(), list[bool]()
    waiting = threading.Thread(target=lambda: answers.append(waits(me, limit_s=60.0, sink=sink)))
    waiting.start()
    [event] = sink.wait_for(WriterAwaited)
    assert (event.waited_s < 60.0, event.limit_s) == (True, 60.0)
    assert not answers
    release(held)
    waiting.join(30.0)
    assert answers == [False]


def test_the_writer_of_a_living_trainer_is_not_waited_for(runtime: Path, me: Identity) -> None:
    """Whether its job may be joined is for others to say; nor can be judged who lives in another container."""
    for identity in (me, replace(me, pid=1 << 30, boot="another")):
        held = lock(identity)
        assert not waits(me)
        release(held)


def test_a_file_that_makes_no_sense_is_no_reason_to_wait(runtime: Path, me: Identity, dead: Identity) -> None:
    """It may be one that is being written."""
    for text in (b"", b"{", b"[]", b'{"trainer": null, "boot": 1}'):
        held = lock(dead)
        os.ftruncate(held.fd, 0)
        os.pwrite(held.fd, text, 0)
        assert not waits(me)
        release(held)


def test_where_there_are_no_locks_nobody_is_waited_for(
    runtime: Path, me: Identity, dead: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some shares have none: a file that a killed writer left there must not delay each start."""
    release(lock(dead))

    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    assert not waits(me)


def test_the_folder_is_for_this_user_alone(runtime: Path) -> None:
    """Made so, and refused if others can look into it, or if it leads elsewhere."""
    folder = Path(runtime_folder())
    assert folder.parent == runtime
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="alone"):
        runtime_folder()
    folder.rmdir()
    folder.symlink_to(runtime)
    with pytest.raises(PermissionError, match="alone"):
        runtime_folder()


def test_without_a_runtime_folder_nobody_waits(
    me: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in the folder for temporary files if the system names none."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "not there"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert runtime_folder().startswith(f"{tmp_path}/")
    Path(runtime_folder()).rmdir()
    Path(f"{tmp_path}/spotsafe-{os.getuid()}").write_text("in the way")
    with pytest.raises(OSError, match="alone"):
        runtime_folder()
    assert not waits(me)


def test_a_forked_child_has_no_lock(runtime: Path, me: Identity, dead: Identity) -> None:
    """A worker that is forked between the lock and the writer's start holds nothing."""
    held = lock(dead)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        theirs.send(b"forked")
        theirs.recv(1)
        os._exit(0)
    assert ours.recv(6) == b"forked"
    release(held)
    assert not waits(me)
    ours.send(b"x")
    os.waitpid(child, 0)
    ours.close()
    theirs.close()
