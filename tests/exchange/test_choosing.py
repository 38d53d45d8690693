"""Entries of a foreign file under the names that the program uses."""

from __future__ import annotations

from typing import Any

import pytest

from spotsafe.exchange.choosing import choose_entries

LIGHTNING: dict[str, Any] = {
    "state_dict": {"w": 1},
    "optimizer_states": [{"a": 1}, {"b": 2}],
    "loops": {"fit": {"done": 3}},
    "pytorch-lightning_version": "2.0",
}


def chosen(**options: Any) -> dict[str, Any]:
    return choose_entries(LIGHTNING, **{"rename": {}, "only": (), "path": "x.ckpt", **options})


def test_nothing_asked_for_nothing_changed():
    """All entries by their own names."""
    assert chosen() == LIGHTNING


def test_entries_and_what_is_inside_of_them_get_names():
    """A list is left without what was taken out, and gone with the last of it. The file's values do not change."""
    one = chosen(rename={"state_dict": "model", "optimizer_states.0": "optimizer"})
    both = chosen(
        rename={"optimizer_states.0": "first", "optimizer_states.1": "second", "loops.fit.done": "step"}
    )

    assert list(one) == ["model", "optimizer", "optimizer_states", "loops", "pytorch-lightning_version"]
    assert (one["optimizer"], one["optimizer_states"]) == ({"a": 1}, [{"b": 2}])
    assert both == {
        "first": {"a": 1}, "second": {"b": 2}, "step": 3, "state_dict": {"w": 1}, "pytorch-lightning_version": "2.0",
    }  # fmt: skip
    assert LIGHTNING["optimizer_states"] == [{"a": 1}, {"b": 2}]
    assert LIGHTNING["loops"] == {"fit": {"done": 3}}


def test_only_what_is_wanted():
    """By the new names."""
    assert chosen(rename={"state_dict": "model"}, only=["model"]) == {"model": {"w": 1}}


def test_a_name_with_dots_is_a_name_first():
    """An entry may be called so."""
    assert choose_entries({"a.b": 1, "a": {"b": 2}}, rename={"a.b": "x"}, only=(), path="p") == {
        "x": 1,
        "a": {"b": 2},
    }


def test_names_can_be_exchanged():
    """All entries are taken out before any is put back."""
    assert choose_entries({"a": 1, "b": 2}, rename={"a": "b", "b": "a"}, only=(), path="p") == {
        "b": 1,
        "a": 2,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rename": {"model": "m"}},
            "x.ckpt has no 'model'; there is 'state_dict', 'optimizer_states', 'loops'",
        ),
        ({"rename": {"optimizer_states.2": "m"}}, "has no 'optimizer_states.2'; there is '0', '1'"),
        ({"rename": {"state_dict.w.x": "m"}}, "has no 'state_dict.w.x'; there is nothing"),
        ({"rename": {"state_dict": "loops"}}, "has a 'loops' of its own"),
        ({"rename": {"state_dict": "m", "loops": "m"}}, "two entries would be called 'm'"),
        ({"only": ["model"]}, "has no 'model'; it holds 'state_dict'"),
    ],
)
def test_mistakes_are_named(options, message):
    """With what there is to choose from."""
    with pytest.raises(ValueError, match=message):
        chosen(**options)


def test_a_long_list_is_cut():
    """A flat file may have thousands of names."""
    with pytest.raises(ValueError, match=r"'19' and 80 more$"):
        choose_entries({str(at): at for at in range(100)}, rename={"x": "y"}, only=(), path="p")
