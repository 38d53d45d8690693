"""What the machine and its control groups can still give, read from trees made for it."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import resource
import sys
from pathlib import Path

import pytest

from spotsafe.machine import meminfo, memory_groups, memory_now, process_age_s, touch
from spotsafe.policy.staging_memory import Group, Memory

GIB = 1 << 30


class Tree:
    """A made-up machine."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"

    def put(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, line: str) -> None:
        self.put(self.proc / "self" / "cgroup", f"{line}\n")

    def groups(self) -> list[Group]:
        return list(memory_groups(proc=self.proc, cgroup=self.cgroup))

    def now(self, **environ: str) -> Memory:
        return memory_now(proc=self.proc, cgroup=self.cgroup, environ=environ)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


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
def test_limits_of_containers(tree: Tree, line: str, files: dict[str, str], limits: list[int]) -> None:
    """Of both versions of control groups, of the group and of those above it."""
    tree.group(line)
    for name, text in files.items():
        tree.put(tree.cgroup / name, f"{text}\n")
    assert [group.limit for group in tree.groups()] == limits


def test_version_2(tree: Tree) -> None:
    """What is used counts, the page cache does not; shared memory is in `file`, and no cache."""
    tree.group("0::/job")
    tree.put(tree.cgroup / "job/memory.max", f"{8 * GIB}\n")
    tree.put(tree.cgroup / "job/memory.current", f"{6 * GIB}\n")
    stat = f"anon 1\nfile {5 * GIB}\nshmem {2 * GIB}\nactive_file {GIB}\ninactive_file {2 * GIB}\n\nodd\n"
    tree.put(tree.cgroup / "job/memory.stat", stat)
    assert tree.groups() == [Group(limit=8 * GIB, used=6 * GIB, cache=3 * GIB)]
    assert tree.now().left == 5 * GIB


def test_version_1(tree: Tree) -> None:
    """The counts of the groups below are in those with `total_`; a huge number is no limit that matters."""
    tree.group("9:name=systemd:/\n4:memory:/job\n0::/")
    tree.put(tree.cgroup / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    tree.put(tree.cgroup / "memory/job/memory.limit_in_bytes", f"{4 * GIB}\n")
    tree.put(tree.cgroup / "memory/job/memory.usage_in_bytes", f"{3 * GIB}\n")
    stat = f"active_file 7\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}\n"
    tree.put(tree.cgroup / "memory/job/memory.stat", stat)
    tree.put(tree.proc / "meminfo", f"MemTotal: 9 kB\nMemAvailable: {16 * GIB // 1024} kB\n")
    assert tree.groups()[1] == Group(limit=4 * GIB, used=3 * GIB, cache=2 * GIB)
    assert tree.now().left == 3 * GIB
    assert tree.now(LOCAL_WORLD_SIZE="4").left == 3 * GIB // 4


def test_the_address_space_of_this_process(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ulimit -v``: the limit, and all that is mapped; where either is not known there is none."""
    limits = {resource.RLIMIT_AS: (2 * GIB, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert tree.now().own is None
    tree.put(tree.proc / "self/statm", f"{GIB // mmap.PAGESIZE} 1 1 1 0 1 0\n")
    assert tree.now(LOCAL_WORLD_SIZE="4") == Memory(own=Group(limit=2 * GIB, used=GIB), ranks=4)
    limits[resource.RLIMIT_AS] = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    assert tree.now().own is None


def test_nothing_there_is_unlimited(tree: Tree) -> None:
    """As on macOS, or where /proc is hidden."""
    assert tree.now() == Memory()
    assert tree.now().left is None
    assert meminfo("MemAvailable", proc=tree.proc) is None


@pytest.mark.parametrize("text", ["", "MemAvailable:", "MemAvailable: many kB", "MemTotal: 5 kB"])
def test_a_file_that_says_something_else(tree: Tree, text: str) -> None:
    """Is as good as none."""
    tree.put(tree.proc / "meminfo", text)
    assert tree.now().free is None


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "4"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "4(x2)"}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
    ],
)
def test_ranks_of_this_machine(tree: Tree, environ: dict[str, str], ranks: int) -> None:
    """As the launcher tells them."""
    assert tree.now(**environ).ranks == ranks


def test_this_machine() -> None:
    """Something is left, and less than all of it."""
    left = memory_now().left
    assert left is None or 0 <= left < 1 << 50


def test_the_age_of_this_process() -> None:
    """As the system has it, which counts from before the interpreter began."""
    age = process_age_s()
    assert age is not None
    assert 0 < age < 24 * 3600


def test_the_age_of_a_made_up_process(tree: Tree) -> None:
    """The program's name may look like fields; whatever makes no sense is no age."""
    ticks = os.sysconf("SC_CLK_TCK")
    tree.put(tree.proc / "self/stat", f"7 (a) b) S {' 0' * 18} {100 * ticks} 0 0\n")
    assert process_age_s(proc=tree.proc) is None
    tree.put(tree.proc / "uptime", "107.25 3.00\n")
    assert process_age_s(proc=tree.proc) == 7.25
    tree.put(tree.proc / "uptime", "99.25 3.00\n")
    assert process_age_s(proc=tree.proc) == 0.0
    tree.put(tree.proc / "self/stat", "7 (a) S 0\n")
    assert process_age_s(proc=tree.proc) is None


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux")
def test_touching_leaves_what_is_there() -> None:
    """Only the pages come; part of one is enough."""
    data = bytearray(b"x" * 100_000)
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    assert touch(address + 5, 90_000) or _kernel() < (5, 14)
    assert data == b"x" * 100_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux")
def test_memory_that_is_not_there_cannot_be_touched() -> None:
    """It is said; nobody is killed for it."""
    assert touch(1 << 12, 1 << 20) is False
