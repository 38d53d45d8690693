"""Each rule is needed: without it, the search finds what goes wrong."""

from __future__ import annotations

import dataclasses

import pytest

from spotsafe.testing.interleavings import every_interleaving
from spotsafe.testing.schedules import Broken, search
from tests.protocol.mutations import MUTATIONS, NOT_SWITCHED_OFF, Mutation
from tests.protocol.remembered import remembered

SEEDS = 5000


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [pytest.param(one, id=name) for name, one in MUTATIONS.items()])
def test_without_this_rule_a_promise_breaks(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same search that finds nothing in the real code finds the hole."""
    scenario = dataclasses.replace(mutation.scenario(), faults=mutation.faults)
    with remembered():
        mutation.off(monkeypatch)
        with pytest.raises(Broken, match=mutation.finds):
            if mutation.every:
                every_interleaving(scenario)
            else:
                search(scenario, seeds=range(SEEDS), shorten=False)


def test_each_rule_is_switched_off() -> None:
    """The thirteen rules and pins; what is not shown to be needed is listed with its reason."""
    rules = {*map(str, range(1, 14)), "pins"}
    assert {mutation.rule for mutation in MUTATIONS.values()} == rules
    assert all(name.partition(":")[0] == mutation.rule for name, mutation in MUTATIONS.items())
    assert {name.partition(":")[0] for name in NOT_SWITCHED_OFF} <= rules
    assert all(NOT_SWITCHED_OFF.values())
