"""Memory that can never be had is refused in words; what might fit is tried."""

from __future__ import annotations

import pytest

from spotsafe.checkpoint.room import check_room, memory_capacity, room_for
from spotsafe.errors import NotEnoughMemory, SpotsafeError

GIB = 1 << 30


def test_only_what_can_never_fit_is_refused() -> None:
    """All of the memory is allowed, for nobody knows what else is in it."""
    check_room(GIB, what="x", capacity=GIB)
    with pytest.raises(
        NotEnoughMemory, match=r"step-4 needs 1\.1 GB of memory, and there are 1\.1 GB in all"
    ):
        check_room(GIB + 1, what="step-4", capacity=GIB)


def test_this_machine() -> None:
    """A megabyte fits, 2^62 bytes do not."""
    capacity = memory_capacity()
    assert capacity is not None
    assert 64 << 20 < capacity < 1 << 50
    check_room(1 << 20, what="x")
    with pytest.raises(NotEnoughMemory):
        check_room(1 << 62, what="x")


def test_a_system_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is refused."""

    def unknown(_name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr("spotsafe.checkpoint.room.os.sysconf", unknown)
    assert memory_capacity() is None
    check_room(1 << 62, what="x")


def test_who_got_no_memory() -> None:
    """The error names the file, is of the tree and a MemoryError, and leaves other errors alone."""
    for error, by_torch in ((MemoryError(), False), (RuntimeError("cannot allocate"), True)):
        refused = pytest.raises(NotEnoughMemory, match=r"data-1\.safetensors")
        with refused as caught, room_for("data-1.safetensors", by_torch=by_torch):
            raise error
        assert isinstance(caught.value, MemoryError)
        assert isinstance(caught.value, SpotsafeError)
        assert caught.value.__cause__ is error
    with pytest.raises(RecursionError), room_for("x"):
        raise RecursionError
    with pytest.raises(NotEnoughMemory, match="inner"), room_for("outer"), room_for("inner"):
        raise MemoryError
