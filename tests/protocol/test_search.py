"""No order of the storage operations of a few attempts, and nothing that goes wrong with them, breaks a promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from spotsafe.testing.interleavings import every_interleaving
from spotsafe.testing.schedules import Scenario, search
from tests import proof
from tests.protocol import scenarios
from tests.protocol.many import search_many
from tests.protocol.remembered import remembered

SHARES = {"from_nothing": 35, "ill_from_birth": 20, "ailing": 20, "with_a_past": 15, "lending": 10}
"""Of a hundred schedules; those of the longer scenarios take longer."""
CI = 10_000
ALL = 100_000


@pytest.fixture(autouse=True)
def _remembered() -> Iterator[None]:
    with remembered():
        yield


@pytest.mark.parametrize("name", SHARES)
def test_a_few_random_schedules(name: str) -> None:
    """Some seeds of each scenario, for every change of the code."""
    make: Callable[[], Scenario] = getattr(scenarios, name)
    report = search(make(), seeds=range(30))
    assert report.schedules == 30


@pytest.mark.slow
def test_random_schedules() -> None:
    """A tenth of the full count, with every kind of fault among them."""
    _random_schedules(CI)


@pytest.mark.prove
def test_all_random_schedules() -> None:
    """The full count."""
    _random_schedules(ALL)


def _random_schedules(count: int) -> None:
    report = search_many({name: count * share // 100 for name, share in SHARES.items()})
    assert report.schedules == count
    assert report.faults.keys() == scenarios.FAULTS.keys() | {"blind"}
    assert min(report.faults.values()) >= count / 1000, report.faults
    proof.record(
        "random schedules of up to three attempts, their retention and sweeps",
        schedules=report.schedules,
        operations=report.steps,
        **{fate.replace("-", "_"): times for fate, times in sorted(report.faults.items())},
    )


KILLED = {"kill": 1, "kill-done": 1}


@pytest.mark.slow
@pytest.mark.parametrize("faults", [{}, KILLED], ids=["no fault", "one kill"])
def test_every_interleaving_of_two_attempts(faults: dict[str, int]) -> None:
    """Two whole attempts with a save each, from an empty folder: all orders, also with a kill at any place."""
    explored = every_interleaving(scenarios.one_save_each(faults))
    assert explored.orders > 10**10
    assert explored.states < 200_000
    proof.record(
        f"all interleavings of two attempts, {'one kill' if faults else 'no fault'}",
        orders=explored.orders,
        states=explored.states,
    )
