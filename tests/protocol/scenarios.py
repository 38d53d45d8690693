"""The scenarios that are searched, all with whole attempts of the real code."""

from __future__ import annotations

from collections.abc import Mapping

from spotsafe.policy.retention import latest
from spotsafe.testing.cloud import Objects
from spotsafe.testing.promises import ProtocolRules
from spotsafe.testing.protocol import (
    Plan,
    alone,
    attempt,
    attempt_alone,
    attempt_of,
    cleaning_up,
    cleaning_up_alone,
    going_back,
    hearts,
    loss,
    reading,
    rot,
)
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
LATER = {"kill-late": 2, "late": 4, "fail": 4}
"""More of what leaves requests behind, for a store that refuses none. Its listings are of now: by one that does not
show an attempt the next one would overwrite its record."""


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


def going_back_and_forth() -> Scenario:
    """A person goes back, and another one to what the first has set aside, which is unhealthy, between attempts."""
    return Scenario(
        bodies={
            "a": attempt(Plan(saves=2)),
            "back": going_back(1),
            "forth": going_back(4),
            "b": attempt(Plan(saves=2)),
        },
        rules=ProtocolRules(),
        objects=history(Plan(saves=4, keep=latest(4), sick=frozenset({4}))),
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


def readers() -> Scenario:
    """Three readers, two of them with a pin, beside two attempts that keep little, and a person who cleans up."""
    return Scenario(
        bodies={
            "a": attempt(Plan(saves=3, keep=latest(1), frozen=1)),
            "old": reading(2),
            "new": reading(),
            "bare": reading(pinned=False),
            "b": attempt(Plan(saves=2, keep=latest(1), frozen=1)),
            "gc": cleaning_up(),
        },
        rules=ProtocolRules(),
        objects=history(Plan(saves=3, frozen=1)),
        faults=FAULTS,
    )


def one_after_the_other() -> Scenario:
    """Three attempts on a store that ignores conditions: each begins when the one before is over, or dead."""
    return Scenario(
        bodies={
            "a": attempt_alone(Plan(saves=3)),
            "b": attempt_alone(Plan(saves=3)),
            "c": attempt_alone(Plan(saves=2)),
        },
        after={"b": "a", "c": "b"},
        rules=ProtocolRules(following=attempt_alone),
        objects=history(Plan(saves=2)),
        faults=_without_stale(FAULTS | LATER),
    )


def two_jobs() -> Scenario:
    """Attempts of two jobs that were given the same folder."""
    return Scenario(
        bodies={
            "a": attempt_of("one", Plan(saves=2)),
            "b": attempt_of("other", Plan(saves=2)),
            "c": attempt_of("one", Plan()),
        },
        beats=hearts,
        rules=ProtocolRules(),
        faults=FAULTS,
    )


def taking_over() -> Scenario:
    """A job whose folder another one takes over while both live, and gets back; all go on until they find out."""
    return Scenario(
        bodies={
            "a": attempt_of("one", Plan(saves=3, frozen=1)),
            "b": attempt_of("other", Plan(saves=2, frozen=1), takeover=True),
            "c": attempt_of("one", Plan(saves=2), takeover=True),
        },
        beats=hearts,
        rules=ProtocolRules(takers=frozenset({"b", "c"})),
        objects=history(Plan(saves=2, frozen=1)),
        faults=FAULTS,
    )


def one_after_the_other_from_nothing() -> Scenario:
    """Three attempts on a store that ignores conditions, in an empty folder: a late claim may take the first number."""
    return Scenario(
        bodies={
            "a": attempt_alone(Plan(saves=2)),
            "b": attempt_alone(Plan(saves=2)),
            "c": attempt_alone(Plan(saves=2)),
        },
        after={"b": "a", "c": "b"},
        rules=ProtocolRules(following=attempt_alone),
        faults=_without_stale(FAULTS | LATER),
    )


def cleaning_without_conditions() -> Scenario:
    """A person cleans up, three times, beside attempts that follow each other on a store that ignores conditions."""
    return Scenario(
        bodies={
            "a": attempt_alone(Plan(saves=2, frozen=1)),
            "gc": cleaning_up_alone(),
            "b": attempt_alone(Plan(saves=2, frozen=1)),
            "gc2": cleaning_up_alone(),
            "gc3": cleaning_up_alone(),
        },
        after={"b": "a", "gc2": "a", "gc3": "b"},
        rules=ProtocolRules(following=attempt_alone),
        objects=history(Plan(saves=2, frozen=1)),
        faults=_without_stale(FAULTS | LATER),
    )


def _without_stale(faults: Mapping[str, int]) -> dict[str, int]:
    return {fate: times for fate, times in faults.items() if fate != "stale"}


def one_reader(step: int = 2, *, before: int = 3, saves: int = 2) -> Scenario:
    """A reader that keeps what an attempt is about to withdraw, and ends without letting it go.

    Args:
        step: what it reads. Step 1 lends a file to the others.
        before: checkpoints that are there at the beginning.
        saves: of the attempt.
    """
    return Scenario(
        bodies={"a": attempt(Plan(saves=saves, keep=latest(1))), "old": reading(step, releases=False)},
        rules=ProtocolRules(),
        objects=history(Plan(saves=before, frozen=1)),
        faults=FAULTS,
    )


def a_reader_of_what_is_lent() -> Scenario:
    """The same with the checkpoint whose file the other one refers to."""
    return one_reader(1, before=2)


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
