"""What this machine says of itself: how much memory it and its control groups can give, how old this process is.

And one thing that is asked of it: to put memory behind addresses before anybody writes there.

Sources, of the kernel's documentation (docs.kernel.org):
    admin-guide/cgroup-v2, "Memory Interface Files": ``memory.max``, ``memory.current``, and in ``memory.stat``
    ``active_file`` and ``inactive_file``, the page cache that can be dropped (``file`` counts shared memory too, which
    cannot). A group may use no more than every group above it allows.

    admin-guide/cgroup-v1/memory: ``memory.limit_in_bytes``, ``memory.usage_in_bytes``, and in ``memory.stat`` the
    same two with ``total_`` before them, which count the groups below.

    filesystems/proc, "meminfo": ``MemAvailable``, an estimate of what new programs can have without swapping.

    filesystems/proc, "statm": the first number is the size of the address space, in pages.

    madvise(2), of man7.org: ``MADV_POPULATE_WRITE``, since Linux 5.14.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from spotsafe.policy.staging_memory import Group, Memory

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")


class _Names(NamedTuple):
    """The files of one version of control groups."""

    limit: str
    used: str
    cache: tuple[str, ...]
    """Lines of ``memory.stat``."""


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _Names("memory.max", "memory.current", ("active_file", "inactive_file"))


def memory_now(
    *, proc: Path = PROC, cgroup: Path = CGROUP, environ: Mapping[str, str] | None = None
) -> Memory:
    """What there is now. What the system does not say counts as unlimited.

    Args:
        proc: where ``/proc`` is.
        cgroup: where the control groups are mounted.
        environ: of this process, where launchers say how many ranks there are on this machine.
    """
    env = os.environ if environ is None else environ
    return Memory(
        free=meminfo("MemAvailable", proc=proc),
        groups=tuple(memory_groups(proc=proc, cgroup=cgroup)),
        own=address_space(proc=proc),
        ranks=next((int(env[name]) for name in _LOCAL_RANKS if env.get(name, "").isdigit()), 1),
    )


def process_age_s(*, proc: Path = PROC) -> float | None:
    """Seconds since this process began; None where the system does not tell.

    Of filesystems/proc: the 22nd field of ``stat`` is the time after boot in clock ticks, ``uptime`` that of now in
    seconds. The name of the program, in brackets, may hold anything.
    """
    with suppress(OSError, ValueError, IndexError, AttributeError):
        began = int((proc / "self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf(
            "SC_CLK_TCK"
        )
        return max(0.0, float((proc / "uptime").read_text().split()[0]) - began)
    return None


def touch(address: int, size: int) -> bool:
    """Put memory behind `size` bytes from `address` on, which stay as they are; false if the system cannot.

    One call for many pages costs less than a fault for each of them, when somebody writes to them. Other threads run
    meanwhile.
    """
    if not sys.platform.startswith("linux"):
        return False
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    return not _madvise(start, address + size - start, _POPULATE_WRITE)


def _load_madvise() -> Any:
    function = ctypes.CDLL(None).madvise  # unlike a method of `mmap`, a call by `ctypes` keeps no lock
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


_madvise = _load_madvise()
_POPULATE_WRITE = 23


def meminfo(name: str, *, proc: Path = PROC) -> int | None:
    """A line of ``/proc/meminfo``, in bytes; None if there is none."""
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def memory_groups(*, proc: Path = PROC, cgroup: Path = CGROUP) -> Iterator[Group]:
    """The groups with a limit that this process is in, and those above them; of both versions."""
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            controllers, _, path = line.partition(":")[2].partition(":")
            if controllers and "memory" not in controllers.split(","):
                continue
            top, names = (cgroup / "memory", _V1) if controllers else (cgroup, _V2)
            parts = [part for part in path.split("/") if part not in {"", ".", ".."}]
            for depth in range(len(parts) + 1):
                yield from _group(top.joinpath(*parts[:depth]), names)


def address_space(*, proc: Path = PROC) -> Group | None:
    """What this process may map (``ulimit -v``) and has mapped; None if it has no limit.

    A slot takes addresses as any memory does.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    with suppress(OSError, ValueError, IndexError):
        used = int((proc / "self/statm").read_text().split()[0]) * mmap.PAGESIZE
        return None if limit == resource.RLIM_INFINITY else Group(limit=limit, used=used)
    return None


def _group(folder: Path, names: _Names) -> Iterator[Group]:
    limit = _number(folder / names.limit)
    if limit is not None:  # "max" is no number
        used = _number(folder / names.used) or 0
        yield Group(limit=limit, used=used, cache=_cache(folder, names.cache) if used else 0)


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _cache(folder: Path, names: tuple[str, ...]) -> int:
    with suppress(OSError, ValueError, IndexError):
        lines = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
        return sum(int(line[1]) for line in lines if line and line[0] in names)
    return 0
