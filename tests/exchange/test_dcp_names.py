"""The names of torch.distributed.checkpoint, from and to trees."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import assume, given, strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from spotsafe.exchange.dcp_names import flatten, fqn_of, nest
from spotsafe.tensors.tree import Collector

leaves = st.one_of(
    st.builds(lambda n: torch.full((2,), float(n)), st.integers(0, 9)),
    st.integers(),
    st.text(max_size=3),
    st.none(),
    st.floats(allow_nan=False),
    st.tuples(st.integers(), st.text(max_size=2)),
)
keys = st.text("ab$[]'0 ", min_size=1, max_size=3)
nested = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, min_size=1, max_size=3),
    max_leaves=8,
)


def through_trees(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What torch flattens a state_dict to, and what our trees made of that flatten to again; paths and nodes."""
    flat, paths = flatten_state_dict(state)
    collector = Collector()
    nodes = {fqn: collector.encode(value, fqn) for fqn, value in flat.items()}
    again = flatten(nest((paths[fqn], node) for fqn, node in nodes.items()))
    return {fqn: (paths[fqn], node) for fqn, node in nodes.items()}, again


@given(st.dictionaries(keys, nested, min_size=1, max_size=4))
def test_trees_keep_every_name_path_and_value(state):
    """Whatever a program nests: the reader describes exactly what the writer was given."""
    try:
        before, after = through_trees(state)
    except ValueError:  # torch refuses two values of one name, such as {"a": {"b": 1}, "a.b": 2}
        assume(False)

    assert after == before


def test_a_dict_of_tensors_is_a_module_and_a_list_stays_a_list():
    """So a session can start with it, and its positions are numbers again."""
    node = {"$": "tensor", "name": "x"}

    trees = nest([(("m", "a.b"), node), (("l", 0, "t"), node), (("l", 1), 5), (("n",), 3), (("t",), node)])

    assert trees == {
        "m": {"kind": "module", "state": {"a.b": node}, "frozen": None, "metadata": {}},
        "l": {"kind": "value", "value": [{"t": node}, 5]},
        "n": {"kind": "value", "value": 3},
        "t": {"kind": "tensor", "value": node, "requires_grad": False},
    }
    assert {fqn: path for fqn, (path, _) in flatten(trees).items()} == {
        "m.a.b": ("m", "a.b"), "l.0.t": ("l", 0, "t"), "l.1": ("l", 1), "n": ("n",), "t": ("t",),
    }  # fmt: skip
    assert fqn_of(("l", 0, "t")) == "l.0.t"


def test_state_of_an_optimizer_has_the_names_of_torch():
    """The tracked name of the module is left out, as in `get_optimizer_state_dict`."""
    node = {"$": "tensor", "name": "x"}
    trees = {
        "net": {"kind": "module", "state": {"w": node}, "frozen": [], "metadata": {}},
        "opt": {
            "kind": "optimizer", "class": "SGD", "order": [["net.w"], ["alone"]], "form": "by name",
            "groups": [{"lr": 0.1}, {"lr": 0.2}], "state": [["net.w", {"momentum_buffer": node}]],
            "shared": {}, "extra": {}, "on_host": [],
        },
    }  # fmt: skip

    assert {fqn: value for fqn, (_, value) in flatten(trees).items()} == {
        "net.w": node, "opt.state.w.momentum_buffer": node, "opt.param_groups.0.lr": 0.1,
        "opt.param_groups.0.params": ["w"], "opt.param_groups.1.lr": 0.2, "opt.param_groups.1.params": ["alone"],
    }  # fmt: skip
