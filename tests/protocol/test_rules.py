"""Each rule is needed: without it, the search finds what goes wrong."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future

import pytest

from spotsafe.testing.interleavings import every_interleaving
from spotsafe.testing.schedules import Broken, search
from tests.ahead import begin_all
from tests.protocol.many import make_pool
from tests.protocol.mutations import MUTATIONS, NOT_SWITCHED_OFF
from tests.protocol.remembered import remembered

SEEDS = 5000


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Future[str]]]:
    """What the search says without a part of a rule, by the name of the mutation."""
    with make_pool() as pool:
        yield begin_all(request, pool, search_without, of="name")
        pool.shutdown(cancel_futures=True)


def search_without(name: str) -> str:
    """What the search finds; empty if it finds nothing."""
    mutation = MUTATIONS[name]
    scenario = dataclasses.replace(mutation.scenario(), faults=mutation.faults)
    with remembered(), pytest.MonkeyPatch.context() as patch:
        mutation.off(patch)
        try:
            if mutation.every:
                every_interleaving(scenario)
            else:
                search(scenario, seeds=range(SEEDS), shorten=False)
        except Broken as broken:
            return str(broken)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_without_this_rule_a_promise_breaks(name: str, found: Mapping[str, Future[str]]) -> None:
    """The same search that finds nothing in the real code finds the hole."""
    assert re.search(MUTATIONS[name].finds, found[name].result())


def test_each_rule_is_switched_off() -> None:
    """The thirteen rules and pins; what is not shown to be needed is listed with its reason."""
    rules = {*map(str, range(1, 14)), "pins"}
    assert {mutation.rule for mutation in MUTATIONS.values()} == rules
    assert all(name.partition(":")[0] == mutation.rule for name, mutation in MUTATIONS.items())
    assert {name.partition(":")[0] for name in NOT_SWITCHED_OFF} <= rules
    assert all(NOT_SWITCHED_OFF.values())
