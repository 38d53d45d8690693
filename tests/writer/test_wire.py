"""What is said between trainer and writer arrives as it was."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from spotsafe import errors
from spotsafe.checkpoint.branch import Rollback
from spotsafe.checkpoint.index import KeptTree
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.errors import DamagedCheckpoint, SaveFailed, SpotsafeError, StorageFull, StorageNotFound
from spotsafe.events import Event, Warned
from spotsafe.policy.retention import Keep, Saved, best, every, latest
from spotsafe.testing.saves import stage
from spotsafe.testing.sinks import sample_events
from spotsafe.writer import channel, wire
from spotsafe.writer.error_wire import error_of, sent_error
from spotsafe.writer.job import SaveJob, SaveResult

NAME = CheckpointName(1, 2, 3, "00000000")
COPY = wire.Copy(place=0, serial=1)
ARENA = wire.Memory(number=7, size=4096)


def job(**changes: object) -> SaveJob:
    arrays = {"w": np.ones(3, dtype=np.float32), "b": np.ones((2, 2))}
    one = stage(NAME, arrays, files=2, frozen=[{"f": np.ones(2)}], metrics={"loss": float("inf")}).job
    given = {
        "state": {"model": KeptTree(a=["b"]), "extra": {"x": 1}},
        "session": {"step": 2},
        "keep": latest(2) | best("loss", mode="min", n=3) | every(hours=0.5, keep=2),
        "resumed_from": "r",
        "passed_over": frozenset({"p"}),
        "nonfinite_before": frozenset({"n"}),
        "rollbacks": (Rollback(to=str(NAME), attempt=1),),
        **changes,
    }
    return replace(one, **given)


def carried(
    sender: wire.Sender, receiver: wire.Receiver, one: SaveJob
) -> tuple[wire.Sender, SaveJob, wire.Job]:
    message, after = sender.job(one, copy=COPY, arena=ARENA, lent=None, there={ARENA.number})
    again = wire.for_writer(wire.encode(message))
    assert isinstance(again, wire.Job)
    return after, receiver.job(again), again


def test_a_save_arrives_as_it_was() -> None:
    """All of it, the first time and when most of it is as before."""
    sender, receiver, one = wire.Sender(), wire.Receiver(), job()
    sender, first, _ = carried(sender, receiver, one)
    sender, second, sent = carried(sender, receiver, replace(one, created=2.0))
    assert first == one
    assert second == replace(one, created=2.0)
    assert (sent.tensors, sent.health, sent.session.data, sent.new) == (None, None, None, ())
    assert second.tensors[0] is first.tensors[0]
    assert isinstance(second.state["model"], KeptTree)
    assert second.state["model"] is first.state["model"]
    _, third, _ = carried(sender, receiver, job(state={"model": {"a": 1}}, session=None))
    assert third == job(state={"model": {"a": 1}}, session=None)


def test_a_save_that_was_not_sent_changes_nothing() -> None:
    """What the writer does not have is sent with the next one; one that is missing is found out."""
    sender, receiver, one = wire.Sender(), wire.Receiver(), job()
    sender.job(one, copy=COPY, arena=ARENA, lent=None, there={ARENA.number})
    after, taken, _ = carried(sender, receiver, one)
    assert taken == one
    _, lost = after.job(one, copy=COPY, arena=ARENA, lent=None, there={ARENA.number})
    with pytest.raises(ValueError, match="in place of"):
        carried(lost, receiver, one)


def test_a_policy_of_somebody_elses_cannot_be_sent() -> None:
    """Its code is not there."""

    class Mine(Keep):
        """Keeps all."""

        def select(self, saved: object) -> frozenset[str]:
            return frozenset(one.name for one in saved if isinstance(one, Saved))  # type: ignore[attr-defined] # a list

    for keep in (Mine(), latest(1) | Mine()):
        assert wire.policies_of(keep) is None
        with pytest.raises(TypeError, match="writer="):
            wire.Sender().job(job(keep=keep), copy=None, arena=ARENA, lent=None, there={ARENA.number})


@pytest.mark.parametrize("event", sample_events(), ids=lambda event: type(event).__name__)
def test_events_arrive_as_they_were(event: Event) -> None:
    """Every one there is."""
    message = wire.for_trainer(wire.encode(wire.said(event)))
    assert isinstance(message, wire.Said)
    assert wire.event_of(message) == event


def test_an_event_with_the_name_of_any_file_arrives() -> None:
    """A name on disk may hold bytes that are no text: they are spelled out."""
    message = wire.for_trainer(wire.encode(wire.said(Warned(message="stray file x\udcff"))))
    assert isinstance(message, wire.Said)
    assert wire.event_of(message) == Warned(message="stray file x\\udcff")


def test_results_arrive_as_they_were() -> None:
    """With what a later save goes by."""
    result = SaveResult(
        name=NAME, published=False, healthy=True, total_bytes=3, write_s=0.5, superseded_by=2, abandoned=True
    )
    message = wire.for_trainer(wire.encode(wire.finished(result, undecided=True)))
    assert isinstance(message, wire.Finished)
    assert message.undecided
    assert wire.result_of(message) == result
    assert {one.name for one in fields(result)} | {"undecided"} == set(wire.Finished.__struct_fields__)


def ours(kind: type[SpotsafeError] = SpotsafeError) -> Iterator[type[SpotsafeError]]:
    yield kind
    for one in kind.__subclasses__():
        if one.__module__ == errors.__name__:
            yield from ours(one)


@pytest.mark.parametrize(
    "kind", sorted(set(ours()), key=lambda one: one.__name__), ids=lambda one: one.__name__
)
def test_our_errors_keep_their_class(kind: type[SpotsafeError]) -> None:
    """And their words."""
    error = kind(checkpoint="c", file="f", reason="r") if kind is DamagedCheckpoint else kind("what and why")
    again = error_of(wire_of(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def wire_of(error: BaseException) -> object:
    import msgspec

    sent = sent_error(error)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=type(sent))


def test_attributes_and_causes_arrive() -> None:
    """What a handler goes by, and what the log shows."""
    error = StorageNotFound("gone", path="a/b")
    error.__cause__ = OSError(2, "No such file", "a/b")
    again = error_of(wire_of(error))
    assert isinstance(again, StorageNotFound)
    assert again.path == "a/b"
    assert isinstance(again.__cause__, FileNotFoundError)
    assert again.__cause__.filename == "a/b"
    assert list(error_of(wire_of(SaveFailed("x", failures=["y"]))).failures) == ["y"]  # type: ignore[attr-defined] # it is one


class Foreign(Exception):
    """Of nobody's whom the trainer knows."""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (MemoryError(), MemoryError, ""),
        (SystemExit(3), SystemExit, "3"),
        (Foreign("x"), RuntimeError, "Foreign: x"),
        (ValueError(object), ValueError, "object"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), RuntimeError, "UnicodeDecodeError"),
        (StorageFull("half of a pair: \ud800"), StorageFull, "half of a pair"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, BaseException) else "",
)
def test_other_errors_are_named(error: BaseException, kind: type, text: str) -> None:
    """Python's own stay what they are; of others at least the name and the words."""
    again = error_of(wire_of(error))
    assert type(again) is kind
    assert text in str(again)


