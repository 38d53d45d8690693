"""A saved tree is looked at before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest

import spotsafe
from spotsafe.tensors.forms import form_problem
from tests.security.forging import forge_index, trained
from tests.session.rig import Program

MODULE = {"state": {}, "frozen": None, "metadata": {}}
OPTIMIZER = {
    "class": "SGD", "form": "by name", "order": [["w"]], "groups": [{}], "state": [["w", {}]], "shared": {},
    "extra": {"$": "dict", "items": []}, "on_host": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("module", MODULE, {"state": []}),
        ("module", MODULE, {"frozen": [[]]}),
        ("module", MODULE, {"metadata": {"$": "tuple", "items": []}}),
        ("module", MODULE, {"metadata": {"layer": {"$": "str"}}}),
        ("optimizer", OPTIMIZER, {"class": 1}),
        ("optimizer", OPTIMIZER, {"form": "by chance"}),
        ("optimizer", OPTIMIZER, {"order": [[{}]]}),
        ("optimizer", OPTIMIZER, {"groups": {}}),
        ("optimizer", OPTIMIZER, {"state": [["w"]]}),
        ("optimizer", OPTIMIZER, {"extra": {"$": "set", "items": []}}),
        ("optimizer", OPTIMIZER, {"on_host": None}),
        ("list", {"items": [[0, {}]]}, {"items": [[0, {}, 1]]}),
    ],
)
def test_a_form(kind: str, good: dict[str, Any], bad: dict[str, Any]) -> None:
    """What a kind makes passes; one wrong member, and each one missing, does not."""
    assert form_problem(kind, good) is None
    assert form_problem(kind, {**good, **bad})
    for missing in good:
        assert form_problem(kind, {key: one for key, one in good.items() if key != missing})


def test_nothing_changes_before_a_wrong_form_is_found(tmp_path):
    """The last object's tree is wrong: the first one has not been touched by then."""
    run = trained(tmp_path / "run", steps=1)
    forge_index(run, lambda index: index["state"]["optimizer"].pop("on_host"))
    program = Program()
    before = program.weights()
    with pytest.raises(spotsafe.StateMismatch, match="no proper optimizer"), program.session(run):
        pytest.fail("it started")
    assert program.weights() == before
