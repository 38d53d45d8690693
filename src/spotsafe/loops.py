"""The loop forms: `steps`, `epochs`, `range`, `safe_point`, `interruptible`.

The end of a loop body is a safe point, and one committed body is one step. A generator learns of the end of a body
in two ways: the next request (the body ended), or `GeneratorExit` (``break``, ``return``, ``islice``, or an
exception on its way out). `CommitRule` in `positions` decides about the second; this file only asks it.

What a safe point does - saving, stopping - is the run's business, behind the `Engine` protocol.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from spotsafe.activity import Activity, FirstBody, GradientMark, called_by_generator
from spotsafe.data.feed import Feed
from spotsafe.errors import LookAhead, RunError
from spotsafe.positions import MANUAL, CommitRule, Position, Positions

T = TypeVar("T")


class Engine(Protocol):
    """What the loops ask of the run."""

    def before_first_body(self) -> None:
        """The program has set itself up: judge what is tracked."""
        ...

    def restore_rng(self) -> None:
        """Set all random number generators to where they were at the restored safe point."""
        ...

    def random_numbers_drawn(self) -> bool:
        """Whether a random number was drawn since the last safe point (or the start)."""
        ...

    def before_unsafe_commit(self) -> None:
        """Positions are about to move although the state is no safe point: gradients were only accumulated."""
        ...

    def mark_safe(self) -> None:
        """Remember this moment as the last safe point."""
        ...

    def at_safe_point(self, *, epoch_ended: bool) -> None:
        """Save, or leave. May raise `Reclaimed`, `Superseded`, `SaveFailed`."""
        ...

    def at_loop_end(self) -> None:
        """A loop came to its end, at a safe point."""
        ...

    def at_interruption(self) -> None:
        """A notice came inside a long phase: save what is still whole or publish the newest staged; leave."""
        ...

    @property
    def notice_pending(self) -> bool:
        """Whether a reclaim has been announced."""
        ...

    @property
    def leaving(self) -> bool:
        """Whether the loops must end now, without another commit (``on_reclaim="return"``)."""
        ...


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
    rule: CommitRule = field(default_factory=CommitRule)
    stop_reason: str | None = None
    ended: bool = False
    """It came to its end, or was stopped; not left by a break."""
    stepped_inside: set[int] = field(default_factory=set)
    """Optimizers that stepped in loops inside the current body."""
    left_inside: bool = False
    """A loop inside the current body was left before its end."""


@dataclass(slots=True, eq=False)
class Loops:
    """All loop forms of one run."""

    engine: Engine
    positions: Positions
    activity: Activity
    modules: Callable[[], list[Any]]
    """The tracked modules, once they are all known."""
    on_stop: Callable[[str, str], None]
    """Told the loop's name and the reason when `stop` ends it."""
    active: list[Loop] = field(default_factory=list)
    outermost: list[Loop] = field(default_factory=list)
    """Loops that were started outside any other."""
    sync_gradients: bool = True
    body_open: bool = False
    """A body is running, or was left in the middle without a commit."""
    _used_feeds: dict[int, Feed] = field(default_factory=dict)
    _home_thread: int = field(default_factory=threading.get_ident)
    _home_process: int = field(default_factory=os.getpid)
    _first_body: FirstBody | None = None
    _judged: bool = False
    _gradients: GradientMark = ()

    # -- the forms ---

    def steps(
        self, feed: Feed, *, until: int | None, epochs: int | None, accumulate: int, name: str | None
    ) -> Iterator[tuple[int, Any]]:
        """Yield ``(step, batch)``; with `accumulate`, that many micro-batches for each step.

        `until` counts steps, `epochs` passes over the loader; with neither there is one pass.
        """
        handle = Handle()
        return handle.of(
            self._steps(handle, feed, until=until, epochs=epochs, accumulate=accumulate, name=name)
        )

    def epochs(self, count: int, *, name: str | None) -> Iterator[int]:
        """Yield the number of each epoch; the end of the body is a safe point of its own."""
        handle = Handle()
        return handle.of(self._epochs(handle, count, name=name))

    def range(self, count: int, *, name: str | None) -> Iterator[int]:
        """Yield the number of each step, for loops that draw their own batches."""
        handle = Handle()
        return handle.of(self._range(handle, count, name=name))

    def _steps(
        self,
        handle: Handle,
        feed: Feed,
        *,
        until: int | None,
        epochs: int | None,
        accumulate: int,
        name: str | None,
    ) -> Generator[tuple[int, Any], None, None]:
        limit = until if until is not None else epochs
        with self._running("steps", name, handle=handle, limit=limit, per_epoch=until is None) as loop:
            position = loop.position
            self._begin_passes(loop, feed)
            goal = 1 if epochs is None else epochs
            empty_passes = 0
            while not self._over(loop):
                if position.done >= until if until is not None else position.passes >= goal:
                    break
                done = position.done
                yield from self._one_pass(loop, feed, until=until, accumulate=accumulate)
                empty_passes = empty_passes + 1 if position.done == done else 0
                if empty_passes > 1:  # one is a resume at the end of an epoch
                    raise RunError(
                        f"loop {loop.name!r}: the loader yields no batches, so its end cannot be reached"
                    )
                if self._over(loop) or (until is not None and position.done >= until):
                    break
                position.passes += 1
                if until is not None or position.passes < goal:
                    feed.finish_epoch()

    def _epochs(self, handle: Handle, count: int, *, name: str | None) -> Generator[int, None, None]:
        with self._running("epochs", name, handle=handle, limit=count) as loop:
            self._belong_to_epoch(loop)
            self._restore_rng_if_reached(loop)
            while loop.position.done < count and self._enters_epoch(loop):
                # An epoch is a step of its own if no loop in it made one, in this attempt or the one resumed from.
                steps_before = self.positions.total - int(self.positions.resumes_inside(loop.name))
                self.positions.enter(loop.name)
                self._begin_body(loop)
                try:
                    yield loop.position.done
                    self.leave_open(inside=loop)
                except GeneratorExit:
                    self.leave_open(inside=loop)
                    if not loop.left_inside:
                        self._closed_early(loop, steps=int(self.positions.total == steps_before))
                    raise
                finally:
                    self.positions.leave()
                self._end_body(loop, steps=int(self.positions.total == steps_before), epoch_ended=True)

    def _range(self, handle: Handle, count: int, *, name: str | None) -> Generator[int, None, None]:
        with self._running("range", name, handle=handle, limit=count) as loop:
            self._belong_to_epoch(loop)
            self._restore_rng_if_reached(loop)
            while loop.position.done < count and not self._over(loop):
                self._begin_body(loop)
                try:
                    yield loop.position.done
                except GeneratorExit:
                    self._closed_early(loop)
                    raise
                self._end_body(loop)

    def safe_point(self) -> None:
        """Commit one step of a loop of the program's own."""
        if self.active:
            raise RunError(
                f"run.safe_point() inside the body of loop {self.active[-1].name!r}: the end of that body is the "
                "safe point already. Use it only in loops that are not run.steps, run.range or run.epochs."
            )
        self._judge()
        self._call_off_first_body()  # a body that calls this has run
        self.positions.reached(MANUAL)  # the generators were restored at enter: no better moment here
        loop = Loop(MANUAL, self.positions.loops.setdefault(MANUAL, Position()))
        self._end_body(loop)
        self.activity.forget()

    def interruptible(self, iterable: Iterable[T]) -> Iterator[T]:
        """Yield the items; when a notice comes, act on it at once instead of at the end of the body."""
        for item in iterable:
            if self.engine.notice_pending:
                self.engine.at_interruption()
                return
            yield item

    def stop(self, reason: str) -> None:
        """End the running loops at the safe points of their current bodies, like reaching their ends."""
        if not self.active:
            raise RunError("run.stop() outside a loop: there is nothing to end")
        for loop in self.active:
            loop.stop_reason = reason

    @property
    def all_ended(self) -> bool:
        """Whether every loop that was started came to its end."""
        return all(loop.ended for loop in self.outermost)

    @property
    def current_epoch(self) -> int:
        """The epoch of the innermost epochs-loop, or else of the loader that is iterated over; 0 outside."""
        epochs = [loop.position.done for loop in self.active if loop.kind == "epochs"]
        feeds = [loop.feed.epoch for loop in self.active if loop.feed is not None]
        return (epochs or feeds or [0])[-1]

    def judge(self) -> None:
        """Everything is tracked by now, although no body has begun: what the first one would judge is judged."""
        self._judge()

    def leave_open(self, *, inside: Loop | None = None) -> None:
        """Leave the loops that are still open (inside one) as a ``break`` leaves them, innermost first.

        A variable, such as a progress bar, may hold the iterator of a loop that the program is done with.
        """
        first = 0 if inside is None else self.active.index(inside) + 1
        for loop in reversed(self.active[first:]):
            loop.handle.close()

    def close(self) -> None:
        """Leave no hook behind, and no iterator that could still be asked for a step."""
        self.leave_open()
        self._call_off_first_body()

    # -- one pass over a loader ---

    def _begin_passes(self, loop: Loop, feed: Feed) -> None:
        """Put the feed where this loop goes on, or where its next pass begins."""
        position = loop.position
        enclosing = loop.enclosing.position.done if loop.enclosing is not None else None
        if position.feed is not None:
            feed.load(position.feed)
            if position.within != enclosing:  # a pass of an earlier epoch, complete or left by a break
                feed.finish_epoch()
                position.passes, position.stopped = 0, False
        else:
            self._begin_behind_others(position, feed)
        loop.feed = feed
        position.within = enclosing
        position.live_feed = feed.state
        self._used_feeds[id(feed)] = feed

    def _begin_behind_others(self, position: Position, feed: Feed) -> None:
        """An earlier loop went over the same loader: begin with the epoch behind it.

        After a resume it need not have run in this process, such as one inside an epochs-loop that is over. So
        what counts is which loop's position belongs to the same data, wherever that can be told.
        """
        furthest: tuple[tuple[int, int], Any] | None = None
        for other in self.positions.loops.values():
            state = None if other is position else other.feed_now()
            place = None if state is None else feed.place_of(state)
            if place is not None and (furthest is None or place > furthest[0]):
                furthest = place, state
        if furthest is not None:
            feed.load(furthest[1])
            feed.finish_epoch()
        elif id(feed) in self._used_feeds:
            feed.finish_epoch()

    def _one_pass(
        self, loop: Loop, feed: Feed, *, until: int | None, accumulate: int
    ) -> Iterator[tuple[int, Any]]:
        """From the feed's position to the end of its epoch, to `until`, or to a stop."""
        if (
            feed.ended
        ):  # restored at the end of an epoch: no iterator is made, the generators stay as restored
            self._restore_rng_if_reached(loop)
            return
        batches = feed.start()
        self._restore_rng_if_reached(loop)  # only now: making an iterator may have drawn random numbers
        try:
            going = True
            while going and not self._over(loop) and (until is None or loop.position.done < until):
                going = yield from self._one_step(loop, feed, batches, _window(feed, accumulate))
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()

    def _one_step(
        self, loop: Loop, feed: Feed, batches: Iterator[Any], window: int
    ) -> Generator[tuple[int, Any], None, bool]:
        """Yield the micro-batches of one step, then commit it; returns false when the epoch had ended."""
        for taken in range(1, window + 1):
            try:
                batch = next(batches)
            except StopIteration:
                if taken > 1:
                    raise RunError(
                        f"the loader ended after {taken - 1} of {window} micro-batches of a step, before the "
                        "length it announced by len(); correct its __len__"
                    ) from None
                return False
            if taken == 1:
                self._begin_body(loop)
            self.sync_gradients = taken == window
            try:
                yield loop.position.done, batch
            except GeneratorExit:
                self._closed_early(loop, feed=feed, batches=taken)
                raise
        self._end_body(loop, feed=feed, batches=window)
        return True

    # -- bodies ---

    @contextmanager
    def _running(
        self, kind: str, name: str | None, *, handle: Handle, limit: int | None, per_epoch: bool = False
    ) -> Iterator[Loop]:
        self._refuse_open_body(kind)
        full, position = self.positions.claim(kind, name)
        enclosing = next((loop for loop in reversed(self.active) if full.startswith(f"{loop.name}/")), None)
        loop = Loop(full, position, handle, kind=kind, limit=limit, enclosing=enclosing, per_epoch=per_epoch)
        if enclosing is not None:
            self._refuse_used_up(loop, epoch=enclosing.position.done)
        if enclosing is None:
            self.outermost.append(loop)
        self.active.append(loop)
        try:
            yield loop
            if self.positions.passed(full):
                loop.ended = True
            else:
                self._restore_rng_if_reached(loop)
                loop.ended = not self.engine.leaving
                if loop.ended:
                    self.engine.at_loop_end()
        finally:
            position.freeze_feed()
            self.active.remove(loop)
            if enclosing is not None and not loop.ended:
                enclosing.left_inside = True

    def _belong_to_epoch(self, loop: Loop) -> None:
        """Note the enclosing epoch; a stop of an earlier one is over."""
        if loop.enclosing is None:
            return
        if loop.position.within != loop.enclosing.position.done:
            loop.position.stopped = False
        loop.position.within = loop.enclosing.position.done

    def _refuse_used_up(self, loop: Loop, *, epoch: int) -> None:
        """A limit counts over all epochs. One that an earlier epoch has reached would skip this one in silence."""
        position = loop.position
        if position.within in (None, epoch) or self.positions.passed(loop.name):
            return
        if not loop.per_epoch and loop.limit is not None and position.done >= loop.limit:
            raise RunError(
                f"loop {loop.name!r} reached its limit of {loop.limit} in an earlier epoch: limits are totals over "
                f"all epochs, so that nothing would run in epoch {epoch}. Make the limit grow with the epoch, such "
                "as n * (epoch + 1), or let run.steps(loader) make one pass in each"
            )

    def _refuse_open_body(self, kind: str) -> None:
        """A body that is one step has no position inside it, so that a resume could not come back to a loop there."""
        if not self.active or self.active[-1].kind == "epochs":
            return
        around = self.active[-1].name
        raise RunError(
            f"run.{kind}() was started while loop {around!r} is still open. Inside the body of a step a loop of the "
            "run has no place to resume at: only run.epochs() may hold other loops. Use a plain loop in there (the "
            "whole body is one step), or make the outer loop run.epochs(); two loaders at once are one dataset of "
            f"both. If {around!r} was left before, a variable such as a progress bar still holds its iterator: "
            "close it first."
        )

    def _over(self, loop: Loop) -> bool:
        """Whether the loop must not yield again, whatever its limit says."""
        return (
            self.engine.leaving or self.positions.passed(loop.name) or loop.position.ended_by_stop(loop.limit)
        )

    def _enters_epoch(self, loop: Loop) -> bool:
        """Whether an epoch's body runs: also after a stop inside it, if what lies behind the stop is still to do."""
        return not self._over(loop) or (self.positions.resumes_inside(loop.name) and not self.engine.leaving)

    def _begin_body(self, loop: Loop) -> None:
        self._judge()
        loop.stepped_inside.clear()
        loop.left_inside = False
        self.activity.forget()
        self.body_open = True

    def _end_body(
        self,
        loop: Loop,
        *,
        feed: Feed | None = None,
        batches: int = 0,
        steps: int = 1,
        epoch_ended: bool = False,
    ) -> None:
        """The body has ended by itself: commit it, and be at a safe point."""
        if self.engine.leaving:
            return  # what was interrupted is repeated after the resume, never half counted
        self._refuse_child()
        self._refuse_look_ahead()
        if self._commit(loop, feed=feed, batches=batches, steps=steps):
            # Inside an epochs-loop the epoch ends with its tail.
            pass_ended = bool(loop.enclosing is None and feed is not None and feed.ended)
            self.engine.at_safe_point(epoch_ended=epoch_ended or pass_ended)

    def _closed_early(
        self, loop: Loop, *, feed: Feed | None = None, batches: int = 0, steps: int = 1
    ) -> None:
        """The body was left in the middle. Nothing may be raised from here: the generator is being closed."""
        stepped = self.activity.stepped | loop.stepped_inside
        if not self.engine.leaving and loop.rule.closed_early(stepped):
            self._commit(loop, feed=feed, batches=batches, steps=steps)

    def _commit(self, loop: Loop, *, feed: Feed | None, batches: int, steps: int) -> bool:
        """Move the positions; true if the state is a safe point."""
        stepped = self.activity.stepped | frozenset(loop.stepped_inside)
        gradients = self.activity.gradient_mark()
        safe = bool(stepped) or gradients == self._gradients
        if not safe:
            self.engine.before_unsafe_commit()
        loop.position.done += 1
        self.positions.total += steps
        if feed is not None:
            feed.committed(batches)
        if loop.stop_reason is not None:
            loop.position.stopped, loop.position.stopped_under = True, loop.limit
            self._stop_around(loop)
            self.on_stop(loop.name, loop.stop_reason)
        loop.rule = loop.rule.after(stepped)
        if loop.enclosing is not None:
            loop.enclosing.stepped_inside |= stepped
        self.body_open = loop.enclosing is not None
        if safe:
            self._gradients = gradients
            self.positions.where = loop.name
            self.engine.mark_safe()
        self.activity.forget()
        return safe

    def _stop_around(self, loop: Loop) -> None:
        """A resume before the end of the epoch's body must know that the epochs are stopped as well."""
        around = loop.enclosing
        while around is not None and around.stop_reason is not None:
            around.position.stopped, around.position.stopped_under = True, around.limit
            around = around.enclosing

    def _restore_rng_if_reached(self, loop: Loop) -> None:
        if self.positions.reached(loop.name):
            self.engine.restore_rng()

    def _judge(self) -> None:
        if self._judged:
            return
        self._judged = True
        self.engine.before_first_body()
        self._gradients = self.activity.gradient_mark()
        if self.activity.tracks_any:
            self._first_body = FirstBody(self.modules())

    def _call_off_first_body(self) -> FirstBody | None:
        first, self._first_body = self._first_body, None
        if first is not None:
            first.close()
        return first

    def _refuse_child(self) -> None:
        """Two processes that save as one attempt would publish each other's steps."""
        if os.getpid() != self._home_process:
            raise RunError(
                f"a forked child goes on in the run of process {self._home_process}; end it with os._exit(), or "
                "use multiprocessing"
            )

    def _refuse_look_ahead(self) -> None:
        """See `FirstBody`."""
        first = self._call_off_first_body()
        if first is None:
            return
        ran = first.forward_ran or self.activity.stepped or self.engine.random_numbers_drawn()
        if not ran and (called_by_generator() or threading.get_ident() != self._home_thread):
            raise LookAhead(
                "the next step was asked for before the body of the first one did anything: a wrapper around the "
                "run's loop seems to fetch ahead, so that steps would be counted before they are made. Wrap the "
                "loader instead, run.steps(prefetch(loader)), or iterate over run.steps(...) directly."
            )


def _window(feed: Feed, accumulate: int) -> int:
    """How many micro-batches the next step takes: a short last window of an epoch is a step too."""
    if accumulate == 1:
        return 1
    remaining = feed.remaining()
    if remaining is None:
        raise RunError("accumulate= needs a loader with a length: give it __len__")
    return max(1, min(accumulate, remaining))
