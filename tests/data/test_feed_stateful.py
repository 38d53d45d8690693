"""Loaders with state_dict and load_state_dict, taken as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from spotsafe.data.feed import Feed, feed_for


class Counting:
    """A stateful loader in the manner of torchdata's: yields epoch * 10 + position, five to an epoch.

    Its state counts what was yielded. After a load, one `iter` continues there; every other `iter` begins the next
    epoch. A state at the very end of an epoch continues with nothing; one after the end begins the next epoch.
    """

    def __init__(self) -> None:
        self.epoch, self.position, self.finished = -1, 0, True
        self.resume = False
        self.asked = 0
        self.iters = 0

    def __iter__(self) -> Iterator[int]:
        self.iters += 1
        if self.resume and not self.finished:
            self.resume = False
        else:
            self.resume = False
            self.epoch, self.position, self.finished = self.epoch + 1, 0, False
        return self._values(self.epoch)

    def _values(self, epoch: int) -> Iterator[int]:
        while self.position < 5:
            self.position += 1
            yield 10 * epoch + self.position - 1
        self.finished = True

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"epoch": self.epoch, "position": self.position, "finished": self.finished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position, self.finished = state["epoch"], state["position"], state["finished"]
        self.resume = True


def make() -> Feed:
    def warn(message: str) -> None:
        raise AssertionError(message)

    return feed_for(Counting(), resume_data=None, warn=warn)


def train(feed: Feed, batches: int) -> list[int]:
    done: list[int] = []
    while len(done) < batches:
        iterator = feed.start()
        for value in iterator:
            done.append(value)
            feed.committed(1)
            if len(done) == batches:
                iterator.close()  # type: ignore[attr-defined] # iterators of feeds have it
                return done
        feed.finish_epoch()
    return done


def moved(feed: Feed) -> Feed:
    other = make()
    other.load(json.loads(json.dumps(feed.state())))
    return other


EXPECTED = [10 * epoch + position for epoch in range(3) for position in range(5)]


def test_a_resume_anywhere_continues_exactly() -> None:
    """In mid-epoch, exactly at the end of one, in the second: nothing twice, nothing missed."""
    for done in range(15):
        first = make()
        got = train(first, done)
        assert got + train(moved(first), 15 - done) == EXPECTED


def test_a_resume_after_the_end_of_an_epoch_was_seen_begins_the_next() -> None:
    """Before and after `finish_epoch`."""
    for finish in (False, True):
        feed = make()
        assert [value for value in feed.start() if feed.committed(1) is None] == EXPECTED[:5]
        if finish:
            feed.finish_epoch()
        assert train(moved(feed), 5) == EXPECTED[5:10]


def test_a_yielded_but_uncommitted_batch_comes_again() -> None:
    """A body that was left before its update: the state is the one from before its batch was fetched."""
    feed = make()
    iterator = feed.start()
    for _ in range(3):
        next(iterator)
        feed.committed(1)
    next(iterator)
    assert train(moved(feed), 2) == [3, 4]


def test_an_accumulation_window_counts_as_a_whole() -> None:
    """Inside a window of micro-batches the position is that of its start."""
    feed = make()
    iterator = feed.start()
    next(iterator)
    next(iterator)
    assert train(moved(feed), 1) == [0]
    feed.committed(2)
    assert train(moved(feed), 1) == [2]


def test_the_state_before_the_start_asks_for_nothing() -> None:
    """Some loaders start their workers when they are asked for their state."""
    loader = Counting()
    feed = feed_for(loader, resume_data=None, warn=lambda message: None)
    state = feed.state()
    assert loader.asked == 0
    assert train(moved(feed), 2) == [0, 1]
    fresh = make()
    fresh.load(state)
    assert fresh.epoch == 0


def test_a_loaded_position_that_is_not_used_is_kept() -> None:
    """State, load, state: the same."""
    feed = make()
    train(feed, 2)
    assert moved(feed).state() == feed.state()


def test_leaving_an_unfinished_epoch_begins_the_next() -> None:
    """A loop that was left by a break and whose epoch is over: also from a state, by way of one dropped iterator."""
    feed = make()
    train(feed, 2)
    feed.finish_epoch()
    assert feed.epoch == 1
    resumed = moved(feed)
    assert train(feed, 1) == [10]
    assert train(resumed, 1) == [10]
    unfinished = make()
    train(unfinished, 2)
    later = moved(unfinished)
    later.finish_epoch()
    assert train(later, 1) == [10]


def test_one_iter_for_each_resume() -> None:
    """Not more: some loaders read from the start of a shard at each."""
    feed = make()
    train(feed, 2)
    loader = Counting()
    other = feed_for(loader, resume_data=None, warn=lambda message: None)
    other.load(feed.state())
    train(other, 1)
    assert loader.iters == 1


def test_only_the_iterator_knows_the_end() -> None:
    """No length is assumed."""
    feed = make()
    assert (feed.ended, feed.remaining(), feed.place_of(feed.state()), feed.epoch) == (None, None, None, 0)
