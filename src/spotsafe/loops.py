"""The loop forms: `steps`, `epochs`, `range`, `safe_point`, `interruptible`.

The end of a loop body is a safe point, and one committed body is one step; `bodies` says when. Here is how long each
form goes on, and which loops may stand inside which.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from spotsafe.activity import Activity
from spotsafe.bodies import Bodies, Handle, Loop
from spotsafe.data.feed import Feed
from spotsafe.engine import Engine
from spotsafe.errors import RunError
from spotsafe.passes import Passes
from spotsafe.positions import Positions

T = TypeVar("T")


class Loops:
    """All loop forms of one run.

    Args:
        engine: saves, and leaves.
        positions: where each loop stands.
        activity: what the optimizers did.
        modules: gives the tracked modules, once they are all known.
        on_stop: told the loop's name and the reason when `stop` ends it.

    Attributes:
        active: the loops that are running, outermost first.
        outermost: the loops that were started outside any other.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        positions: Positions,
        activity: Activity,
        modules: Callable[[], list[Any]],
        on_stop: Callable[[str, str], None],
    ) -> None:
        self.positions = positions
        self.active: list[Loop] = []
        self.outermost: list[Loop] = []
        self._engine = engine
        self._bodies = Bodies(engine, positions, activity, modules=modules, on_stop=on_stop)
        self._passes = Passes(self._bodies, positions)

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

    def safe_point(self) -> None:
        """Commit one step of a loop of the program's own."""
        if self.active:
            raise RunError(
                f"run.safe_point() inside the body of loop {self.active[-1].name!r}: the end of that body is the "
                "safe point already. Use it only in loops that are not run.steps, run.range or run.epochs."
            )
        self._bodies.commit_own()

    def interruptible(self, iterable: Iterable[T]) -> Iterator[T]:
        """Yield the items; when a notice comes, act on it at once instead of at the end of the body."""
        self._engine.settle()
        for item in iterable:
            if self._engine.notice_pending:
                self._engine.at_interruption()
                return
            yield item

    def stop(self, reason: str) -> None:
        """End the running loops at the safe points of their current bodies, like reaching their ends."""
        if not self.active:
            raise RunError("run.stop() outside a loop: there is nothing to end")
        for loop in self.active:
            loop.stop_reason = reason

    # -- what can be asked ---

    @property
    def all_ended(self) -> bool:
        """Whether every loop that was started came to its end."""
        return all(loop.ended for loop in self.outermost)

    @property
    def stop_reason(self) -> str | None:
        """Why the program ended its last loop by `stop`; None if that came to its limit, or was left."""
        last = self.outermost[-1] if self.outermost else None
        return last.stop_reason if last is not None and last.ended else None

    @property
    def body_open(self) -> bool:
        """Whether a body is running, or was left in the middle without a commit."""
        return self._bodies.open

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-batch that was yielded is the last of its step."""
        return self._passes.sync_gradients

    @property
    def current_epoch(self) -> int:
        """The epoch of the innermost epochs-loop, or else of the loader that is iterated over; 0 outside."""
        epochs = [loop.position.done for loop in self.active if loop.kind == "epochs"]
        feeds = [loop.feed.epoch for loop in self.active if loop.feed is not None]
        return (epochs or feeds or [0])[-1]

    # -- the end ---

    def judge(self) -> None:
        """Everything is tracked by now, although no body has begun: what the first one would judge is judged."""
        self._bodies.judge()

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
        self._bodies.call_off_first()

    # -- how long each goes on ---

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
            self._passes.begin(loop, feed)
            goal = 1 if epochs is None else epochs

            def at_limit() -> bool:
                return position.passes >= goal if until is None else position.done >= until

            empty_passes = 0
            while not self._bodies.over(loop) and not at_limit():
                done = position.done
                yield from self._passes.one(loop, feed, until=until, accumulate=accumulate)
                empty_passes = empty_passes + 1 if position.done == done else 0
                if empty_passes > 1:  # one is a resume at the end of an epoch
                    raise RunError(
                        f"loop {loop.name!r}: the loader yields no batches, so its end cannot be reached"
                    )
                if self._bodies.over(loop) or (until is not None and position.done >= until):
                    break
                position.passes += 1
                if until is not None or position.passes < goal:
                    feed.finish_epoch()

    def _epochs(self, handle: Handle, count: int, *, name: str | None) -> Generator[int, None, None]:
        with self._running("epochs", name, handle=handle, limit=count) as loop:
            self._belong_to_epoch(loop)
            self._bodies.arrive(loop)
            while loop.position.done < count and self._enters_epoch(loop):
                # An epoch is a step of its own if no loop in it made one, in this attempt or the one resumed from.
                steps_before = self.positions.total - int(self.positions.resumes_inside(loop.name))
                self.positions.enter(loop.name)
                self._bodies.begin(loop)
                try:
                    yield loop.position.done
                    self.leave_open(inside=loop)
                except GeneratorExit:
                    self.leave_open(inside=loop)
                    if not loop.left_inside:
                        self._bodies.close_early(loop, steps=int(self.positions.total == steps_before))
                    raise
                finally:
                    self.positions.leave()
                self._bodies.end(loop, steps=int(self.positions.total == steps_before), epoch_ended=True)

    def _range(self, handle: Handle, count: int, *, name: str | None) -> Generator[int, None, None]:
        with self._running("range", name, handle=handle, limit=count) as loop:
            self._belong_to_epoch(loop)
            self._bodies.arrive(loop)
            while loop.position.done < count and not self._bodies.over(loop):
                self._bodies.begin(loop)
                try:
                    yield loop.position.done
                except GeneratorExit:
                    self._bodies.close_early(loop)
                    raise
                self._bodies.end(loop)

    def _enters_epoch(self, loop: Loop) -> bool:
        """Whether an epoch's body runs: also after a stop inside it, if what lies behind the stop is still to do."""
        resumes = self.positions.resumes_inside(loop.name) and not self._engine.leaving
        return resumes or not self._bodies.over(loop)

    # -- which may stand inside which ---

    @contextmanager
    def _running(
        self, kind: str, name: str | None, *, handle: Handle, limit: int | None, per_epoch: bool = False
    ) -> Iterator[Loop]:
        self._refuse_open_body(kind)
        full, position = self.positions.claim(kind, name)
        enclosing = next((loop for loop in reversed(self.active) if full.startswith(f"{loop.name}/")), None)
        loop = Loop(full, position, handle, kind=kind, limit=limit, enclosing=enclosing, per_epoch=per_epoch)
        if enclosing is None:
            self.outermost.append(loop)
        else:
            self._refuse_used_up(loop)
        self.active.append(loop)
        home = threading.get_ident()
        try:
            yield loop
            self._at_end(loop)
        except GeneratorExit:  # left in the middle: the code behind it may write
            if threading.get_ident() == home:  # else a collector found it, in any thread
                self._engine.settle()
            raise
        finally:
            position.freeze_feed()
            self.active.remove(loop)
            if enclosing is not None and not loop.ended:
                enclosing.left_inside = True

    def _at_end(self, loop: Loop) -> None:
        """The loop yields no more: it came to its end, unless the run is leaving."""
        if self.positions.passed(loop.name):
            loop.ended = True
            return
        self._bodies.arrive(loop)
        loop.ended = not self._engine.leaving
        if loop.ended:
            self._engine.at_loop_end()

    def _belong_to_epoch(self, loop: Loop) -> None:
        """Note the enclosing epoch; a stop of an earlier one is over."""
        if loop.enclosing is None:
            return
        if loop.position.within != loop.enclosing_epoch:
            loop.position.stopped = False
        loop.position.within = loop.enclosing_epoch

    def _refuse_used_up(self, loop: Loop) -> None:
        """A limit counts over all epochs. One that an earlier epoch has reached would skip this one in silence."""
        position, epoch = loop.position, loop.enclosing_epoch
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
