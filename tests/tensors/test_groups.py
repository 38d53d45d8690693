"""Matching saved parameter groups with live ones, by names."""

from __future__ import annotations

from hypothesis import given, strategies as st

from spotsafe.tensors.groups import match_groups


def test_equal_groups_match_in_place() -> None:
    """The ordinary resume."""
    assert match_groups([["a", "b"], ["c"]], [["a", "b"], ["c"]]) == ([0, 1], [])


def test_another_order_is_no_difference() -> None:
    """Neither the order of groups nor that inside a group matters."""
    assert match_groups([["a", "b"], ["c"]], [["c"], ["b", "a"]]) == ([1, 0], [])


def test_a_live_group_too_many_is_named() -> None:
    """A group that was added in the program says so with its parameters."""
    match, problems = match_groups([["a"]], [["a"], ["b"]])
    assert match == [0, None]
    assert problems == ["parameter group 1 (b) is not in the checkpoint (1 saved, 2 in the program)"]


def test_a_saved_group_too_many_is_named() -> None:
    """A group that was added later in the run says what to do."""
    match, problems = match_groups([["a"], ["b", "c", "d", "e"]], [["a"]])
    assert match == [0]
    assert len(problems) == 1
    assert "saved parameter group 1 (b, c, d, ...)" in problems[0]
    assert "add_param_group" in problems[0]


def test_parameters_that_moved_are_named() -> None:
    """A parameter in another group would get other options; that is a difference."""
    match, problems = match_groups([["a", "b"], ["c"]], [["a"], ["b", "c"]])
    assert match == [0, 1]
    assert problems == ["b was saved in group 0, and is in group 1 now"]


def test_missing_and_new_parameters_are_named() -> None:
    """Each parameter that only one side has is one line."""
    match, problems = match_groups([["a", "b"]], [["a", "c"]])
    assert match == [0]
    assert sorted(problems) == [
        "b (saved group 0) is in the checkpoint, not in the program",
        "c (group 0) is in the program, not in the checkpoint",
    ]


def test_empty_groups_match_by_order() -> None:
    """Groups that hold nothing yet have only their order."""
    assert match_groups([[], ["a"], []], [["a"], [], []]) == ([1, 0, 2], [])
    assert match_groups([], []) == ([], [])


NAMES = st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True), max_size=4)


@given(NAMES, st.randoms(use_true_random=False))
def test_a_shuffle_is_always_found(groups: list[list[str]], random: object) -> None:
    """However groups and parameters are shuffled, each finds its own and nothing is reported."""
    seen: set[str] = set()
    saved = []
    for group in groups:
        saved.append([name for name in group if name not in seen])
        seen.update(group)
    order = list(range(len(saved)))
    random.shuffle(order)  # type: ignore[attr-defined] # hypothesis gives a Random
    live = [list(reversed(saved[number])) for number in order]
    match, problems = match_groups(saved, live)
    assert problems == []
    assert all(set(live[at]) == set(saved[found]) for at, found in enumerate(match) if found is not None)
    assert None not in match


@given(NAMES, NAMES)
def test_no_two_live_groups_share_a_saved_one(saved: list[list[str]], live: list[list[str]]) -> None:
    """Whatever the groups, a saved one is used once."""
    match, _ = match_groups(saved, live)
    used = [found for found in match if found is not None]
    assert len(used) == len(set(used))
