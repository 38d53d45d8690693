"""Memory that can never be had is refused in words; what might fit is tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotsafe.checkpoint import room
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


@pytest.mark.parametrize(
    ("line", "files", "limits"),
    [
        ("0::/job/step", {"job/memory.max": "5", "job/step/memory.max": "max"}, [5]),
        ("0::/job/step", {"job/memory.max": "5", "job/step/memory.max": "3"}, [5, 3]),
        ("0::/", {"memory.max": "7"}, [7]),
        ("0::/../../job", {"job/memory.max": "5"}, [5]),
        ("4:cpu,memory:/job", {"memory/job/memory.limit_in_bytes": "9"}, [9]),
        ("4:cpu:/job", {"job/memory.max": "5"}, []),
        ("nonsense", {}, []),
    ],
)
def test_limits_of_containers(tmp_path: Path, line: str, files: dict[str, str], limits: list[int]) -> None:
    """Of both versions of control groups, of the group and of those above it."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"{line}\n")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert list(room._cgroup_limits(tmp_path / "proc", tmp_path / "cgroup")) == limits


def test_swap_counts(tmp_path: Path) -> None:
    """It is slow, but it is room."""
    assert room._swap(tmp_path) == 0
    (tmp_path / "meminfo").write_text("MemTotal: 10 kB\nSwapTotal: 3 kB\n")
    assert room._swap(tmp_path) == 3 * 1024


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
