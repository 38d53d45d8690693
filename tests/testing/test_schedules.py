"""The search itself: it finds what is there to be found, repeats it, and shortens it."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spotsafe.errors import StorageNotFound, StorageUnavailable
from spotsafe.identity import new_nonce
from spotsafe.testing.cloud import Cloud, Objects
from spotsafe.testing.interleavings import every_interleaving
from spotsafe.testing.parking import Body, Killed, Machine, Process, Request
from spotsafe.testing.schedules import (
    Broken,
    Choice,
    Dice,
    Run,
    Scenario,
    Step,
    replay,
    run_schedule,
    search,
)


class Anything:
    """No rule at all; remembers nothing."""

    def begin(self, objects: Objects) -> Hashable:
        return None

    def tolerates(self, memory: Any, cloud: Cloud, choice: Choice, request: Request) -> bool:
        return True

    def after(self, memory: Any, step: Step) -> Hashable:
        return memory

    def end(self, memory: Any, objects: Objects) -> None:
        pass


class CountsUp(Anything):
    """A counter that two processes add to must not lose what was added."""

    def begin(self, objects: Objects) -> Hashable:
        return 0

    def after(self, memory: Any, step: Step) -> Hashable:
        return memory + len(step.notes)

    def end(self, memory: Any, objects: Objects) -> None:
        if int(objects["count"]) != memory:
            raise Broken(f"{memory} were added, and the count is {objects['count'].decode()}")


def add_one(machine: Machine) -> None:
    """Read, add, write: a race."""
    count = int(machine.store.read("count", max_bytes=10))
    machine.store.replace("count", str(count + 1).encode())
    machine.note("added")


def writes(times: int) -> Body:
    """Write so many objects of one's own."""

    def body(machine: Machine) -> None:
        for number in range(times):
            machine.store.put(f"{new_nonce()}-{number}", b"")

    return body


COUNTER = Scenario(
    bodies={"a": add_one, "b": add_one, "noise": writes(3)}, rules=CountsUp(), objects={"count": b"0"}
)


def test_a_race_is_found_and_made_short() -> None:
    """Two processes that read, add and write lose an update; the schedule that shows it has what is needed."""
    with pytest.raises(Broken, match="2 were added, and the count is 1") as found:
        search(COUNTER, seeds=range(1000))
    shown = [str(choice) for choice in found.value.choices if choice.who != "noise"]
    assert sorted(shown) == ["a", "a", "b", "b"]
    assert shown[0] != shown[1]
    assert "replace count" in str(found.value)


def test_a_schedule_can_be_repeated() -> None:
    """The choices in the message, pasted, lead to the same failure; other choices do not."""
    with pytest.raises(Broken, match="the count is 1"):
        replay(COUNTER, ["a", "b", "a", "b"])
    assert replay(COUNTER, ["a", "a", "b", "b"]).cloud.objects["count"] == b"2"


def test_a_seed_is_a_schedule() -> None:
    """The same seed gives the same steps, and seeds differ."""
    scenario = Scenario(
        bodies={"a": writes(5), "b": writes(5)},
        rules=Anything(),
        faults={"kill": 1, "lost": 1, "late": 1, "fail": 1},
    )
    traces = [
        "\n".join(map(str, run_schedule(scenario, Dice(scenario, seed)).steps))
        for seed in (*range(20), *range(20))
    ]
    assert traces[:20] == traces[20:]
    assert len(set(traces)) > 5


def outcomes(fate: str, body: Body, *, objects: Objects | None = None) -> tuple[Run, list[Any]]:
    """Run a process whose first operation comes out that way."""
    scenario = Scenario(bodies={"a": body}, rules=Anything(), objects=objects or {}, faults={fate: 1})
    run = replay(scenario, [Choice("a", fate, 1 if fate == "stale" else 0)])
    return run, [note for step in run.steps for note in step.notes]


def puts(machine: Machine) -> None:
    """Try to write, and tell how it went."""
    try:
        machine.store.put("a", b"ab")
        machine.note("written")
    except StorageUnavailable:
        machine.note("no answer")


