"""The order of samples: time and memory to start and to resume, and indices per second, beside torch's sampler.

Usage: python benchmarks/order.py
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from torch.utils.data import DistributedSampler

from spotsafe.data.order import Cursor, OrderSpec
from spotsafe.data.sampler import ResumableSampler

INDICES = 1_000_000


def ours(length: int, position: int) -> Iterator[int]:
    """Our sampler, at a position."""
    sampler = ResumableSampler(range(length), seed=1)
    sampler.start_at(Cursor(position=position))
    return iter(sampler)


def torchs(length: int, position: int) -> Iterator[int]:
    """Torch's, resumed as it can be: by skipping."""
    indices = iter(DistributedSampler(range(length), num_replicas=1, rank=0, seed=1))
    for _ in range(position):
        next(indices)
    return indices


def our_batches(length: int, position: int) -> Iterator[int]:
    """What `ResumableDataLoader` hands to its workers: micro-batches of 256, with a seed for each sample."""
    order = OrderSpec(length=length, batch_size=256, shuffle=True, seed=1)
    return (index for batch in order.batches(Cursor(position=position)) for index in batch.indices)


CASES: dict[str, tuple[Callable[[int, int], Iterator[int]], int]] = {
    "ResumableSampler 1e6": (ours, 10**6),
    "ResumableSampler 1e8": (ours, 10**8),
    "ResumableSampler 1e9": (ours, 10**9),
    "ResumableDataLoader 1e9": (our_batches, 10**9),
    "DistributedSampler 1e6": (torchs, 10**6),
}


def resident_mb() -> float:
    """The most memory this process has had, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str) -> str:
    """One line of the table; in a process of its own, so that memory is that of the case."""
    make, length = CASES[name]
    before = resident_mb()
    times = []
    for position in (0, length * 9 // 10):
        begin = time.perf_counter()
        next(make(length, position))
        times.append(1000 * (time.perf_counter() - begin))
    indices = make(length, 0)
    count = min(INDICES, length)
    begin = time.perf_counter()
    for _ in range(count):
        next(indices)
    rate = count / (time.perf_counter() - begin) / 1e6
    return f"{name:24} {times[0]:9.1f} {times[1]:11.1f} {resident_mb() - before:9.1f} {rate:11.2f}"


def main() -> None:
    """Print the table."""
    if len(sys.argv) > 1:
        print(measure(sys.argv[1]))
        return
    print(f"{'':24} {'start ms':>9} {'at 90 % ms':>11} {'more MB':>9} {'M indices/s':>11}")
    for name in CASES:
        print(
            subprocess.run(
                [sys.executable, __file__, name], check=True, capture_output=True, text=True
            ).stdout,
            end="",
        )


if __name__ == "__main__":
    main()