# -- the channel ---


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


Ends = tuple[socket.socket, socket.socket]


@pytest.mark.parametrize("size", [1, 32 << 10, (32 << 10) + 1, 5 << 20])
def test_messages_of_any_size_and_descriptors(ends: Ends, size: int, tmp_path: Path) -> None:
    """Whole, in order, with the files that go with them."""
    (tmp_path / "f").write_text("x")
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    data = os.urandom(size)
    channel.send(ends[0], data, [fd])
    channel.send(ends[0], b"second")
    first, second = channel.receive(ends[1]), channel.receive(ends[1])
    assert first is not None
    assert (first[0], second) == (data, (b"second", []))
    assert os.read(first[1][0], 1) == b"x"
    os.close(first[1][0])
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)
    with pytest.raises(BlockingIOError):
        channel.receive(ends[1])


def test_what_was_sent_before_the_end_arrives(ends: Ends) -> None:
    """Also if the one that is gone has left something unread, of which the system tells first."""
    channel.send(ends[1], b"never read")
    channel.send(ends[0], b"last words")
    ends[0].close()
    assert channel.receive(ends[1]) == (b"last words", [])
    assert channel.receive(ends[1]) is None
    with pytest.raises(BrokenPipeError):
        channel.send(ends[1], b"x")


def test_an_end_that_the_program_has_closed_is_used_no_more(ends: Ends, tmp_path: Path) -> None:
    """What is open at its number by now is the program's own."""
    number = ends[0].fileno()
    other = os.open(tmp_path / "data", os.O_CREAT | os.O_RDWR)
    os.dup2(other, number)
    with pytest.raises(ConnectionAbortedError, match="the program has closed"):
        channel.send(ends[0], b"x")
    with pytest.raises(ConnectionAbortedError, match="the program has closed"):
        channel.receive(ends[0])
    channel.say_no_more(ends[0], socket.SHUT_RDWR)
    channel.close(ends[0])
    os.fstat(number)
    os.close(number)
    os.close(other)
    assert ends[0].fileno() == -1
    channel.close(ends[0])
    channel.close(ends[1])
    assert ends[1].fileno() == -1
