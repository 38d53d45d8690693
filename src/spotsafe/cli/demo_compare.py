"""Is an interrupted run the same as one that was never interrupted? Pure values, no I/O.

Nothing here is approximate: losses are compared by all their bits, tensors by the digest of their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spotsafe import human


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the training script wrote down about one step."""

    step: int
    loss: str
    """In hexadecimal, exact."""
    ids: tuple[int, ...]
    """Numbers of the samples that the step was given."""
    time: float
    """Unix time in seconds at its end."""

    @staticmethod
    def parse(line: str) -> Step:
        """Read a line of the trace."""
        record = json.loads(line)
        return Step(
            step=record["step"], loss=record["loss"], ids=tuple(record["ids"]), time=float(record["time"])
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFact:
    """What decides whether two tensors are the same."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All of a checkpoint that training depends on."""

    step: int
    tensors: Mapping[str, TensorFact]
    state: Mapping[str, Any] = field(default_factory=dict)
    """Tracked name -> typed JSON."""
    session: Mapping[str, Any] = field(default_factory=dict)
    """The session's own: ``rng``, ``positions``, ``values``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must be equal."""

    what: str
    equal: bool
    detail: str
    """What was compared; or, if it differs, where first."""


def compare_steps(reference: Sequence[Step], attempts: Sequence[Sequence[Step]]) -> list[Check]:
    """Compare every step of every attempt, those done twice too, with the reference's."""
    expected = {step.step: step for step in reference}
    done = [step for attempt in attempts for step in attempt]
    redone = len(done) - len({step.step for step in done})
    extent = f"{human.count(len(expected), 'step')}, {redone} of them done twice"
    missing = sorted(expected.keys() ^ {step.step for step in done})

    def check(what: str, part: Callable[[Step], object]) -> Check:
        if missing:
            return Check(what=what, equal=False, detail=f"only one of the two runs did step {missing[0]}")
        wrong = [step.step for step in done if part(step) != part(expected[step.step])]
        detail = f"{len(wrong)} differ, the first is step {wrong[0]}" if wrong else extent
        return Check(what=what, equal=not wrong, detail=detail)

    return [check("loss of every step", lambda one: one.loss), check("sample ids", lambda one: one.ids)]


def compare_snapshots(reference: Snapshot, resumed: Snapshot) -> list[Check]:
    """Compare the last checkpoints of both runs, group by group; what is in no group is compared as well."""
    groups = {"weights": "model", "optimizer": "optimizer", "learning rate schedule": "scheduler"}
    checks = [
        _compare_tracked(what, tracked, reference=reference, resumed=resumed)
        for what, tracked in groups.items()
    ]
    for what, key in {"random numbers": "rng", "position in the data": "positions"}.items():
        checks.append(_compare_json(what, reference.session.get(key), resumed.session.get(key)))
    rest = _compare_json(
        "everything else",
        _rest(reference, tracked=set(groups.values()), session={"rng", "positions"}),
        _rest(resumed, tracked=set(groups.values()), session={"rng", "positions"}),
    )
    return [*checks, rest]


def first_difference(reference: object, other: object, path: str = "") -> str | None:
    """Where two trees of JSON differ first, as a path like ``loops.steps.done``; None if they are equal.

    Values are compared as they are written: 1 is not 1.0 or true, 0.0 is not -0.0, and NaN equals NaN.
    """
    if isinstance(reference, Mapping) and isinstance(other, Mapping):
        if list(reference) != list(other):
            odd = sorted(map(str, reference.keys() ^ other.keys()))
            return _joined(path, odd[0]) if odd else f"{path} (order of the keys)"
        children = [(str(key), reference[key], other[key]) for key in reference]
    elif isinstance(reference, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(reference) != len(other):
            return f"{path} (length)"
        children = [(str(number), *pair) for number, pair in enumerate(zip(reference, other, strict=True))]
    else:
        same = type(reference) is type(other) and repr(reference) == repr(other)
        return None if same else path or "the value"
    for key, left, right in children:
        found = first_difference(left, right, _joined(path, key))
        if found is not None:
            return found
    return None


def _compare_tracked(what: str, tracked: str, *, reference: Snapshot, resumed: Snapshot) -> Check:
    expected, found = _tensors_of(reference, tracked), _tensors_of(resumed, tracked)
    odd = sorted(expected.keys() ^ found.keys())
    wrong = odd or [name for name in expected if expected[name] != found[name]]
    if wrong:
        return Check(what=what, equal=False, detail=f"{len(wrong)} tensors differ, the first is {wrong[0]}")
    place = first_difference(reference.state.get(tracked), resumed.state.get(tracked), tracked)
    if place is not None:
        return Check(what=what, equal=False, detail=f"differs at {place}")
    if tracked not in reference.state and not expected:
        return Check(what=what, equal=False, detail=f"no checkpoint holds a {tracked!r}")
    nbytes = sum(fact.nbytes for fact in expected.values())
    detail = f"{human.count(len(expected), 'tensor')}, {human.size(nbytes)}" if expected else "all values"
    return Check(what=what, equal=True, detail=detail)


def _compare_json(what: str, reference: object, other: object) -> Check:
    place = first_difference(reference, other)
    if place is not None:
        return Check(what=what, equal=False, detail=f"differs at {place}")
    return Check(what=what, equal=True, detail="all values")


def _tensors_of(snapshot: Snapshot, tracked: str) -> dict[str, TensorFact]:
    return {name: fact for name, fact in snapshot.tensors.items() if _belongs(name, tracked)}


def _belongs(tensor: str, tracked: str) -> bool:
    return tensor == tracked or tensor.startswith(f"{tracked}.")


def _rest(snapshot: Snapshot, *, tracked: set[str], session: set[str]) -> dict[str, Any]:
    """What no other check looks at, as JSON; with the step, which must agree before anything else can."""
    return {
        "step": snapshot.step,
        "tensors": {
            name: [fact.dtype, list(fact.shape), fact.sha256]
            for name, fact in snapshot.tensors.items()
            if not any(_belongs(name, one) for one in tracked)
        },
        "state": {name: value for name, value in snapshot.state.items() if name not in tracked},
        "session": {name: value for name, value in snapshot.session.items() if name not in session},
    }


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
