"""The comparison that the demo's verdict rests on: it must see every difference, and nothing else."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, strategies as st

from spotsafe.cli.demo_compare import (
    Check,
    Snapshot,
    Step,
    TensorFact,
    compare_snapshots,
    compare_steps,
    first_difference,
)


def step(number: int, *, loss: str | None = None, ids: tuple[int, ...] | None = None) -> Step:
    return Step(step=number, loss=loss or f"0x{number}", ids=ids or (number, number + 1), time=float(number))


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.what: check for check in checks}


def fact(digest: str = "aa") -> TensorFact:
    return TensorFact(dtype="float32", shape=(2,), nbytes=8, sha256=digest)


def snapshot(**changes) -> Snapshot:
    whole = Snapshot(
        step=10,
        tensors={
            "model.weight": fact("aa"),
            "optimizer.state.weight.exp_avg": fact("bb"),
            "other": fact("cc"),
        },
        state={"optimizer": {"param_groups": [{"lr": 0.1}]}, "scheduler": {"last_epoch": 10}, "extra": 1},
        session={"rng": {"torch": "AAAA"}, "positions": {"steps": {"done": 10}}, "values": {"best": 1.0}},
    )
    return dataclasses.replace(whole, **changes)


# -- steps -----------------------------------------------------------------------------------------


def test_a_line_of_the_trace():
    """What the example writes is read exactly."""
    line = json.dumps({"step": 3, "loss": (1.1).hex(), "ids": [5, 6], "time": 12.5})

    assert Step.parse(line) == Step(step=3, loss=(1.1).hex(), ids=(5, 6), time=12.5)


def test_equal_steps_over_several_attempts():
    """Steps that were done twice count, and may be done at another time."""
    reference = [step(number) for number in range(5)]
    attempts = [[step(0), step(1), step(2)], [step(2), dataclasses.replace(step(3), time=99.0)], [step(4)]]

    checks = compare_steps(reference, attempts)

    assert [check.equal for check in checks] == [True, True]
    assert checks[0].detail == "5 steps, 1 of them done twice"


def test_another_loss_is_seen_even_in_a_step_that_is_redone_right():
    """The first doing of a step counts like the second."""
    reference = [step(number) for number in range(3)]
    attempts = [[step(0), step(1, loss="0x0")], [step(1), step(2)]]

    checks = by_name(compare_steps(reference, attempts))

    assert not checks["loss of every step"].equal
    assert checks["loss of every step"].detail == "1 differ, the first is step 1"
    assert checks["sample ids"].equal


def test_other_samples_or_another_order_of_them_are_seen():
    """The ids of a step are compared in order."""
    attempts = [[step(0), step(1, ids=(2, 1))]]

    checks = by_name(compare_steps([step(0), step(1)], attempts))

    assert checks["loss of every step"].equal
    assert not checks["sample ids"].equal


@pytest.mark.parametrize("attempts", [[[step(0)]], [[step(0), step(1), step(2)]], [[]]])
def test_missing_and_surplus_steps_are_seen(attempts):
    """A run that did fewer or more steps is not the same run."""
    assert not any(check.equal for check in compare_steps([step(0), step(1)], attempts))


# -- checkpoints -----------------------------------------------------------------------------------


def test_equal_snapshots():
    """Nothing differs: every check says so, with what it looked at."""
    checks = compare_snapshots(snapshot(), snapshot())

    assert all(check.equal for check in checks)
    assert by_name(checks)["weights"].detail == "1 tensor, 8 bytes"
    assert [check.what for check in checks] == [
        "weights",
        "optimizer",
        "learning rate schedule",
        "random numbers",
        "position in the data",
        "everything else",
    ]


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("weights", {"tensors": {**snapshot().tensors, "model.weight": fact("zz")}}),
        (
            "weights",
            {
                "tensors": {
                    **snapshot().tensors,
                    "model.weight": dataclasses.replace(fact("aa"), dtype="int32"),
                }
            },
        ),
        ("weights", {"tensors": {**snapshot().tensors, "model.bias": fact()}}),
        ("optimizer", {"tensors": {**snapshot().tensors, "optimizer.state.weight.exp_avg": fact("zz")}}),
        ("optimizer", {"state": {**snapshot().state, "optimizer": {"param_groups": [{"lr": 0.2}]}}}),
        ("learning rate schedule", {"state": {**snapshot().state, "scheduler": {"last_epoch": 9}}}),
        ("random numbers", {"session": {**snapshot().session, "rng": {"torch": "AAAB"}}}),
        ("position in the data", {"session": {**snapshot().session, "positions": {}}}),
        ("everything else", {"session": {**snapshot().session, "values": {"best": 2.0}}}),
        ("everything else", {"state": {**snapshot().state, "extra": 2}}),
        ("everything else", {"tensors": {**snapshot().tensors, "other": fact("zz")}}),
        ("everything else", {"step": 11}),
    ],
)
def test_each_difference_is_found_and_named(what, changes):
    """Whatever differs, exactly the check that is about it fails."""
    checks = compare_snapshots(snapshot(), snapshot(**changes))

    assert [check.what for check in checks if not check.equal] == [what]


def test_nothing_to_compare_is_not_equal():
    """Two checkpoints without a model prove nothing about weights."""
    empty = Snapshot(step=1, tensors={})

    checks = by_name(compare_snapshots(empty, empty))

    assert not checks["weights"].equal
    assert not checks["optimizer"].equal


def test_a_name_that_only_begins_alike_is_another_object():
    """`model_ema.weight` does not belong to `model`."""
    other = snapshot(tensors={**snapshot().tensors, "model_ema.weight": fact()})

    checks = compare_snapshots(snapshot(), other)

    assert [check.what for check in checks if not check.equal] == ["everything else"]


# -- trees of JSON ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "place"),
    [
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, "a.b.1"),
        ({"a": 1}, {"a": 1, "b": 2}, "b"),
        ({"a": [1]}, {"a": [1, 2]}, "a (length)"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, " (order of the keys)"),
        (1, 1.0, "the value"),
        ({"a": True}, {"a": 1}, "a"),
        ({"a": 0.0}, {"a": None}, "a"),
        ({"a": {}}, {"a": []}, "a"),
    ],
)
def test_the_place_of_a_difference(left, right, place):
    """The path of the first difference, types and order included."""
    assert first_difference(left, right) == place


def test_nan_equals_nan():
    """A NaN that was saved and restored is no difference."""
    assert first_difference({"a": float("nan")}, {"a": float("nan")}) is None


def test_minus_zero_is_not_zero():
    """Bit for bit means the sign of zero too."""
    assert first_difference({"a": 0.0}, {"a": -0.0}) == "a"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


@given(_json)
def test_a_tree_equals_its_copy(tree):
    """Whatever survives a copy through JSON text shows no difference."""
    assert first_difference(tree, json.loads(json.dumps(tree))) is None


@given(_json, _json)
def test_a_difference_is_seen_from_both_sides(left, right):
    """Comparing is symmetric."""
    assert (first_difference(left, right) is None) == (first_difference(right, left) is None)
