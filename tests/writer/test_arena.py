"""The arena: aligned memory that is there when it is needed and gone when it is not."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from spotsafe.writer.arena import PAGE, Arena, can_share, shared_arena
from tests.writer.processes import until

KINDS = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(not can_share(), reason="no memory to share here")),
]


@pytest.fixture(params=KINDS, ids=["own", "shared"])
def shared(request: pytest.FixtureRequest) -> bool:
    """Both kinds of memory."""
    return bool(request.param)


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_holds_what_was_asked_for_in_whole_pages(size: int, shared: bool) -> None:
    """At least the bytes asked for, a multiple of the page, all zero and writable."""
    arena = Arena(size, shared=shared)
    assert arena.size >= max(size, 1)
    assert arena.size % PAGE == 0
    assert arena.size - size <= PAGE
    assert len(arena.view) == arena.size
    assert not any(arena.view)
    arena.view[size - 1 if size else 0] = 7
    arena.close()


@pytest.mark.skipif(not can_share(), reason="no memory to share here")
def test_shared_memory_is_the_same_elsewhere() -> None:
    """Another map of its descriptor shows what is written here; it is found by its view, and by no other."""
    arena, other = Arena(2 * PAGE, shared=True), Arena(PAGE, shared=True)
    assert arena.fd is not None
    again = mmap.mmap(arena.fd, arena.size, prot=mmap.PROT_READ)
    arena.view[PAGE] = 7
    assert again[PAGE] == 7
    again.close()
    assert shared_arena(arena.view) is arena
    assert shared_arena(other.view) is other
    assert shared_arena(memoryview(bytearray(PAGE))) is None
    arena.close()
    other.close()


@pytest.mark.skipif(not can_share(), reason="no memory to share here")
def test_shared_memory_goes_with_the_last_who_knows_it() -> None:
    """Closed or forgotten: no descriptor, and no map of it, is left. Nor has a forked child any."""

    def held() -> int:
        names = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return sum("spotsafe-arena" in os.readlink(name) for name in names if os.path.lexists(name))

    before = held()
    closed, forgotten = Arena(PAGE, shared=True), Arena(PAGE, shared=True)
    assert held() == before + 2, "one each, although Python's map has a descriptor of its own"
    child = os.fork()
    if child == 0:
        os._exit(held())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    closed.close()
    del forgotten
    assert held() == before


def test_begins_at_a_page(shared: bool) -> None:
    """Direct writes need memory that begins at a page."""
    arena = Arena(5 * PAGE, shared=shared)
    assert np.frombuffer(arena.view, dtype=np.uint8).ctypes.data % PAGE == 0


def test_negative_size_is_a_mistake() -> None:
    """A size below zero is refused with the number in the message."""
    with pytest.raises(ValueError, match="-1"):
        Arena(-1)


@pytest.mark.parametrize("size", [1 << 62, 1 << 70])
def test_too_much_is_a_memory_error(size: int, shared: bool) -> None:
    """Memory that the system does not have is MemoryError, with the size in the message."""
    with pytest.raises(MemoryError, match=str(size)):
        Arena(size, shared=shared)


def test_close_takes_the_view_away(shared: bool) -> None:
    """After closing nobody writes into memory that is gone; closing twice is no error."""
    arena = Arena(PAGE, shared=shared)
    arena.close()
    with pytest.raises(ValueError, match="released"):
        _ = arena.view[0]
    arena.close()


def test_close_while_an_array_looks_at_it(shared: bool) -> None:
    """An array over the arena stays valid; closing neither fails nor tears its memory away."""
    arena = Arena(PAGE, shared=shared)
    array = np.frombuffer(memoryview(arena._map), dtype=np.uint8)
    arena.close()
    assert array.sum() == 0


def test_a_forked_child_does_not_hold_it(shared: bool) -> None:
    """A child made by fork has no arena: its memory is not kept alive by loader workers."""
    arena = Arena(PAGE, shared=shared)
    begin = np.frombuffer(arena.view, dtype=np.uint8).ctypes.data
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # in the child: only look at its own map of memory
        with open("/proc/self/maps", encoding="ascii") as maps:
            held = any(line.startswith(f"{begin:x}-") for line in maps)
        os.write(write_end, b"held" if held else b"free")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        assert answer.read() == b"free"


IN_CHILD = """
import gc, mmap, os
from spotsafe.writer.arena import Arena

class Cycle:
    pass

gc.disable()
size = 8 << 20
arena, closed, cycle = Arena(size), Arena(size), Cycle()
cycle.me, cycle.arena = cycle, arena
del arena, cycle
child = os.fork()
if child == 0:
    others = [mmap.mmap(-1, size) for _ in range(4)]  # the first ones lie where the arenas were
    for other in others:
        other[0] = 1
    gc.collect()
    closed.close()
    os._exit(sum(other[0] for other in others))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_unmaps_nothing() -> None:
    """In a child other memory may lie where the arena was; letting go of the arena must not take it away."""
    done = subprocess.run([sys.executable, "-c", IN_CHILD], capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr


def test_memory_is_taken_only_when_written(shared: bool) -> None:
    """A large arena costs nothing until it is filled."""

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    arena = Arena(1 << 30, shared=shared)
    assert resident() - before < 64 << 20
    arena.close()


def resident_bytes(arena: Arena) -> int:
    """Of its memory, what is there by now."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena.view))
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(one, 16) for one in first.split("-"))
            inside = start <= address < end
        elif inside and first == "Rss:":
            return int(line.split()[1]) * 1024
    raise LookupError(hex(address))


needs_populate = pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (5, 14) if sys.platform == "linux" else True,
    reason="only Linux 5.14 and later touches memory for us",
)


@needs_populate
def test_memory_that_is_touched_is_there(shared: bool) -> None:
    """In the background, and once; what lies in it is zero as before."""
    arena = Arena(64 << 20, shared=shared)
    assert resident_bytes(arena) < arena.size
    arena.touch()
    arena.touch()
    until(lambda: resident_bytes(arena) >= arena.size, what="touched")
    assert not any(arena.view[:: PAGE * 7])
    arena.close()


def test_memory_that_is_closed_while_it_is_touched(shared: bool) -> None:
    """Nothing is touched that is not its own any more, and no thread is left."""
    for _ in range(20):
        arena = Arena(256 << 20, shared=shared)
        arena.touch()
        arena.close()
    assert not [one for one in threading.enumerate() if one.name == "spotsafe-touch"]


def test_little_memory_is_not_worth_a_thread() -> None:
    """Tests and tiny models have none."""
    arena = Arena(PAGE)
    arena.touch()
    assert not [one for one in threading.enumerate() if one.name == "spotsafe-touch"]
    arena.close()


def test_a_descriptor_that_the_program_has_closed_is_never_given_away(tmp_path: Path) -> None:
    """Another file may be open there by now: it would be mapped in its place, and must not be closed either."""
    arena = Arena(5000, shared=True)
    fd = arena.descriptor()
    os.close(fd)
    with pytest.raises(OSError, match=f"closed descriptor {fd}"):
        arena.descriptor()
    other = os.open(tmp_path / "data", os.O_CREAT | os.O_RDWR)
    os.dup2(other, fd)
    with pytest.raises(OSError, match=f"closed descriptor {fd}"):
        arena.descriptor()
    arena.view[:5] = b"state"
    arena.close()
    os.fstat(fd)
    os.close(fd)
    if other != fd:
        os.close(other)
