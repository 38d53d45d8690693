"""Each rule is needed: without it, the search finds what goes wrong."""

from __future__ import annotations

import dataclasses

import pytest

from spotsafe.testing.schedules import Broken, search
from tests.protocol.mutations import MUTATIONS, Mutation
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
            search(scenario, seeds=range(SEEDS), shorten=False)