@pytest.mark.parametrize(
    ("fate", "stored", "told"),
    [
        ("fail", None, [("no answer",)]),
        ("lost", b"ab", [("no answer",)]),
        ("late", None, [("no answer",)]),
        ("kill", None, []),
        ("kill-done", b"ab", []),
        ("kill-late", None, []),
        ("short", b"a", [("written",)]),
    ],
)
def test_what_may_become_of_a_write(fate: str, stored: bytes | None, told: list[Any]) -> None:
    """Each fate does what it says, to the store and to the process."""
    run, notes = outcomes(fate, puts)
    assert run.cloud.objects.get("a") == stored
    assert notes == told
    assert [late.request.path for late in run.cloud.late] == (["a"] if fate.endswith("late") else [])


def test_what_is_late_lands() -> None:
    """An effect under way happens when the scheduler says so, also after the process has ended."""
    scenario = Scenario(bodies={"a": puts}, rules=Anything(), faults={"late": 1})
    assert replay(scenario, ["a late", "land"]).cloud.objects == {"a": b"ab"}


def test_what_may_become_of_a_read() -> None:
    """One bit is wrong, and only this once; a lie keeps what it says it deleted."""

    def reads(machine: Machine) -> None:
        machine.note(machine.store.read("a", max_bytes=3), machine.store.read("a", max_bytes=3))

    run, notes = outcomes("wrong", reads, objects={"a": b"abc"})
    assert notes == [(b"acc", b"abc")]
    assert run.cloud.objects == {"a": b"abc"}
    run, _ = outcomes("lie", lambda machine: machine.store.delete("a"), objects={"a": b""})
    assert run.cloud.objects == {"a": b""}


def test_listings_of_earlier() -> None:
    """A stale listing shows the moment before; a blind one nothing."""

    def lists(machine: Machine) -> None:
        machine.store.put("a", b"")
        machine.note(machine.store.names(""), [entry.path for entry in machine.store.list("")])

    scenario = Scenario(bodies={"a": lists}, rules=Anything(), faults={"stale": 1, "blind": 1})
    for fate in ("stale 1", "blind"):
        assert replay(scenario, ["a", f"a {fate}"]).steps[-1].notes == (([], ["a"]),)


def test_a_dead_process_does_nothing_any_more() -> None:
    """Not even in a `finally` or behind an `except`."""

    def stubborn(machine: Machine) -> None:
        try:
            machine.store.put("a", b"")
        except BaseException:
            machine.note("alive")
        with pytest.raises(Killed):
            machine.store.put("b", b"")

    run, notes = outcomes("kill", stubborn)
    assert run.cloud.objects == {}
    assert notes == []


def test_damage_and_loss_are_steps() -> None:
    """A disk and a person are processes like any other."""

    def harm(machine: Machine) -> None:
        machine.damage("a")
        machine.lose("b")

    run = replay(Scenario(bodies={"a": harm}, rules=Anything(), objects={"a": b"a", "b": b"b"}), [])
    assert run.cloud.objects == {"a": b"`"}


def test_errors_of_a_process_are_told() -> None:
    """What its code raises ends it, and the rules see it."""

    def fails(machine: Machine) -> None:
        machine.store.size("nothing")

    step = replay(Scenario(bodies={"a": fails}, rules=Anything()), []).steps[-1]
    assert step.ended
    assert isinstance(step.error, StorageNotFound)
    assert "StorageNotFound" in str(step)


def test_a_process_has_one_thread() -> None:
    """A second one could come in any order; it gets an error instead of a place in the schedule."""

    def forks(machine: Machine) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(machine.store.names, "").result()

    with pytest.raises(RuntimeError, match="second thread"):
        Process("a", forks)


def test_code_that_fails_before_its_first_operation_is_a_mistake() -> None:
    """It would be in no schedule, and a search would prove nothing."""

    def broken(machine: Machine) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        search(Scenario(bodies={"a": broken}, rules=Anything()), seeds=range(1))


