"""Run several processes over one store in every order that a seed can think of, with everything going wrong.

::

    def body(machine):              # any code that is given a store and shares nothing else
        ...machine.store...

    scenario = Scenario(bodies={"a": body, "b": body}, rules=MyRules(), faults={"kill": 1, "lost": 1})
    search(scenario, seeds=range(10_000))

Every storage operation is a switch point: which process goes on, and what becomes of its operation (`FATES` in
`cloud.py`), is a choice. `MyRules` looks at the store after every step and raises `Broken` when something is not
as it must be. Then the schedule is made as short as it can be, and the error shows it as a list of choices, which
`replay` repeats. `every_interleaving` in `interleavings.py` tries all orders of a small scenario instead.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from spotsafe.testing.cloud import DEAD, DONE, FAIL, STALE, WRONG, Cloud, Objects, land, may, perform
from spotsafe.testing.parking import Answer, Body, Failure, Process, Request

LANDING = "land"
"""Stands in a choice in the place of a process: an operation that was under way has its effect."""

_SHRINKING = 400
"""Schedules that are tried to make one shorter."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision of a scheduler."""

    who: str
    """The process that goes on, or `LANDING`."""
    fate: str = DONE
    """What becomes of its operation."""
    place: int = 0
    """How many moments a stale listing is behind; which of the operations under way lands."""

    def __str__(self) -> str:
        return " ".join((self.who, *filter(None, [self.fate]), *([str(self.place)] if self.place else [])))

    @staticmethod
    def parse(text: str) -> Choice:
        """The choice that `str` wrote."""
        who, *rest = text.split()
        place = int(rest.pop()) if rest and rest[-1].isdigit() else 0
        return Choice(who, rest[0] if rest else DONE, place)


@dataclass(frozen=True, slots=True)
class Step:
    """What happened because of a choice."""

    choice: Choice
    who: str
    """The process whose operation it was; for a landing too."""
    request: Request
    answer: Answer
    before: Objects
    after: Objects
    """The same object as `before` if nothing changed."""
    notes: tuple[tuple[Any, ...], ...] = ()
    """What the process told on its way to its next operation."""
    ended: bool = False
    error: BaseException | None = None
    """What the process raised when it ended."""

    def __str__(self) -> str:
        words = f"{self.choice!s:14} {self.who:4} {self.request.name} {self.request.path}"
        answer = self.answer
        if isinstance(answer, Failure):
            words += f" -> {answer.kind.__name__}"
        elif isinstance(answer, bytes):
            words += f" -> {len(answer)} bytes"
        elif isinstance(answer, tuple):
            words += f" -> {len(answer)} entries"
        elif answer is not None and answer is not DEAD:
            words += f" -> {answer!r}"
        words += "".join(f"\n{'':16}{self.who:4} * {' '.join(map(str, note))}" for note in self.notes)
        if self.ended:
            words += f"\n{'':16}{self.who:4} * ends" + (f": {self.error!r}" if self.error else "")
        return words


class Broken(AssertionError):
    """Something was not as it must be.

    Attributes:
        choices: the schedule that led there, once `search` or `replay` knows it.
    """

    def __init__(self, message: str, *, choices: Sequence[Choice] = (), trace: str = "") -> None:
        shown = f"\n\n{trace}\n\nreplay(scenario, {[str(one) for one in choices]!r})" if choices else ""
        super().__init__(message + shown)
        self.message = message
        self.choices = tuple(choices)


