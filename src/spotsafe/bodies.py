"""When the body of a loop is a step, and what is asked of the run when it is.

A generator learns of the end of a body in two ways: the next request (the body has ended by itself), or
`GeneratorExit` (``break``, ``return``, ``islice``, or an exception on its way out). `CommitRule` in `positions`
decides about the second; this file only asks it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from spotsafe.activity import Activity, FirstBody, GradientMark, called_by_generator
from spotsafe.data.feed import Feed
from spotsafe.engine import Engine
from spotsafe.errors import LookAhead, RunError
from spotsafe.positions import MANUAL, CommitRule, Position, Positions

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Handle:
    """The iterator of a loop, as long as the program holds it."""

    _iterator: weakref.ref[Generator[Any, None, None]] | None = None

    def of(self, iterator: Generator[T, None, None]) -> Iterator[T]:
        """Remember `iterator`, and give it back."""
        self._iterator = weakref.ref(iterator)
        return iterator

    def close(self) -> None:
        """Leave the loop as ``break`` does; one that was left does not mind."""
        iterator = None if self._iterator is None else self._iterator()
        if iterator is not None:
            iterator.close()


@dataclass(slots=True, eq=False)
class Loop:
    """A loop that is running in this process."""

    name: str
    position: Position
    handle: Handle = field(default_factory=Handle)
    kind: str = ""
    limit: int | None = None
    per_epoch: bool = False
    """Its limit counts anew in each enclosing epoch."""
    enclosing: Loop | None = None
    feed: Feed | None = None
    """Where its batches come from; None if it has none, or has not asked for the first yet."""
    rule: CommitRule = field(default_factory=CommitRule)
    stop_reason: str | None = None
    ended: bool = False
    """It came to its end, or was stopped; not left by a break."""
    stepped_inside: set[int] = field(default_factory=set)
    """Optimizers that stepped in loops inside the current body."""
    left_inside: bool = False
    """A loop inside the current body was left before its end."""

    @property
    def enclosing_epoch(self) -> int | None:
        """The epoch whose body this loop runs in; None outside an epochs-loop."""
        return None if self.enclosing is None else self.enclosing.position.done


@dataclass(slots=True, eq=False)
class Bodies:
    """Begins, commits and gives up the bodies of all loops of one run."""

    engine: Engine
    positions: Positions
    activity: Activity
    modules: Callable[[], list[Any]]
    """The tracked modules, once they are all known."""
    on_stop: Callable[[str, str], None]
    """Told the loop's name and the reason when `run.stop` ends it."""
    open: bool = False
    """A body is running, or was left in the middle without a commit."""
    _home_thread: int = field(default_factory=threading.get_ident)
    _home_process: int = field(default_factory=os.getpid)
    _first: FirstBody | None = None
    _judged: bool = False
    _gradients: GradientMark = ()

    # -- may it run ---

    def over(self, loop: Loop) -> bool:
        """Whether the loop must not yield again, whatever its limit says."""
        return (
            self.engine.leaving or self.positions.passed(loop.name) or loop.position.ended_by_stop(loop.limit)
        )

    def arrive(self, loop: Loop) -> None:
        """The program is at the place where `loop` goes on: if the checkpoint is of there, so are the generators."""
        if self.positions.reached(loop.name):
            self.engine.restore_rng()

    # -- begin and end ---

    def judge(self) -> None:
        """The first body begins, or the program is done with its loops: everything must be tracked by now."""
        if self._judged:
            return
        self._judged = True
        self.engine.before_first_body()
        self._gradients = self.activity.gradient_mark()
        if self.activity.tracks_any:
            self._first = FirstBody(self.modules())

    def begin(self, loop: Loop) -> None:
        """A body is about to be yielded to the program."""
        self.judge()
        loop.stepped_inside.clear()
        loop.left_inside = False
        self.activity.forget()
        self.open = True

    def end(self, loop: Loop, *, batches: int = 0, steps: int = 1, epoch_ended: bool = False) -> None:
        """The body has ended by itself: commit it, and be at a safe point.

        Args:
            loop: whose body it is.
            batches: micro-batches of the loop's feed that it used.
            steps: how much it adds to `run.step`: 0 for an epoch whose loops have made its steps.
            epoch_ended: it was the body of an epoch.
        """
        if self.engine.leaving:
            return  # what was interrupted is repeated after the resume, never half counted
        self._refuse_child()
        self._refuse_look_ahead()
        if self._commit(loop, batches=batches, steps=steps):
            # Inside an epochs-loop the epoch ends with its tail.
            pass_ended = bool(loop.enclosing is None and loop.feed is not None and loop.feed.ended)
            self.engine.at_safe_point(epoch_ended=epoch_ended or pass_ended)

    def close_early(self, loop: Loop, *, batches: int = 0, steps: int = 1) -> None:
        """The body was left in the middle. Nothing may be raised from here: the generator is being closed."""
        stepped = self.activity.stepped | loop.stepped_inside
        if not self.engine.leaving and loop.rule.closed_early(stepped):
            self._commit(loop, batches=batches, steps=steps)

    def commit_own(self) -> None:
        """The body of a loop of the program's own has run, which nobody saw begin: `run.safe_point`."""
        self.judge()
        self.call_off_first()  # a body that calls it has run
        self.positions.reached(MANUAL)  # the generators were restored at enter: no better moment here
        self.end(Loop(MANUAL, self.positions.loops.setdefault(MANUAL, Position())))

    def call_off_first(self) -> FirstBody | None:
        """Watch the first body no more; leaves no hook behind."""
        first, self._first = self._first, None
        if first is not None:
            first.close()
        return first

    # -- inside ---

    def _commit(self, loop: Loop, *, batches: int, steps: int) -> bool:
        """Move the positions; true if the state is a safe point."""
        stepped = self.activity.stepped | frozenset(loop.stepped_inside)
        gradients = self.activity.gradient_mark()
        safe = bool(stepped) or gradients == self._gradients
        if not safe:
            self.engine.before_unsafe_commit()
        loop.position.done += 1
        self.positions.total += steps
        if loop.feed is not None:
            loop.feed.committed(batches)
        if loop.stop_reason is not None:
            self._stop(loop, loop.stop_reason)
        loop.rule = loop.rule.after(stepped)
        if loop.enclosing is not None:
            loop.enclosing.stepped_inside |= stepped
        self.open = loop.enclosing is not None
        if safe:
            self._gradients = gradients
            self.positions.where = loop.name
            self.engine.mark_safe()
        self.activity.forget()
        return safe

    def _stop(self, loop: Loop, reason: str) -> None:
        """The stop counts from here on, for the epochs-loops around it too: a resume may come before their tails."""
        stopped: Loop | None = loop
        while stopped is not None and stopped.stop_reason is not None:
            stopped.position.stopped, stopped.position.stopped_under = True, stopped.limit
            stopped = stopped.enclosing
        self.on_stop(loop.name, reason)

    def _refuse_child(self) -> None:
        """Two processes that save as one attempt would publish each other's steps."""
        if os.getpid() != self._home_process:
            raise RunError(
                f"a forked child goes on in the run of process {self._home_process}; end it with os._exit(), or "
                "use multiprocessing"
            )

    def _refuse_look_ahead(self) -> None:
        """See `FirstBody`."""
        first = self.call_off_first()
        if first is None:
            return
        ran = first.forward_ran or self.activity.stepped or self.engine.random_numbers_drawn()
        if not ran and (called_by_generator() or threading.get_ident() != self._home_thread):
            raise LookAhead(
                "the next step was asked for before the body of the first one did anything: a wrapper around the "
                "run's loop seems to fetch ahead, so that steps would be counted before they are made. Wrap the "
                "loader instead, run.steps(prefetch(loader)), or iterate over run.steps(...) directly."
            )
