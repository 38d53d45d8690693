"""Many seeds in several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from spotsafe.testing.schedules import Report, search
from tests.protocol import scenarios
from tests.protocol.remembered import remembered

PIECE = 125
"""Seeds that a process takes at a time."""


def make_pool() -> ProcessPoolExecutor:
    """As many processes as there are cores, which know nothing of this one."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(min(os.cpu_count() or 1, 16), mp_context=context)


def search_many(pool: ProcessPoolExecutor, name: str, seeds: range) -> Report:
    """Search a scenario, by name, with these seeds.

    Raises:
        Broken: a schedule broke a rule.
    """
    pieces = [seeds[first : first + PIECE] for first in range(0, len(seeds), PIECE)]
    report = Report(faults=Counter())
    for one in pool.map(_search, [name] * len(pieces), pieces):
        report.schedules += one.schedules
        report.steps += one.steps
        report.faults.update(one.faults)
    return report


def _search(name: str, seeds: range) -> Report:
    with remembered():
        return search(getattr(scenarios, name)(), seeds=seeds)