class Rules(Protocol):
    """What must hold. Without state of its own: what has to be remembered goes from call to call."""

    def begin(self, objects: Objects) -> Hashable:
        """What is to be remembered at the beginning."""
        ...

    def tolerates(self, memory: Any, cloud: Cloud, choice: Choice, request: Request) -> bool:
        """Whether a fault that the scenario allows is one that the code has to stand here."""
        ...

    def after(self, memory: Any, step: Step) -> Hashable:
        """Look at a step; answer what is to be remembered now.

        Raises:
            Broken: something is not as it must be.
        """
        ...

    def end(self, memory: Any, objects: Objects) -> None:
        """Look at what is left when all processes have ended.

        Raises:
            Broken: something is not as it must be.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Who runs on which store, and what may go wrong."""

    bodies: Mapping[str, Body]
    """The processes by name."""
    rules: Rules
    objects: Objects = field(default_factory=dict)
    """What is stored at the beginning."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """By fate: how often it may happen in a schedule."""
    faults_together: int = 1 << 30
    """How many faults may happen in a schedule in all."""
    after: Mapping[str, str] = field(default_factory=dict)
    """By process: the one that has to be over before it begins."""
    beats: Callable[[Objects, Collection[str]], Iterable[Request]] | None = None
    """What processes that live do while one of them rests, besides what their code does."""


class Run:
    """One schedule, step by step.

    Args:
        scenario: what runs.

    Attributes:
        steps: what happened so far.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.cloud = Cloud(scenario.objects)
        self.steps: list[Step] = []
        self.faults = Counter[str]()
        self.ready: list[str] = []
        """Processes that stand at an operation, in their order."""
        self._wrong: set[str] = set()
        self._memory: Any = scenario.rules.begin(scenario.objects)
        self._processes: dict[str, Process] = {}
        for name, body in scenario.bodies.items():
            process = self._processes[name] = Process(name, body)
            if process.request is not None and name not in scenario.after:
                self.ready.append(name)

    def request(self, who: str) -> Request:
        """The operation that a process stands at."""
        request = self._processes[who].request
        assert request is not None
        return request

    def allows(self, choice: Choice) -> bool:
        """Whether this can be chosen now."""
        if choice.who == LANDING:
            return choice.place < len(self.cloud.late)
        if choice.who not in self.ready:
            return False
        return choice.fate == DONE or self._may_fail(choice)

    def _may_fail(self, choice: Choice) -> bool:
        fate, request = choice.fate, self.request(choice.who)
        if not may(fate, request) or sum(self.faults.values()) >= self.scenario.faults_together:
            return False
        if self.faults[fate] >= self.scenario.faults.get(fate, 0):
            return False
        if fate == STALE and not 1 <= choice.place <= len(self.cloud.past):
            return False
        if fate == WRONG and request.path in self._wrong:
            return False  # what is wrong twice is damage
        return self.scenario.rules.tolerates(self._memory, self.cloud, choice, request)

    def take(self, choice: Choice) -> None:
        """Let it happen.

        Raises:
            Broken: the rules say so.
        """
        before = self.cloud.objects
        if choice.who == LANDING:
            late = self.cloud.late[choice.place]
            self.cloud = land(self.cloud, choice.place)
            step = Step(choice, late.who, late.request, None, before, self.cloud.objects)
        else:
            step = self._go_on(choice, before)
        self.steps.append(step)
        self._memory = self.scenario.rules.after(self._memory, step)

    def _go_on(self, choice: Choice, before: Objects) -> Step:
        who, fate = choice.who, choice.fate
        process, request = self._processes[who], self.request(who)
        if fate != DONE:
            self.faults[fate] += 1
            if fate == WRONG:
                self._wrong.add(request.path)
        self.cloud, answer = perform(self.cloud, who, request, fate=fate, back=choice.place)
        if request.name == "rest" and self.scenario.beats is not None:
            for beat in self.scenario.beats(self.cloud.objects, self.ready):
                self.cloud, _ = perform(self.cloud, who, beat)
        after = self.cloud.objects
        if answer is DEAD:
            process.kill()
            self._is_over(who)
            return Step(choice, who, request, answer, before, after)
        process.answer(answer)
        ended = process.request is None
        if ended:
            self._is_over(who)
        notes = tuple(process.noted)
        return Step(choice, who, request, answer, before, after, notes, ended, process.error)

    def _is_over(self, who: str) -> None:
        self.ready.remove(who)
        self.ready += [name for name, first in self.scenario.after.items() if first == who]

    def finish(self) -> None:
        """All processes have ended; what is under way never lands."""
        self.scenario.rules.end(self._memory, self.cloud.objects)

    def close(self) -> None:
        """End what still runs."""
        for process in self._processes.values():
            process.kill()


Scheduler = Callable[[Run], Choice | None]
"""Says what happens next; None when it has no opinion."""


@dataclass(slots=True)
class Report:
    """What a search went through."""

    schedules: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)


def run_schedule(scenario: Scenario, scheduler: Scheduler) -> Run:
    """Run one schedule to its end.

    Raises:
        Broken: something was not as it must be; with the choices that led there.
    """
    run = Run(scenario)
    try:
        while run.ready or run.cloud.late:
            choice = scheduler(run)
            if choice is None:
                if not run.ready:
                    break
                choice = Choice(run.ready[0])
            run.take(choice)
        run.finish()
    except Broken as broken:
        choices = [step.choice for step in run.steps]
        raise Broken(broken.message, choices=choices, trace=_trace(run.steps)) from None
    finally:
        run.close()
    return run


def search(scenario: Scenario, *, seeds: Iterable[int], shorten: bool = True) -> Report:
    """Run a schedule for each seed.

    Args:
        scenario: what runs.
        seeds: one for each schedule.
        shorten: whether a schedule that breaks a rule is made short, which takes some hundred more.

    Raises:
        Broken: a schedule broke a rule.
    """
    report = Report()
    with silence():
        for seed in seeds:
            try:
                run = run_schedule(scenario, Dice(scenario, seed))
            except Broken as broken:
                raise (shrink(scenario, broken) if shorten else broken) from None
            report.schedules += 1
            report.steps += len(run.steps)
            report.faults.update(run.faults)
    return report


