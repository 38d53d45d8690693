"""The memory that saves are staged in: two steps never share a slot."""

from __future__ import annotations

import pytest

from spotsafe import slots as slots_module
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.policy.staging_memory import LEAST_BYTES, STREAM_BYTES, SlotChoice
from spotsafe.slots import Slots
from spotsafe.writer.arena import Arena

PAGE = 4096


def name(number: int) -> CheckpointName:
    return CheckpointName(1, number, number, "00000000")


class Chosen:
    """Says how many slots there are, and remembers what it was asked."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, list[tuple[int, int]]()

    def __call__(self, needed: int, beside: int) -> SlotChoice:
        self.asked.append((needed, beside))
        return SlotChoice(count=self.count, size=needed)


def slots(count: int) -> tuple[Slots, Chosen]:
    chosen = Chosen(count)
    return Slots(choose=chosen, shared=False), chosen


def test_each_save_has_a_slot_of_its_own() -> None:
    """Two are there, so a third has to wait until one of the first is given back."""
    both, chosen = slots(2)
    assert (both.free, both.count) == (1, 1)  # before anybody knows more
    assert both.prepare(PAGE, beside=5) == SlotChoice(count=2, size=PAGE)
    one = both.take(name(1))
    assert both.prepare(PAGE) is not None
    two = both.take(name(2))
    assert one.arena is not two.arena
    assert (both.free, both.saves, both.prepare(PAGE)) == (0, (name(1), name(2)), None)
    with pytest.raises(AssertionError, match="never share"):
        both.take(name(3))
    both.give_back(name(1))
    both.give_back(name(1))
    assert both.take(name(3)).arena is one.arena
    assert chosen.asked == [(PAGE, 5)]
    both.close(idle=True)


def test_the_second_is_made_when_it_is_needed() -> None:
    """Who never saves twice at once pays for one."""
    both, _ = slots(2)
    both.prepare(PAGE)
    arenas = set()
    for number in range(3):
        arenas.add(both.take(name(number)).arena.number)
        both.give_back(name(number))
    assert len(arenas) == 1
    both.close(idle=True)


def test_a_state_that_has_grown_waits_for_the_others() -> None:
    """Its slots take the place of the old ones: both at once would be more memory than was chosen."""
    both, chosen = slots(2)
    both.prepare(PAGE)
    small = both.take(name(1)).arena
    assert both.prepare(3 * PAGE) is None
    both.give_back(name(1))
    assert both.prepare(3 * PAGE) == SlotChoice(count=2, size=3 * PAGE)
    with pytest.raises(ValueError, match="released"):
        small.view[:1]
    assert both.take(name(2)).arena.size == 3 * PAGE
    assert both.prepare(PAGE) is not None  # one that has shrunk stays where it is
    assert chosen.asked == [(PAGE, 0), (3 * PAGE, 0)]
    both.close(idle=True)


def test_what_is_staged_beside_a_slot_is_not_kept() -> None:
    """It may be as large as a model, and is needed once in many saves."""
    one, _ = slots(1)
    one.prepare(PAGE)
    lease = one.take(name(1))
    lease.beside = one.new(PAGE)
    view = lease.beside.view
    one.give_back(name(1))
    with pytest.raises(ValueError, match="released"):
        view[:1]
    assert len(lease.arena.view) == PAGE
    one.close(idle=True)


def test_what_is_being_written_from_is_not_closed() -> None:
    """Everything else is."""
    both, _ = slots(2)
    both.prepare(PAGE)
    unused, used = both.take(name(1)).arena, both.take(name(2)).arena
    both.give_back(name(1))
    both.close(idle=False)
    assert len(used.view) == PAGE
    with pytest.raises(ValueError, match="released"):
        unused.view[:1]
    both.close(idle=True)
    with pytest.raises(ValueError, match="released"):
        used.view[:1]


def test_memory_is_touched_before_the_first_save_only() -> None:
    """It is what that save is staged in; nothing is where the state is streamed, or once a slot is there."""
    both, _ = slots(2)
    both.prepare(PAGE)
    both.touch()
    [arena] = both._unused
    both.touch()
    assert both._unused == [arena]
    assert both.take(name(1)).arena is arena
    both.touch()
    assert both._unused == []
    both.close(idle=True)
    streaming = Slots(
        choose=lambda needed, beside: SlotChoice(count=1, size=needed, streams=True), shared=False
    )
    streaming.prepare(64 << 20)
    streaming.touch()
    assert [one._touching for one in streaming._unused] == [None]
    streaming.close(idle=True)


@pytest.fixture
def granted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that the system grants to all slots together, to be set; it takes nothing back."""
    left = [0]

    def arena(size: int, *, shared: bool) -> Arena:
        if size > left[0]:
            raise MemoryError(f"no {size} bytes")
        left[0] -= size
        return Arena(PAGE, shared=shared)

    monkeypatch.setattr(slots_module, "Arena", arena)
    return left


def test_one_has_to_do_where_the_system_grants_no_second(granted: list[int]) -> None:
    """What was chosen is a guess; the save waits for the slot that is there."""
    granted[0] = 3 * PAGE
    both, _ = slots(2)
    assert both.prepare(2 * PAGE) == SlotChoice(count=2, size=2 * PAGE)
    both.take(name(1))
    assert both.free == 1
    assert both.prepare(2 * PAGE) is None
    assert (both.free, both.count) == (0, 1)
    both.give_back(name(1))
    assert both.prepare(2 * PAGE) == SlotChoice(count=1, size=2 * PAGE)
    both.close(idle=True)


def test_a_state_is_streamed_where_the_system_grants_no_slot(granted: list[int]) -> None:
    """Through the largest that it does grant; when it grants more, all of it is staged again."""
    one, chosen = slots(1)
    granted[0] = STREAM_BYTES // 4
    size = 4 * STREAM_BYTES
    assert one.prepare(size) == SlotChoice(count=1, size=STREAM_BYTES // 4, streams=True)
    granted[0] = 2 * size
    assert one.prepare(size) == SlotChoice(count=1, size=size)
    one.take(name(1))
    one.give_back(name(1))
    assert one.prepare(size) == SlotChoice(count=1, size=size)
    assert set(chosen.asked) == {(size, 0)}
    one.close(idle=True)


def test_where_not_even_the_smallest_is_granted(granted: list[int]) -> None:
    """That is an error, and nothing is left of the attempt."""
    one, _ = slots(1)
    granted[0] = LEAST_BYTES - 1
    with pytest.raises(MemoryError):
        one.prepare(STREAM_BYTES)
    granted[0] = STREAM_BYTES
    assert one.prepare(STREAM_BYTES) == SlotChoice(count=1, size=STREAM_BYTES)
    one.close(idle=True)
