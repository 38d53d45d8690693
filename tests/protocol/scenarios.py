"""The scenarios that are searched, all with whole attempts of the real code."""

from __future__ import annotations

from collections.abc import Mapping

from spotsafe.policy.retention import latest
from spotsafe.testing.cloud import Objects
from spotsafe.testing.promises import ProtocolRules
from spotsafe.testing.protocol import Plan, alone, attempt, cleaning_up, going_back, loss, rot
from spotsafe.testing.schedules import Scenario

FAULTS = {
    "kill": 1,
    "kill-done": 1,
    "kill-late": 1,
    "fail": 2,
    "lost": 2,
    "late": 2,
    "stale": 2,
    "wrong": 1,
    "lie": 1,
    "short": 1,
}
"""Everything, a few times each."""


def history(*plans: Plan) -> Objects:
    """What attempts leave that ran one after the other, each alone."""
    objects: Objects = {}
    for number, plan in enumerate(plans):
        notes, objects = alone(objects, plan, name=f"before{number}")
        assert notes[-1][0] == "saved"
        assert notes[-1][1], notes
    return objects


def newest_data(objects: Objects) -> str:
    """A data file of the newest checkpoint."""
    return max(path for path in objects if "/data-" in path)


def from_nothing() -> Scenario:
    """Three attempts that find an empty folder."""
    bodies = {"a": attempt(Plan(saves=2)), "b": attempt(Plan(saves=2)), "c": attempt(Plan())}
    return Scenario(bodies=bodies, rules=ProtocolRules(), faults=FAULTS)


def with_a_past() -> Scenario:
    """Three attempts after one that has published three checkpoints; a disk goes bad."""
    objects = history(Plan(saves=3, keep=latest(3)))
    return Scenario(
        bodies={
            "a": attempt(Plan(saves=3, stride=5)),
            "b": attempt(Plan(saves=3, files=2)),
            "c": attempt(Plan(saves=2, keep=latest(1))),
            "rot": rot(newest_data(objects)),
        },
        rules=ProtocolRules(),
        objects=objects,
        faults=FAULTS | {"blind": 1},
    )


def going_back_to_an_older_one() -> Scenario:
    """A person goes back to an older checkpoint between attempts that live."""
    return Scenario(
        bodies={"a": attempt(Plan(saves=2)), "back": going_back(2), "b": attempt(Plan(saves=2))},
        rules=ProtocolRules(),
        objects=history(Plan(saves=4, keep=latest(4))),
        faults=FAULTS,
    )


def cleaning() -> Scenario:
    """A person cleans up, twice, beside three attempts that die, are superseded, and lend each other files."""
    return Scenario(
        bodies={
            "a": attempt(Plan(saves=2, frozen=1)),
            "gc": cleaning_up(),
            "b": attempt(Plan(saves=2, frozen=1)),
            "gc2": cleaning_up(),
            "c": attempt(Plan(frozen=1)),
        },
        rules=ProtocolRules(),
        objects=history(Plan(saves=2, frozen=1)),
        faults=FAULTS | {"kill": 2},
    )


def one_save_each(faults: Mapping[str, int], *, together: int = 1) -> Scenario:
    """Two attempts that find an empty folder, with one save each."""
    bodies = {"a": attempt(Plan()), "b": attempt(Plan())}
    return Scenario(bodies=bodies, rules=ProtocolRules(), faults=faults, faults_together=together)


def lending() -> Scenario:
    """Three attempts that refer to files of each other's checkpoints, of which one is taken away."""
    objects = history(Plan(saves=3, keep=latest(1), frozen=2))
    return Scenario(
        bodies={
            "loss": loss(next(path for path in objects if "/frozen-" in path)),
            "a": attempt(Plan(saves=3, frozen=2)),
            "b": attempt(Plan(saves=3, frozen=2)),
            "c": attempt(Plan(saves=3, frozen=1, keep=latest(1))),
        },
        rules=ProtocolRules(),
        objects=objects,
        faults=FAULTS,
    )


def two() -> Scenario:
    """Two attempts that find an empty folder."""
    bodies = {"a": attempt(Plan(saves=2)), "b": attempt(Plan(saves=2))}
    return Scenario(bodies=bodies, rules=ProtocolRules(), faults=FAULTS)


def two_and_a_bad_disk() -> Scenario:
    """Two attempts after one that has published three checkpoints, of which the newest goes bad."""
    objects = history(Plan(saves=3, keep=latest(3)))
    bodies = {"a": attempt(Plan()), "b": attempt(Plan()), "rot": rot(newest_data(objects))}
    return Scenario(bodies=bodies, rules=ProtocolRules(), objects=objects, faults=FAULTS)


def ailing() -> Scenario:
    """Three attempts on a run whose values are not always finite."""
    return Scenario(
        bodies={
            "a": attempt(Plan(saves=3, sick=frozenset({2, 3}))),
            "b": attempt(Plan(saves=3, sick=frozenset({1}))),
            "c": attempt(Plan(saves=3, sick=frozenset({1, 2, 3}))),
        },
        rules=ProtocolRules(),
        objects=history(Plan(saves=2, sick=frozenset({2}))),
        faults=FAULTS,
    )


def ill_from_birth() -> Scenario:
    """Two attempts on a run that was never healthy."""
    return Scenario(
        bodies={
            "a": attempt(Plan(saves=3, sick=frozenset({1, 2, 3}))),
            "b": attempt(Plan(saves=3, sick=frozenset({1, 2}))),
        },
        rules=ProtocolRules(),
        objects=history(Plan(saves=1, sick=frozenset({1}))),
        faults=FAULTS,
    )
