"""Random state trees through a checkpoint and back, without a difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings

from spotsafe.testing.states import through_checkpoint
from spotsafe.tracking import Tracker
from tests import proof
from tests.tensors.same import aliases, differences
from tests.tensors.state_trees import DEPTH, KINDS, Tree, bare, trees

# torch says once in a process that these are in beta.
pytestmark = [pytest.mark.filterwarnings(f"ignore:.*{what}") for what in ("beta state", "ComplexHalf")]
GROUPS = {f"{KINDS[start]} ...": KINDS[start::20] for start in range(20)}
"""Each tree holds all kinds of one group, and some others."""


class Holder:
    """Keeps a value as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def returned(value: Any) -> Any:
    """The value as a fresh program finds it in the checkpoint."""
    tracker, fresh = Tracker(warn=print), Holder(bare(value))
    tracker.add("holder", Holder(value))
    saved = through_checkpoint(tracker.capture())
    after = Tracker(warn=print)
    after.add("holder", fresh)
    after.restore(saved)
    after.judge()
    return fresh.value


def round_trips(group: str, *, trees_each: int, total: Counter[str]) -> None:
    """Round trips without a difference; counts how many, and in how many each kind was."""

    @settings(max_examples=trees_each, database=None)
    @given(trees(GROUPS[group]))
    def check(tree: Tree) -> None:
        result = returned(tree.value)
        assert list(differences(tree.value, result)) == []
        # What `detach` made is the same memory, and comes back as the same object.
        assert set(map(tuple, aliases(tree.value))) <= set(map(tuple, aliases(result)))
        assert tree.depth >= DEPTH
        total.update(set(tree.kinds) | {"all"})

    check()


@pytest.mark.parametrize("group", GROUPS)
def test_some_trees_come_back_as_they_were(group: str) -> None:
    """Every kind of value, at least once."""
    counts: Counter[str] = Counter()
    round_trips(group, trees_each=2, total=counts)
    assert set(GROUPS[group]) <= set(counts)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_a_thousand_trees_come_back_as_they_were(group: str) -> None:
    """Every kind in at least 50 trees, five containers deep; a thousand trees in all groups together."""
    counts: Counter[str] = Counter()
    round_trips(group, trees_each=1000 // len(GROUPS), total=counts)
    assert min(counts[kind] for kind in GROUPS[group]) >= 50


@pytest.fixture(scope="module")
def proved() -> Iterator[Counter[str]]:
    """What all groups count together, written down if they were all run."""
    counts: Counter[str] = Counter()
    yield counts
    if counts["all"] >= 10_000:
        proof.record(
            "random state trees through a checkpoint and back, without a difference",
            trees=counts["all"],
            kinds=len(KINDS),
            trees_of_the_rarest_kind=min(counts[kind] for kind in KINDS),
            least_depth=DEPTH,
        )


@pytest.mark.prove
@pytest.mark.parametrize("group", GROUPS)
def test_ten_thousand_trees_come_back_as_they_were(group: str, proved: Counter[str]) -> None:
    """The full count, over all groups."""
    round_trips(group, trees_each=10_000 // len(GROUPS), total=proved)
    assert min(proved[kind] for kind in GROUPS[group]) >= 50
