"""The names of what is in a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from spotsafe.checkpoint.index import Index, TensorEntry
from spotsafe.checkpoint.naming import contents, is_tensor, module_entries
from spotsafe.errors import DamagedCheckpoint


def index(state: dict[str, Any], *names: str, session: Any = None, rank: int = 0) -> Index:
    entries = tuple(TensorEntry(name=name, dtype="int8", shape=(0,), slices=()) for name in names)
    return Index(rank=rank, block_size=1, files=(), tensors=entries, state=state, session=session)


def ref(name: str) -> dict[str, str]:
    return {"$": "tensor", "name": name}


def names(*indexes: Index) -> list[str]:
    return list(contents(indexes, checkpoint="c").values)


def test_a_module_has_the_keys_of_its_state_dict():
    """Under the tracked name; a tied weight under each of its names, whatever its tensor is called."""
    tree = {
        "kind": "module",
        "state": {"a.w": ref("m.a.w"), "b.w": ref("m.a.w")},
        "frozen": [],
        "metadata": {},
    }

    found = contents([index({"m": tree}, "m.a.w")], checkpoint="c")

    assert found.values == {"m.a.w": ref("m.a.w"), "m.b.w": ref("m.a.w")}
    assert module_entries(tree) == tree["state"]
    assert module_entries({"kind": "tensor", "value": ref("x")}) is None


def test_an_optimizer_has_groups_and_state_by_parameter():
    """As in what torch calls its state_dict, with names for positions."""
    tree = {
        "kind": "optimizer", "class": "SGD", "order": [["m.w"]], "form": "by name", "groups": [{"lr": 0.1}],
        "state": [["m.w", {"momentum_buffer": ref("o.m.w.momentum_buffer")}]],
        "shared": {}, "extra": {"loss_scale": 2.0}, "on_host": [],
    }  # fmt: skip

    assert names(index({"o": tree}, "o.m.w.momentum_buffer")) == [
        "o.param_groups[0].lr",
        "o.m.w.momentum_buffer",
        "o.extra['loss_scale']",
    ]


def test_other_objects_have_their_own_keys():
    """Dicts are gone into as long as their keys are text; the paths are those of errors about state."""
    state = {
        "s": {"kind": "stateful", "state": {"last_epoch": 3, "nested": {"x": [1], "y z": {"$": "tuple", "items": []}}}},
        "d": {"kind": "stateful", "state": {"$": "dict", "items": [[1, 2]]}},
        "many": {
            "kind": "dict",
            "items": [["a", {"kind": "tensor", "value": ref("many.a")}], [3, {"kind": "pair", "state": 1}]],
        },
        "g": {"kind": "random.Random", "state": {"version": 3, "words": "AA"}},
        "v": {"kind": "value", "value": 1.5},
    }  # fmt: skip

    assert names(index(state, "many.a")) == [
        "s.last_epoch", "s.nested['x']", "s.nested['y z']", "d", "many.a", "many[3]",
        "g.state['version']", "g.state['words']", "v",
    ]  # fmt: skip


def test_tensors_inside_a_value_have_a_name_of_their_own():
    """They come with the value when everything is asked for, and alone when they are named."""
    history = {"$": "tuple", "items": [ref("s.history[0]"), 7]}

    found = contents(
        [index({"s": {"kind": "stateful", "state": {"history": history}}}, "s.history[0]")], checkpoint="c"
    )

    assert found.values == {"s.history": history}
    assert found.inner == {"s.history[0]": ref("s.history[0]")}
    assert found.find("s.history[0]") == ref("s.history[0]")
    with pytest.raises(KeyError):
        found.find("s.history[1]")


def test_a_tensor_subclass_is_its_parts():
    """Only a live value could say what class to make of them."""
    node = {
        "$": "torch.wrapper",
        "inner": [["a", ref("m.w.a")], ["b", ref("m.w.b")]],
        "context": None,
        "shape": [],
        "stride": [],
    }
    tree = {"kind": "module", "state": {"w": node}, "frozen": [], "metadata": {}}

    found = contents([index({"m": tree}, "m.w.a", "m.w.b")], checkpoint="c")

    assert list(found.values) == ["m.w.a", "m.w.b"]
    assert all(map(is_tensor, found.values.values()))


def test_what_no_state_refers_to_is_there_too():
    """The format allows tensors without a reference."""
    assert names(index({}, "x", "y")) == ["x", "y"]


def test_the_session_is_named_run():
    """Its members are one value each; of several ranks the first one's count."""
    session = {"values": {"a": 1}, "rng": {"torch": "AA"}}

    assert names(index({}, session=session), index({}, session=session, rank=1)) == ["run.values", "run.rng"]


def test_two_paths_that_are_spelled_alike_keep_both_values():
    """A quote makes the second one different."""
    state = {"a": {"kind": "stateful", "state": {"b": 1}}, "a.b": {"kind": "value", "value": 2}}

    assert contents([index(state)], checkpoint="c").values == {"a.b": 1, "a.b'": 2}


@pytest.mark.parametrize(
    "tree",
    [
        {"kind": "module"},
        {"kind": "module", "state": [1]},
        {"kind": "dict", "items": 3},
        {"kind": "list", "items": [[1]]},
        {"kind": "optimizer", "groups": 1, "state": []},
        {"kind": "stateful", "state": {"$": "torch.wrapper", "inner": [[1, 2, 3]]}},
    ],
)
def test_a_hostile_tree_is_damage(tree):
    """A state that no program wrote ends in an error of the tree, whatever is wrong with it."""
    with pytest.raises(DamagedCheckpoint, match="c/index"):
        contents([index({"x": tree})], checkpoint="c")
