"""Which saved parameter group belongs to which live one: by the names in them, whatever their order. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_SHOWN = 3


def match_groups(
    saved: Sequence[Sequence[str]], live: Sequence[Sequence[str]]
) -> tuple[list[int | None], list[str]]:
    """Find for each live group the saved one with most of its parameters.

    Args:
        saved: names of the parameters of each saved group.
        live: names of the parameters of each live group.

    Returns:
        For each live group the position of its saved group, or None; and every difference, one line each:
        groups without a counterpart, parameters that are missing, new, or in another group.
    """
    home = {name: number for number, names in enumerate(saved) for name in names}
    votes = Counter(
        (number, home[name]) for number, names in enumerate(live) for name in names if name in home
    )
    match: list[int | None] = [None] * len(live)
    free = set(range(len(saved)))
    # Most parameters in common first; among equals the same place.
    for number, found in sorted(votes, key=lambda pair: (-votes[pair], pair[0] != pair[1], pair)):
        if match[number] is None and found in free:
            match[number] = found
            free.discard(found)
    _match_empty(saved, live, match, free)
    return match, [*_group_problems(saved, live, match, free), *_parameter_problems(live, home, match)]


def _match_empty(
    saved: Sequence[Sequence[str]], live: Sequence[Sequence[str]], match: list[int | None], free: set[int]
) -> None:
    """Groups without parameters have no names to go by; they are matched in their order."""
    empty = sorted(number for number in free if not saved[number])
    for number, names in enumerate(live):
        if not names and empty:
            found = empty.pop(0)
            match[number] = found
            free.discard(found)


def _group_problems(
    saved: Sequence[Sequence[str]],
    live: Sequence[Sequence[str]],
    match: Sequence[int | None],
    free: set[int],
) -> list[str]:
    counts = f"({len(saved)} saved, {len(live)} in the program)"
    extra = [
        f"parameter group {number} ({_some(live[number])}) is not in the checkpoint {counts}"
        for number, found in enumerate(match)
        if found is None
    ]
    missing = [
        f"saved parameter group {number} ({_some(saved[number])}) is not in the program {counts}; "
        "add it with add_param_group before the session, or before run.track"
        for number in sorted(free)
    ]
    return extra + missing


def _parameter_problems(
    live: Sequence[Sequence[str]], home: dict[str, int], match: Sequence[int | None]
) -> list[str]:
    problems = []
    seen = {name for names in live for name in names}
    for number, names in enumerate(live):
        if match[number] is None:
            continue
        for name in names:
            if name not in home:
                problems.append(f"{name} (group {number}) is in the program, not in the checkpoint")
            elif home[name] != match[number]:
                problems.append(f"{name} was saved in group {home[name]}, and is in group {number} now")
    matched = {found for found in match if found is not None}
    problems += [
        f"{name} (saved group {group}) is in the checkpoint, not in the program"
        for name, group in home.items()
        if name not in seen and group in matched
    ]
    return problems


def _some(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more if names else "empty"