def replay(scenario: Scenario, choices: Iterable[str | Choice]) -> Run:
    """Repeat a schedule; what cannot be chosen is left out, and at its end each process runs to its own end.

    Raises:
        Broken: it breaks a rule.
    """
    wanted = iter([one if isinstance(one, Choice) else Choice.parse(one) for one in choices])

    def scheduler(run: Run) -> Choice | None:
        return next((choice for choice in wanted if run.allows(choice)), None)

    with silence():
        return run_schedule(scenario, scheduler)


def shrink(scenario: Scenario, broken: Broken) -> Broken:
    """The same failure with fewer choices, as far as leaving some out leads in a few hundred tries."""
    best, size, place = broken, len(broken.choices) // 2, 0
    for _ in range(_SHRINKING):
        if place >= len(best.choices):
            size, place = size // 2, 0
        if size < 1:
            break
        kept = best.choices[:place] + best.choices[place + size :]
        shorter = _broken_by(scenario, kept)
        if shorter is not None and _weight(shorter) < _weight(best):
            best = shorter
        else:
            place += size
    return best


def _weight(broken: Broken) -> tuple[int, int, int]:
    """Faults make a schedule hard to read, then switches, then its length."""
    choices = broken.choices
    faults = sum(choice.fate != DONE for choice in choices)
    switches = sum(one.who != other.who for one, other in itertools.pairwise(choices))
    return (faults, switches, len(choices))


def _broken_by(scenario: Scenario, choices: Sequence[Choice]) -> Broken | None:
    try:
        replay(scenario, choices)
    except Broken as broken:
        return broken
    return None


def _trace(steps: Sequence[Step]) -> str:
    return "\n".join(f"{number:4} {step}" for number, step in enumerate(steps, 1))


@contextmanager
def silence() -> Iterator[None]:
    """No log: failures are what is looked for, and writing down each takes longer than all else."""
    logger = logging.getLogger("spotsafe")
    before = logger.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


class Dice:
    """Chooses by random numbers; what kind of schedule it is, is random too.

    Half of the schedules give each process a rank, let the highest run, and take its rank away at a few random
    moments: that finds what needs long stretches and few, exact switches. The others throw for every step. In half of
    all schedules what is late comes soon, in the others after a long time.

    Args:
        scenario: what runs.
        seed: the same one, the same schedule.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._random = random.Random(seed)
        self._fates = [fate for fate, limit in scenario.faults.items() if limit]
        self._landing = 0.1 if seed % 2 else 0.01
        self._rate = self._random.choice((0.0, 0.01, 0.03, 0.1)) if self._fates else 0.0
        self._ranks: list[str] = []
        self._stay = 0.0
        self._last = ""
        self._in_trouble = ""
        if self._random.random() < 0.5:
            self._ranks = list(scenario.bodies)
            self._random.shuffle(self._ranks)
            self._yield = self._random.choice((0.02, 0.05, 0.1))
        else:
            self._stay = self._random.choice((0.0, 0.5, 0.8, 0.95))

    def __call__(self, run: Run) -> Choice | None:
        """See `Scheduler`."""
        dice = self._random
        late = len(run.cloud.late)
        if late and dice.random() < (self._landing if run.ready else 0.5):
            return Choice(LANDING, place=dice.randrange(late))
        if not run.ready:
            return None
        who = self._who(run.ready)
        if self._rate and dice.random() < (0.5 if who == self._in_trouble else self._rate):
            choice = Choice(who, fate := self._fate(who), self._back(run, fate))
            if run.allows(choice):
                self._in_trouble = who
                self._interrupt(who)
                return choice
        self._in_trouble = ""
        return Choice(who)

    def _fate(self, who: str) -> str:
        """What goes wrong; what goes on to be wrong when it is tried again is mostly that there is no answer."""
        if who == self._in_trouble and FAIL in self._fates:
            return FAIL
        return self._random.choice(self._fates)

    def _interrupt(self, who: str) -> None:
        """An operation without an answer takes long; others may do a lot in that time."""
        if self._ranks and self._random.random() < 0.5:
            self._ranks.remove(who)
            self._ranks.append(who)

    def _who(self, ready: Sequence[str]) -> str:
        dice = self._random
        if self._ranks:
            if dice.random() < self._yield:
                first = next(name for name in self._ranks if name in ready)
                self._ranks.remove(first)
                self._ranks.insert(dice.randint(0, len(self._ranks)), first)
            return next(name for name in self._ranks if name in ready)
        if self._last in ready and dice.random() < self._stay:
            return self._last
        self._last = dice.choice(ready)
        return self._last

    def _back(self, run: Run, fate: str) -> int:
        past = len(run.cloud.past)
        if fate != STALE or not past:
            return 0
        return min(past, 1 + int(self._random.expovariate(0.3)))


__all__ = [
    "LANDING",
    "Broken",
    "Choice",
    "Dice",
    "Report",
    "Rules",
    "Run",
    "Scenario",
    "Scheduler",
    "Step",
    "replay",
    "run_schedule",
    "search",
    "shrink",
    "silence",
]
