"""How much memory saves are staged in, from what there is."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from spotsafe.policy.staging_memory import (
    LEAST_BYTES,
    RESERVE_BYTES,
    STREAM_BYTES,
    Group,
    Memory,
    SlotChoice,
    choose_slots,
)

GIB = 1 << 30


def auto(needed: int, free: int | None, *, beside: int = 0, ranks: int = 1) -> SlotChoice:
    return choose_slots(needed, beside=beside, memory=Memory(free=free, ranks=ranks))


def test_two_only_where_there_is_plenty() -> None:
    """Both, and what is needed beside them, in half of what is left."""
    assert auto(GIB, 4 * GIB) == SlotChoice(count=2, size=GIB)
    assert auto(GIB, 4 * GIB - 1) == SlotChoice(count=1, size=GIB)
    assert auto(GIB, 4 * GIB + 1, beside=1) == SlotChoice(count=1, size=GIB)
    assert auto(GIB, 4 * GIB + 2, beside=1) == SlotChoice(count=2, size=GIB)
    assert auto(GIB, None) == SlotChoice(count=2, size=GIB)


def test_streaming_where_not_even_one_fits() -> None:
    """Beside what the writer and the next step need."""
    assert auto(GIB, GIB + RESERVE_BYTES) == SlotChoice(count=1, size=GIB)
    assert auto(GIB, GIB + RESERVE_BYTES - 1) == SlotChoice(count=1, size=STREAM_BYTES, streams=True)
    assert auto(GIB, GIB + RESERVE_BYTES, beside=1).streams
    assert auto(GIB, 4 * 40_000_000) == SlotChoice(count=1, size=1 << 25, streams=True)
    assert auto(GIB, 0) == SlotChoice(count=1, size=LEAST_BYTES, streams=True)


def test_the_ranks_of_a_machine_share_it() -> None:
    """All of them save at the same time."""
    assert auto(GIB, 8 * GIB, ranks=2).count == 2
    assert auto(GIB, 8 * GIB - 2, ranks=2).count == 1
    assert auto(GIB, 8 * GIB, ranks=8).streams


def test_the_tightest_group_decides() -> None:
    """The page cache is nobody's."""
    groups = (Group(limit=10 * GIB, used=9 * GIB, cache=5 * GIB), Group(limit=8 * GIB, used=2 * GIB))
    assert [group.left for group in groups] == [6 * GIB, 6 * GIB]
    assert Memory(free=7 * GIB, groups=groups).left == 6 * GIB
    assert Memory(free=5 * GIB, groups=groups, ranks=0).left == 5 * GIB
    assert Memory(groups=groups).left == 6 * GIB
    assert Memory(ranks=4).left is None
    assert Group(limit=1, used=5).left == 0
    assert Group(limit=4, used=1, cache=9).left == 4


@pytest.mark.parametrize(
    ("bytes_", "choice"),
    [
        (2 * GIB, SlotChoice(count=2, size=GIB)),
        (2 * GIB - 1, SlotChoice(count=1, size=GIB)),
        (GIB, SlotChoice(count=1, size=GIB)),
        (GIB - 1, SlotChoice(count=1, size=GIB - 1, streams=True)),
        (LEAST_BYTES, SlotChoice(count=1, size=LEAST_BYTES, streams=True)),
    ],
)
def test_what_the_user_gives_is_used(bytes_: int, choice: SlotChoice) -> None:
    """All of it, and not more, whatever the machine has."""
    assert choose_slots(GIB, memory=Memory(free=0), given=bytes_) == choice
    assert choose_slots(GIB, memory=Memory(), given=bytes_) == choice


def test_the_limit_of_one_process_is_shared_with_nobody() -> None:
    """A group is."""
    own = Group(limit=5 * GIB, used=GIB)
    assert Memory(own=own, ranks=8).left == 4 * GIB
    assert Memory(free=16 * GIB, own=own, ranks=8).left == 2 * GIB
    assert Memory(free=64 * GIB, own=own, ranks=8).left == 4 * GIB


def test_what_to_try_where_the_system_grants_less() -> None:
    """A quarter each time, as a power of two, down to the smallest slot; a state that is smaller has no other way."""
    choice: SlotChoice | None = SlotChoice(count=2, size=5 * GIB)
    tried = []
    while choice is not None and (choice := choice.smaller) is not None:
        assert (choice.count, choice.streams) == (1, True)
        tried.append(choice.size)
    assert tried == [STREAM_BYTES >> shift for shift in (0, 2, 4, 6)] + [LEAST_BYTES]
    assert SlotChoice(count=1, size=3 * LEAST_BYTES).smaller == SlotChoice(
        count=1, size=LEAST_BYTES, streams=True
    )
    assert SlotChoice(count=1, size=LEAST_BYTES).smaller is None


sizes = st.integers(0, 1 << 40)


@given(
    needed=st.integers(1, 1 << 40),
    beside=sizes,
    free=st.one_of(st.none(), sizes),
    ranks=st.integers(1, 16),
    bytes_=st.one_of(st.none(), st.integers(LEAST_BYTES, 1 << 40)),
)
def test_never_more_than_there_is(
    needed: int, beside: int, free: int | None, ranks: int, bytes_: int | None
) -> None:
    """Slots that do not stream hold the state, and all together fit; one that streams is small."""
    memory = Memory(free=free, ranks=ranks)
    choice = choose_slots(needed, beside=beside, memory=memory, given=bytes_)
    room = memory.left if bytes_ is None else bytes_
    assert choice.count in {1, 2}
    if not choice.streams:
        assert choice.size == needed
        assert room is None or choice.count * needed + beside <= room
    else:
        assert choice.count == 1
        assert choice.size <= (STREAM_BYTES if bytes_ is None else bytes_)


@given(needed=st.integers(1, 1 << 40), less=sizes, more=sizes)
def test_more_memory_never_gives_less(needed: int, less: int, more: int) -> None:
    """The number of slots, and whether they hold the state, grow with what is left."""
    few, many = (auto(needed, free) for free in sorted((less, more)))
    assert (not few.streams, few.count, few.size) <= (not many.streams, many.count, many.size)
