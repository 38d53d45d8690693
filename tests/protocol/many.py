"""Many seeds in several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor

from spotsafe.testing.schedules import Report, search
from tests.protocol import scenarios
from tests.protocol.remembered import remembered

PIECE = 250
"""Seeds that a process takes at a time."""


def search_many(seeds: Mapping[str, int]) -> Report:
    """Search scenarios, by name with so many seeds, in as many processes as there are cores.

    Raises:
        Broken: a schedule broke a rule.
    """
    pieces = [
        (name, first, min(first + PIECE, count))
        for name, count in seeds.items()
        for first in range(0, count, PIECE)
    ]
    report = Report(faults=Counter())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8), mp_context=context) as pool:
        try:
            for one in pool.map(_search, *zip(*pieces, strict=True)):
                report.schedules += one.schedules
                report.steps += one.steps
                report.faults.update(one.faults)
        finally:
            pool.shutdown(cancel_futures=True)
    return report


def _search(name: str, first: int, end: int) -> Report:
    with remembered():
        return search(getattr(scenarios, name)(), seeds=range(first, end))