# -- all orders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(0, 3), (1, 1), (4, 4), (8, 8)])
def test_all_orders_are_counted(first: int, second: int) -> None:
    """As many as there are ways to merge two sequences."""
    scenario = Scenario(bodies={"a": writes(first), "b": writes(second)}, rules=Anything())
    explored = every_interleaving(scenario)
    assert explored.orders == math.comb(first + second, first)
    assert explored.states == (first + 1) * (second + 1)


def test_all_orders_with_a_fault_are_counted() -> None:
    """One kill that may come before any operation of either, or not at all."""
    scenario = Scenario(bodies={"a": writes(2), "b": writes(2)}, rules=Anything(), faults={"kill": 1})
    explored = every_interleaving(scenario)
    # The kill is an event in the place of an operation: so many were done, then it, among two of the other's.
    killed = sum(math.comb(done + 1 + 2, 2) for done in (0, 1))
    assert explored.orders == math.comb(4, 2) + 2 * killed


def test_all_orders_find_the_race() -> None:
    """What one order breaks is found without luck."""
    with pytest.raises(Broken, match="the count is 1") as found:
        every_interleaving(COUNTER)
    assert found.value.choices


def test_code_that_does_not_repeat_is_an_error() -> None:
    """States are told apart by the answers that a process got; so these must decide what it does."""
    folders = iter(["", "elsewhere"])

    def restless(machine: Machine) -> None:
        machine.store.put("first", b"")
        machine.store.names(next(folders))

    with pytest.raises(RuntimeError, match="depends on something else"):
        every_interleaving(Scenario(bodies={"a": restless, "b": writes(2)}, rules=Anything()))


def test_limits_of_all_orders() -> None:
    """Too many states are an error, and so are stale listings."""
    scenario = Scenario(bodies={"a": writes(3), "b": writes(3)}, rules=Anything())
    with pytest.raises(RuntimeError, match="more than 5 states"):
        every_interleaving(scenario, at_most=5)
    with pytest.raises(ValueError, match="stale listings"):
        every_interleaving(Scenario(bodies={}, rules=Anything(), faults={"stale": 1}))


# Processes that are not alone in the world


def test_one_after_the_other() -> None:
    """Who has to wait begins when the other one has ended, or is dead, and not before."""
    scenario = Scenario(
        bodies={"a": writes(2), "b": writes(2)}, rules=Anything(), after={"b": "a"}, faults={"kill": 1}
    )
    for seed in range(30):
        order = [step.who for step in run_schedule(scenario, Dice(scenario, seed)).steps]
        assert order == sorted(order)
        assert "b" in order


def test_hearts_beat_while_somebody_rests() -> None:
    """Those of processes that live, and of no other."""

    def rests(machine: Machine) -> None:
        machine.rest()
        machine.note(*machine.store.names(""))

    def beats(_: Objects, living: Collection[str]) -> list[Request]:
        return [Request("replace", name, b"") for name in sorted(living)]

    scenario = Scenario(
        bodies={"a": rests, "b": writes(1), "c": writes(1)},
        rules=Anything(),
        beats=beats,
        faults={"kill": 1},
    )
    run = replay(scenario, ["b kill", "a"])
    assert [note for step in run.steps for note in step.notes] == [("a", "c")]
    with pytest.raises(ValueError, match="hearts"):
        every_interleaving(scenario)


def test_a_store_that_ignores_conditions() -> None:
    """It creates over what is there, and what comes late does so too."""

    def creates_twice(machine: Machine) -> None:
        store = machine.store.overwriting()
        assert store.exclusive is None
        for text in (b"one", b"two"):
            try:
                machine.note(store.create("x", text))
            except StorageUnavailable:
                machine.note("no answer")

    scenario = Scenario(bodies={"a": creates_twice}, rules=Anything(), faults={"late": 1})
    run = replay(scenario, ["a late", "a", "land"])
    assert [note for step in run.steps for note in step.notes] == [("no answer",), (True,)]
    assert run.cloud.objects["x"] == b"one"
