"""No order of the storage operations of a few attempts, and nothing that goes wrong with them, breaks a promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from spotsafe.testing.interleavings import every_interleaving
from spotsafe.testing.schedules import Scenario, replay, search
from tests import proof
from tests.protocol import scenarios
from tests.protocol.many import make_pool, search_many
from tests.protocol.remembered import remembered

SHARES = {
    "from_nothing": 16,
    "ill_from_birth": 14,
    "ailing": 9,
    "with_a_past": 10,
    "lending": 8,
    "cleaning": 6,
    "going_back_to_an_older_one": 6,
    "going_back_and_forth": 5,
    "readers": 7,
    "two_jobs": 6,
    "taking_over": 3,
    "one_after_the_other": 4,
    "one_after_the_other_from_nothing": 3,
    "cleaning_without_conditions": 3,
}
"""Of a hundred schedules; those of the longer scenarios take longer."""
CI = 10_000
ALL = 100_000
PART = 1000

PARTS = [
    pytest.param(name, range(first, min(first + PART, CI * share // 100)), id=f"{name}-{first}")
    for name, share in SHARES.items()
    for first in range(0, CI * share // 100, PART)
]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with make_pool() as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", SHARES)
def test_a_few_random_schedules(name: str) -> None:
    """Some seeds of each scenario, for every change of the code."""
    with remembered():
        report = search(getattr(scenarios, name)(), seeds=range(15))
    assert report.schedules == 15


def test_the_shares_are_all() -> None:
    """No scenario is left out by a sum that is not a hundred."""
    assert sum(SHARES.values()) == 100


def test_a_late_first_claim_does_not_change_whose_checkpoints_these_are() -> None:
    """A claim of attempt 1 lands over another one's record, which published, and the next start goes on from it."""
    scenario = scenarios.one_after_the_other_from_nothing()
    claimed, published = ["a", "a", "a kill-late", *["b"] * 16], ["land"]
    replay(scenario, [*claimed, *published, *["b"] * 40, *["c"] * 100])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seeds"), PARTS)
def test_random_schedules(pool: ProcessPoolExecutor, name: str, seeds: range) -> None:
    """A tenth of the full count, with every kind of fault that the scenario allows among them."""
    report = search_many(pool, name, seeds)
    assert report.schedules == len(seeds)
    assert report.faults.keys() == getattr(scenarios, name)().faults.keys()


@pytest.mark.prove
@pytest.mark.parametrize("name", SHARES)
def test_all_random_schedules(pool: ProcessPoolExecutor, name: str) -> None:
    """The full count."""
    report = search_many(pool, name, range(ALL * SHARES[name] // 100))
    assert min(report.faults.values()) >= report.schedules / 1000
    proof.record(
        f"random schedules: {name.replace('_', ' ')}",
        schedules=report.schedules,
        operations=report.steps,
        **{fate.replace("-", "_"): times for fate, times in sorted(report.faults.items())},
    )


KILLED = {"kill": 1, "kill-done": 1}


@pytest.mark.slow
@pytest.mark.parametrize("faults", [{}, KILLED], ids=["no-fault", "one-kill"])
def test_every_interleaving_of_two_attempts(faults: dict[str, int]) -> None:
    """Two whole attempts with a save each, from an empty folder: all orders, also with a kill at any place."""
    _every_interleaving("two attempts with a save each", scenarios.one_save_each(faults))


@pytest.mark.slow
def test_every_interleaving_of_a_reader_and_a_save() -> None:
    """A reader pins, in all orders, what the retention of a save is about to withdraw."""
    _every_interleaving("a reader and a save", replace(scenarios.one_reader(saves=1), faults={}))


@pytest.mark.prove
@pytest.mark.parametrize(
    "faults",
    [{}, KILLED, {"lie": 1}, {"short": 1}],
    ids=lambda faults: "+".join(faults) or "none",
)
def test_every_interleaving_with_each_fault(faults: dict[str, int]) -> None:
    """Also with a store that once does not do what it says, at every place where it can happen.

    What is lost or late makes too many states; that is left to random schedules.
    """
    _every_interleaving("two attempts with a save each", scenarios.one_save_each(faults))


@pytest.mark.prove
@pytest.mark.parametrize("faults", [{}, KILLED], ids=["none", "kill+kill-done"])
@pytest.mark.parametrize("scenario", [scenarios.one_reader, scenarios.a_reader_of_what_is_lent])
def test_every_interleaving_of_a_reader_and_two_saves(
    scenario: Callable[[], Scenario], faults: dict[str, int]
) -> None:
    """Readers of one that refers to another's file, and of one whose file the other refers to."""
    name = f"{scenario.__name__.replace('_', ' ')} and two saves"
    _every_interleaving(name, replace(scenario(), faults=faults, faults_together=1))


def _every_interleaving(who: str, scenario: Scenario) -> None:
    with remembered():
        explored = every_interleaving(scenario)
    assert explored.orders > 10**10
    proof.record(
        f"all interleavings of {who}; {' or '.join(scenario.faults) or 'no fault'}",
        orders=explored.orders,
        states=explored.states,
    )
