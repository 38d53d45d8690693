"""Passes of a loop over its loader: where each begins, and the micro-batches of each step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from spotsafe.bodies import Bodies, Loop
from spotsafe.data.feed import Feed
from spotsafe.errors import RunError
from spotsafe.positions import Position, Positions


@dataclass(slots=True, eq=False)
class Passes:
    """Goes over the loaders of one run."""

    bodies: Bodies
    positions: Positions
    sync_gradients: bool = True
    """The micro-batch that was yielded is the last of its step."""
    _used: set[Feed] = field(default_factory=set)
    """Feeds that a loop of this process has gone over."""

    def begin(self, loop: Loop, feed: Feed) -> None:
        """Put the feed where this loop goes on, or where its first pass begins."""
        position, epoch = loop.position, loop.enclosing_epoch
        if position.feed is not None:
            feed.load(position.feed)
            if position.within != epoch:  # a pass of an earlier epoch, complete or left by a break
                feed.finish_epoch()
                position.passes, position.stopped = 0, False
        else:
            self._begin_behind_others(position, feed)
        loop.feed = feed
        position.within = epoch
        position.live_feed = feed.state
        self._used.add(feed)

    def one(self, loop: Loop, feed: Feed, *, until: int | None, accumulate: int) -> Iterator[tuple[int, Any]]:
        """From the feed's position to the end of its epoch, to `until`, or to a stop."""
        if feed.ended:  # restored at the end of an epoch: without an iterator the generators stay as they are
            self.bodies.arrive(loop)
            return
        batches = feed.start()
        self.bodies.arrive(loop)  # only now: making an iterator may have drawn random numbers
        try:
            going = True
            while going and not self.bodies.over(loop) and (until is None or loop.position.done < until):
                going = yield from self._one_step(loop, batches, window=_window(feed, accumulate))
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()

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
        elif feed in self._used:
            feed.finish_epoch()

    def _one_step(
        self, loop: Loop, batches: Iterator[Any], *, window: int
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
                self.bodies.begin(loop)
            self.sync_gradients = taken == window
            try:
                yield loop.position.done, batch
            except GeneratorExit:
                self.bodies.close_early(loop, batches=taken)
                raise
        self.bodies.end(loop, batches=window)
        return True


def _window(feed: Feed, accumulate: int) -> int:
    """How many micro-batches the next step takes: a short last window of an epoch is a step too."""
    if accumulate == 1:
        return 1
    remaining = feed.remaining()
    if remaining is None:
        raise RunError("accumulate= needs a loader with a length: give it __len__")
    return max(1, min(accumulate, remaining))
