"""Every order of the storage operations of a few processes, not a sample of them.

Two processes of forty operations each can be interleaved in 10^23 ways, but many of these ways meet: what can
still happen depends on nothing but what is stored, on where each process stands, and on what the rules remember.
Where a process stands is the list of the answers that it got, since the same answers make it do the same. So each
such state is visited once, and how many orders lead through it is counted. Nothing is left out: no two operations
are taken to be independent, and no state to be like another unless it is equal.

The code of a process runs only when it gets an answer that it never got at that place, so that millions of states
cost a few thousand runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from spotsafe.testing.cloud import DEAD, DONE, STALE, WRONG, Cloud, land, may, perform
from spotsafe.testing.parking import Answer, Body, Process, Request
from spotsafe.testing.schedules import LANDING, Broken, Choice, Scenario, Step, replay, shrink, silence


@dataclass(slots=True)
class Explored:
    """What a search went through."""

    orders: int = 0
    """Schedules, each a different sequence of choices."""
    states: int = 0
    steps: int = 0
    """Ways from a state to the next."""
    ends: int = 0
    """States in which nobody goes on."""
    runs: int = 0
    """How often the code of a process ran from one operation to the next."""


def every_interleaving(scenario: Scenario, *, at_most: int = 10_000_000) -> Explored:
    """Go through every schedule of a scenario, with every fault that it allows, at every place.

    Args:
        scenario: what runs; its listings cannot be stale, or a state would be its whole history.
        at_most: states.

    Raises:
        Broken: a schedule broke a rule; made as short as leaving out can make it.
        ValueError: the scenario has stale listings, processes that follow each other, or some with hearts.
        RuntimeError: there are more states, or a process did not do the same when it got the same answers.
    """
    if scenario.faults.get(STALE):
        raise ValueError(
            "stale listings make every history a state of its own; leave them to random schedules"
        )
    if scenario.after or scenario.beats is not None:
        raise ValueError("processes that follow each other or have hearts are left to random schedules")
    walk = _Walk(scenario, at_most)
    with silence():
        try:
            walk.explored.orders = walk.orders(walk.start())
        except Broken:
            try:
                replay(scenario, walk.path)
            except Broken as broken:
                raise shrink(scenario, broken) from None
            raise
        finally:
            walk.close()
    return walk.explored


class _Node:
    """Where a process stands: behind a list of answers."""

    __slots__ = ("answer", "children", "error", "notes", "parent", "request")

    def __init__(self, process: Process, *, parent: _Node | None = None, answer: Answer = None) -> None:
        self.request = process.request
        self.notes = tuple(process.noted)
        self.error = process.error
        self.parent = parent
        self.answer = answer
        self.children: dict[Answer, _Node] = {}


class _Tree:
    """What a process does, as far as it is known: one branch for each answer that it ever got at a place."""

    def __init__(self, name: str, body: Body) -> None:
        self.runs = 0
        self._name, self._body = name, body
        self._live = Process(name, body)
        self.root = self._at = _Node(self._live)

    def after(self, node: _Node, answer: Answer) -> _Node:
        """Where the process stands once it has got the answer."""
        known = node.children.get(answer)
        if known is None:
            known = node.children[answer] = self._grow(node, answer)
        return known

    def close(self) -> None:
        """End the process."""
        self._live.kill()

    def _grow(self, node: _Node, answer: Answer) -> _Node:
        self.runs += 1
        if self._at is not node:
            self._live.kill()
            self._live = Process(self._name, self._body, answers=_answers(node))
            if self._live.request != node.request:
                raise RuntimeError(
                    f"{self._name} got the same answers and asks for {self._live.request}, not for "
                    f"{node.request}: it depends on something else than its store"
                )
        self._live.answer(answer)
        self._at = _Node(self._live, parent=node, answer=answer)
        return self._at


def _answers(node: _Node) -> list[Answer]:
    answers = []
    while node.parent is not None:
        answers.append(node.answer)
        node = node.parent
    return answers[::-1]


@dataclass(frozen=True, slots=True)
class _State:
    cloud: Cloud
    nodes: tuple[_Node | None, ...]
    """By process; None for one that is dead."""
    memory: Any
    left: tuple[int, ...]
    """How often each fault may still happen, and how many of them together."""
    wrong: frozenset[str] = frozenset()

    @property
    def key(self) -> Hashable:
        objects = frozenset(self.cloud.objects.items())
        return (objects, self.cloud.late, self.nodes, self.memory, self.left, self.wrong)


class _Walk:
    def __init__(self, scenario: Scenario, at_most: int) -> None:
        self.explored = Explored()
        self.path: list[Choice] = []
        self._scenario = scenario
        self._at_most = at_most
        self._fates = list(scenario.faults)
        self._names = list(scenario.bodies)
        self._trees = [_Tree(name, body) for name, body in scenario.bodies.items()]
        self._known: dict[Hashable, int] = {}

    def start(self) -> _State:
        scenario = self._scenario
        together = min(scenario.faults_together, sum(scenario.faults.values()))
        return _State(
            cloud=Cloud(scenario.objects),
            nodes=tuple(tree.root for tree in self._trees),
            memory=scenario.rules.begin(scenario.objects),
            left=(*scenario.faults.values(), together),
        )

    def close(self) -> None:
        self.explored.runs = sum(tree.runs for tree in self._trees)
        for tree in self._trees:
            tree.close()

    def orders(self, state: _State) -> int:
        """How many schedules go on from here, all of which are looked at."""
        key = state.key
        known = self._known.get(key)
        if known is not None:
            return known
        self.explored.states += 1
        if self.explored.states > self._at_most:
            raise RuntimeError(f"more than {self._at_most} states")
        count = 0
        if not any(node is not None and node.request is not None for node in state.nodes):
            self._scenario.rules.end(state.memory, state.cloud.objects)
            self.explored.ends += 1
            count = 1  # what is under way may also never land
        for choice in self._choices(state):
            self.path.append(choice)
            self.explored.steps += 1
            count += self.orders(self._take(state, choice))
            self.path.pop()
        self._known[key] = count
        return count

    def _choices(self, state: _State) -> Iterator[Choice]:
        for name, node in zip(self._names, state.nodes, strict=True):
            if node is None or node.request is None:
                continue
            yield Choice(name)
            if state.left[-1]:
                yield from self._faults(state, name, node.request)
        for place in range(len(state.cloud.late)):
            yield Choice(LANDING, place=place)

    def _faults(self, state: _State, name: str, request: Request) -> Iterator[Choice]:
        for fate, left in zip(self._fates, state.left, strict=False):
            if not left or not may(fate, request) or (fate == WRONG and request.path in state.wrong):
                continue
            choice = Choice(name, fate)
            if self._scenario.rules.tolerates(state.memory, state.cloud, choice, request):
                yield choice

    def _take(self, state: _State, choice: Choice) -> _State:
        before = state.cloud.objects
        if choice.who == LANDING:
            late = state.cloud.late[choice.place]
            cloud = land(state.cloud, choice.place)
            step = Step(choice, late.who, late.request, None, before, cloud.objects)
            memory = self._scenario.rules.after(state.memory, step)
            return _State(cloud, state.nodes, memory, state.left, state.wrong)
        place = self._names.index(choice.who)
        node = state.nodes[place]
        assert node is not None
        assert node.request is not None
        cloud, answer = perform(state.cloud, choice.who, node.request, fate=choice.fate)
        cloud = Cloud(cloud.objects, cloud.late)
        step = Step(choice, choice.who, node.request, answer, before, cloud.objects)
        then = None
        if answer is not DEAD:
            then = self._trees[place].after(node, answer)
            step = replace(step, notes=then.notes, ended=then.request is None, error=then.error)
        memory = self._scenario.rules.after(state.memory, step)
        left, wrong = state.left, state.wrong
        if choice.fate != DONE:
            spent = self._fates.index(choice.fate)
            left = (*(n - (i in {spent, len(left) - 1}) for i, n in enumerate(left)),)
            wrong = wrong | {node.request.path} if choice.fate == WRONG else wrong
        return _State(cloud, (*state.nodes[:place], then, *state.nodes[place + 1 :]), memory, left, wrong)
