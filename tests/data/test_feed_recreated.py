"""Loaders that know nothing of positions, under each choice of resume_data."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from spotsafe.data.feed import Feed, feed_for
from spotsafe.errors import StateMismatch
from tests.data.traced import Traced

pytestmark = [
    # Python 3.12 warns of fork in a process with threads; torch's own threads do not hold locks here.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]

Make = Callable[[int], Traced]


def quiet(message: str) -> None:
    raise AssertionError(f"nothing to warn about, but: {message}")


def train(feed: Feed, batches: int, *, draw: bool = True) -> list[list[int]]:
    """As a loop does: draw random numbers in each body, commit, go on over ends of epochs, leave early."""
    done: list[list[int]] = []
    while len(done) < batches:
        iterator = feed.start()
        for batch in iterator:
            done.append(batch[0].tolist())
            if draw:
                torch.rand(3)
                random.random()
            feed.committed(1)
            if len(done) == batches:
                iterator.close()  # type: ignore[attr-defined] # iterators of feeds have it
                return done
        feed.finish_epoch()
    return done


def of(loader: Any, choice: str) -> Feed:
    return feed_for(loader, resume_data=choice, warn=quiet)


def by_json(feed: Feed) -> Any:
    return json.loads(json.dumps(feed.state()))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("done", [1, 4, 5, 8])
def test_skip_makes_the_same_order_again(traced: Make, workers: int, own_generator: bool, done: int) -> None:
    """With shuffle from the global generator or one of its own; the training's random numbers do not notice."""

    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5) if own_generator else None
        return DataLoader(traced(18), 4, shuffle=True, num_workers=workers, generator=generator)

    torch.manual_seed(1)
    expected = train(of(make(), "skip"), 10)
    torch.manual_seed(1)
    first = of(make(), "skip")
    got = train(first, done)
    state, training = by_json(first), torch.get_rng_state()

    torch.manual_seed(77)
    second = of(make(), "skip")
    second.load(state)
    if second.ended:  # the loop restores the generators, then goes on to the next epoch
        second.finish_epoch()
        torch.set_rng_state(training)
        assert got + train(second, 10 - done) == expected
        return
    before = torch.get_rng_state()
    iterator = second.start()
    assert torch.equal(before, torch.get_rng_state())
    torch.set_rng_state(training)
    got.append(next(iterator)[0].tolist())
    assert got == expected[: done + 1]


def test_skip_fetches_what_it_drops(traced: Make) -> None:
    """That is its price, and why our own loader does not need it."""
    first = of(DataLoader(traced(20), 4), "skip")
    train(first, 3)
    data = traced(20)
    second = of(DataLoader(data, 4), "skip")
    second.load(by_json(first))
    assert next(second.start())[0].tolist() == [12, 13, 14, 15]
    assert data.fetched() == list(range(16))


def test_skip_goes_on_in_the_same_process(traced: Make) -> None:
    """A break and a new start continue at the committed batch."""
    torch.manual_seed(3)
    feed = of(DataLoader(traced(20), 4, shuffle=True), "skip")
    got = train(feed, 2) + train(feed, 3)
    assert sorted(index for batch in got for index in batch) == list(range(20))


def test_skip_works_for_any_iterable() -> None:
    """A list that is the same at each start is exact."""
    batches = [torch.tensor([[n]]) for n in range(5)]
    first = of(batches, "skip")
    train(first, 3)
    second = of(batches, "skip")
    second.load(by_json(first))
    assert (second.ended, second.remaining()) == (None, None)
    assert [batch.item() for batch in second.start()] == [3, 4]


def test_skip_notices_data_that_shrank() -> None:
    """Fewer batches than were done: the data is another."""
    first = of(list(range(5)), "skip")
    iterator = first.start()
    for _ in range(4):
        next(iterator)
        first.committed(1)
    second = of([0, 1], "skip")
    second.load(by_json(first))
    with pytest.raises(StateMismatch, match="4 batches of epoch 0 are done, but the loader now ends after 2"):
        second.start()


def test_skip_refuses_a_position_without_its_generators(traced: Make) -> None:
    """Saved under "fresh" there is nothing to make the order from."""
    first = of(DataLoader(traced(20), 4), "fresh")
    train(first, 2)
    with pytest.raises(StateMismatch, match="saved with resume_data"):
        of(DataLoader(traced(20), 4), "skip").load(by_json(first))


def test_skip_refuses_other_generators(traced: Make) -> None:
    """A loader that has lost its own generator would make another order."""
    data = traced(20)
    first = of(DataLoader(data, 4, sampler=RandomSampler(data, generator=torch.Generator())), "skip")
    train(first, 2)
    second = of(DataLoader(data, 4, shuffle=True), "skip")
    with pytest.raises(StateMismatch, match=r"had 1 torch\.Generator of its own"):
        second.load(by_json(first))


def test_epoch_repeats_the_epoch_in_its_order(traced: Make) -> None:
    """From its start, with the same shuffle."""
    torch.manual_seed(1)
    expected = train(of(DataLoader(traced(18), 4, shuffle=True), "epoch"), 5)
    torch.manual_seed(1)
    first = of(DataLoader(traced(18), 4, shuffle=True), "epoch")
    train(first, 3)
    torch.manual_seed(2)
    second = of(DataLoader(traced(18), 4, shuffle=True), "epoch")
    second.load(by_json(first))
    assert train(second, 5) == expected
    assert second.epoch == 0


def test_fresh_begins_anew_and_keeps_the_count_of_epochs(traced: Make) -> None:
    """A new iterator, whatever was done; the state is a few numbers."""
    first = of(DataLoader(traced(18), 4), "fresh")
    train(first, 7)
    assert len(json.dumps(first.state())) < 100
    second = of(DataLoader(traced(18), 4), "fresh")
    second.load(by_json(first))
    assert second.epoch == 1
    assert next(second.start())[0].tolist() == [0, 1, 2, 3]
    assert second.remaining() == 5


def test_lengths_of_map_style_loaders_are_known(traced: Make) -> None:
    """So that a short last accumulation window and the end of an epoch are seen in time."""
    feed = of(DataLoader(traced(18), 4), "fresh")
    assert (feed.remaining(), feed.ended) == (5, False)
    feed.committed(5)
    assert (feed.remaining(), feed.ended) == (0, True)
    feed.finish_epoch()
    assert (feed.remaining(), feed.ended, feed.epoch) == (5, False, 1)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_streams_have_no_known_end() -> None:
    """What an IterableDataset says of its length is not trusted."""
    feed = of(DataLoader(Stream(), 2), "skip")
    assert (feed.remaining(), feed.ended) == (None, None)


def test_a_generator_goes_on_where_it_is() -> None:
    """A one-shot iterator is not closed by a break, so a second loop in the process continues it."""
    feed = of(iter(torch.tensor([[n]]) for n in range(5)), "fresh")
    first = feed.start()
    assert next(first).item() == 0
    first.close()  # type: ignore[attr-defined] # iterators of feeds have it
    assert [batch.item() for batch in feed.start()] == [1, 2, 3, 4]


@pytest.mark.parametrize("origin", [3, {}, {"process": {}, "own": []}, {"process": None, "own": ["?"]}])
def test_damaged_generators_are_refused(traced: Make, origin: Any) -> None:
    """Never a traceback from deep inside."""
    feed = of(DataLoader(traced(18), 4), "skip")
    with pytest.raises(StateMismatch, match="generators of the loader cannot be read"):
        feed.load({"kind": "recreated", "epoch": 0, "batches": 2, "origin": origin, "own": []})
