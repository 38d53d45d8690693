"""State of optimizers in torch's own forms."""

from __future__ import annotations

from spotsafe.exchange.optimizers import by_name, by_position, in_module, is_optimizer_tree, parts_of

ORDER = [["m.b", "m.a"], ["n.c"]]
PARTS = {
    "groups": [{"lr": 0.1}, {"lr": 0.2}],
    "state": [["m.a", {"step": 1}], ["n.c", {"step": 2}]],
    "shared": {"K": 3},
    "extra": {"scale": 4},
}


def test_by_position_parameters_are_numbered_over_all_groups():
    """In the order of the groups, as torch numbers them."""
    assert by_position(ORDER, PARTS) == {
        "state": {1: {"step": 1}, 2: {"step": 2}, "K": 3},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}],
        "scale": 4,
    }


def test_by_name_they_are_called_as_in_their_module():
    """Without the name under which the module was tracked."""
    assert by_name(ORDER, PARTS, modules=["m", "n"]) == {
        "state": {"a": {"step": 1}, "c": {"step": 2}, "K": 3},
        "param_groups": [{"lr": 0.1, "params": ["b", "a"]}, {"lr": 0.2, "params": ["c"]}],
    }
    assert in_module("alone", ["m"]) == "alone"


def test_which_trees_are_meant():
    """State by position of a class that torch does not know is none of them."""
    tree = {"kind": "optimizer", "form": "by name", "order": ORDER, **PARTS}

    assert is_optimizer_tree(tree)
    assert parts_of(tree) == PARTS
    assert not is_optimizer_tree({"kind": "optimizer", "form": "by position", "state": 1})
    assert not is_optimizer_tree({"kind": "module"})
