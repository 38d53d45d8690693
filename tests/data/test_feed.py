"""Which feed a loader gets, and the feed of our own order."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

from spotsafe.data.feed import Feed, feed_for
from spotsafe.data.feed_order import OrderFeed
from spotsafe.data.feed_recreated import RecreatedFeed
from spotsafe.data.feed_stateful import StatefulFeed
from spotsafe.data.loader import ResumableDataLoader
from spotsafe.data.sampler import ResumableSampler
from spotsafe.errors import LoaderNotResumable, RunError, StateMismatch
from tests.data.traced import Traced

pytestmark = [
    # Python 3.12 warns of fork in a process with threads; torch's own threads do not hold locks here.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]

Make = Callable[[int], Traced]


def quiet(message: str) -> None:
    raise AssertionError(f"nothing to warn about, but: {message}")


def ours(data: Any, **options: Any) -> OrderFeed:
    loader = ResumableDataLoader(data, **({"batch_size": 4, "shuffle": True} | options))
    feed = feed_for(loader, resume_data=None, warn=quiet)
    assert isinstance(feed, OrderFeed)
    return feed


def train(feed: Feed, batches: int) -> list[list[int]]:
    """Take and commit so many batches, over ends of epochs, as a loop does; leave the last iterator early."""
    done: list[list[int]] = []
    while len(done) < batches:
        iterator = feed.start()
        for batch in iterator:
            done.append((batch[0] if isinstance(batch, (list, tuple)) else batch).tolist())
            feed.committed(1)
            if len(done) == batches:
                iterator.close()  # type: ignore[attr-defined] # iterators of feeds have it
                return done
        feed.finish_epoch()
    return done


def moved(feed: Feed, other: Feed) -> Feed:
    """The position of a feed in another one, by way of JSON."""
    other.load(json.loads(json.dumps(feed.state())))
    return other


# -- which kind ------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Stateful:
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_each_loader_gets_its_kind() -> None:
    """Ours by position, stateful ones as they are, others only with a choice."""
    assert isinstance(feed_for(ResumableDataLoader(range(3)), resume_data=None, warn=quiet), OrderFeed)
    with_sampler = DataLoader(range(3), sampler=ResumableSampler(range(3)))
    assert isinstance(feed_for(with_sampler, resume_data=None, warn=quiet), OrderFeed)
    assert isinstance(feed_for(Stateful(), resume_data=None, warn=quiet), StatefulFeed)
    for choice in ("skip", "epoch", "fresh"):
        assert isinstance(feed_for(DataLoader(range(3)), resume_data=choice, warn=quiet), RecreatedFeed)


@pytest.mark.parametrize("loader", [[1, 2], (n for n in range(3)), DataLoader(Stream())])
def test_a_plain_iterable_warns_once_and_goes_on(loader: Any) -> None:
    """Its position cannot be kept; the warning names the ways out. With a choice there is none."""
    warnings: list[str] = []
    feed = feed_for(loader, resume_data=None, warn=warnings.append)
    assert len(list(feed.start())) in {2, 3}
    assert len(warnings) == 1
    assert type(loader).__name__ in warnings[0]
    assert 'resume_data="skip"' in warnings[0]
    feed_for(loader, resume_data="fresh", warn=quiet)


@pytest.mark.parametrize(
    ("loader", "line"),
    [
        (
            DataLoader(range(9), 32, shuffle=True, num_workers=2, pin_memory=True, drop_last=True),
            (
                "loader = spotsafe.ResumableDataLoader(dataset, batch_size=32, shuffle=True, seed=0, num_workers=2, "
                "pin_memory=True, drop_last=True)\n"
            ),
        ),
        (
            DataLoader(range(9), collate_fn=quiet),
            "loader = spotsafe.ResumableDataLoader(dataset, batch_size=1, shuffle=False, seed=0, collate_fn=quiet)\n",
        ),
        (
            DataLoader(range(9), batch_size=None),
            "loader = spotsafe.ResumableDataLoader(dataset, batch_size=None, shuffle=False, seed=0)\n",
        ),
        (
            DataLoader(range(9), sampler=DistributedSampler(range(9), num_replicas=1, rank=0)),
            "loader = spotsafe.ResumableDataLoader(dataset, batch_size=1, shuffle=True, seed=0)\n",
        ),
    ],
)
def test_a_plain_loader_is_refused_with_the_line_to_write(loader: Any, line: str) -> None:
    """The error shows the call that means the same, and the choices."""
    with pytest.raises(LoaderNotResumable) as caught:
        feed_for(loader, resume_data=None, warn=quiet)
    assert line in str(caught.value)
    for choice in ("skip", "epoch", "fresh"):
        assert f'"{choice}"' in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": WeightedRandomSampler([1.0, 2.0], 2), "batch_size": 2},
        {"batch_sampler": BatchSampler(SequentialSampler(range(2)), 2, False)},
    ],
)
def test_a_sampler_without_counterpart_is_named(options: dict[str, Any]) -> None:
    """No line is shown as if it meant the same."""
    with pytest.raises(LoaderNotResumable, match=r"Its \w+Sampler has no counterpart") as caught:
        feed_for(DataLoader(range(2), **options), resume_data=None, warn=quiet)
    assert "batch_size=2" in str(caught.value)


def test_wrong_arguments_are_refused() -> None:
    """An unknown choice and something that is no loader."""
    with pytest.raises(ValueError, match="not 'exact'"):
        feed_for([1], resume_data="exact", warn=quiet)
    with pytest.raises(TypeError, match="iterable of batches, not a int"):
        feed_for(3, resume_data=None, warn=quiet)  # type: ignore[arg-type] # the mistake itself
    with pytest.raises(LoaderNotResumable, match="in_order"):
        out_of_order = DataLoader(range(3), sampler=ResumableSampler(range(3)), in_order=False)
        feed_for(out_of_order, resume_data=None, warn=quiet)


# -- our own order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [3, 16, 18])
def test_a_resume_continues_behind_the_committed_work(traced: Make, length: int, drop_last: bool) -> None:
    """Three epochs, moved to a new feed after any number of batches: the same samples, none fetched for nothing."""
    options = {"drop_last": drop_last}
    if drop_last and length < 4:
        assert ours(traced(length), **options).ended
        return
    per_epoch = ours(traced(length), **options).remaining()
    expected = train(ours(traced(length), **options), 3 * per_epoch)
    for done in range(3 * per_epoch):
        first = ours(traced(length), **options)
        assert train(first, done) == expected[:done]
        data = traced(length)
        second = moved(first, ours(data, **options))
        if second.ended:
            second.finish_epoch()
        assert train(second, 3 * per_epoch - done) == expected[done:]
        assert data.fetched() == sorted(index for batch in expected[done:] for index in batch)


def test_only_committed_batches_count(traced: Make) -> None:
    """What workers fetched ahead, and what was yielded but not trained on, comes again."""
    feed = ours(traced(20), num_workers=2)
    iterator = feed.start()
    first, second = next(iterator)[0].tolist(), next(iterator)[0].tolist()
    feed.committed(1)
    assert moved(feed, ours(traced(20))).remaining() == 4
    again = feed.start()
    assert next(again)[0].tolist() == second != first


class UsedUp:
    """A dataset that reads from an iterator, which ends too soon."""

    def __init__(self, length: int, good: int) -> None:
        self.length = length
        self.source = iter(range(good))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return next(self.source)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("sampler", [False, True])
def test_a_stop_iteration_out_of_the_dataset_is_not_the_end(workers: int, sampler: bool) -> None:
    """Python takes it for the end of the data; the run would count as finished without half of its steps."""
    data = UsedUp(8, good=5)
    loader: Any = (
        DataLoader(data, sampler=ResumableSampler(data), batch_size=2, num_workers=workers)  # type: ignore[arg-type] # a dataset by duck typing
        if sampler
        else ResumableDataLoader(data, batch_size=2, num_workers=workers)
    )
    feed = feed_for(loader, resume_data=None, warn=quiet)
    iterator = feed.start()
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(RunError, match="2 batches before the end of its epoch"):
        next(iterator)
    iterator.close()  # type: ignore[attr-defined] # iterators of feeds have it
    assert next(iterator, None) is None


def test_the_end_of_an_epoch_is_known_before_it_is_left(traced: Make) -> None:
    """The loop runs the tail of an epoch between its last step and `finish_epoch`."""
    feed = ours(traced(18))
    assert (feed.epoch, feed.ended, feed.remaining(), feed.state()["samples"]) == (0, False, 5, 0)
    feed.committed(5)
    assert (feed.epoch, feed.ended, feed.remaining(), feed.state()["samples"]) == (0, True, 0, 18)
    resumed = moved(feed, ours(traced(18)))
    assert (resumed.epoch, resumed.ended, resumed.state()["samples"]) == (0, True, 18)
    assert list(resumed.start()) == []
    resumed.finish_epoch()
    assert (resumed.epoch, resumed.ended, resumed.remaining(), resumed.state()["samples"]) == (
        1,
        False,
        5,
        18,
    )


def test_the_state_is_small_and_the_same_for_any_number_of_workers(traced: Make) -> None:
    """Some hundred bytes of plain values."""
    states = []
    for workers in (0, 2):
        feed = ours(traced(18), num_workers=workers)
        train(feed, 3)
        states.append(json.dumps(feed.state()))
    assert states[0] == states[1]
    assert len(states[0]) < 200


def test_the_number_of_workers_may_change_at_a_resume(traced: Make) -> None:
    """From two to none to three, in one epoch."""
    expected = train(ours(traced(40)), 10)
    got: list[list[int]] = []
    feed = ours(traced(40), num_workers=2)
    got += train(feed, 3)
    feed = moved(feed, ours(traced(40)))
    got += train(feed, 3)
    got += train(moved(feed, ours(traced(40), num_workers=1, persistent_workers=True)), 4)
    assert got == expected


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_that_is_closed_early_leaves_no_worker(traced: Make, persistent: bool) -> None:
    """Unless the user asked for persistent workers; those end with the loader. A new start works either way."""
    before = set(multiprocessing.active_children())
    feed = ours(traced(40), num_workers=2, persistent_workers=persistent)
    expected = train(ours(traced(40)), 6)
    assert [*train(feed, 2), *train(feed, 2)] == expected[:4]
    left = set(multiprocessing.active_children()) - before
    assert len(left) == (2 if persistent else 0)
    assert train(feed, 2) == expected[4:]
    del feed
    assert not set(multiprocessing.active_children()) - before


def test_start_leaves_the_global_generators_alone(traced: Make) -> None:
    """Nothing has to be restored after it."""
    before = torch.get_rng_state()
    ours(traced(20), num_workers=2).start().close()  # type: ignore[attr-defined] # iterators of feeds have it
    assert torch.equal(before, torch.get_rng_state())


def test_the_loaders_own_position_is_another_matter(traced: Make) -> None:
    """set_epoch and loops of one's own over the same loader do not move the run's position."""
    loader = ResumableDataLoader(traced(20), 4, True)
    feed = feed_for(loader, resume_data=None, warn=quiet)
    expected = train(ours(traced(20)), 10)
    got = train(feed, 2)
    loader.set_epoch(7)
    next(iter(loader))
    assert got + train(feed, 8) == expected


def test_a_torch_loader_with_our_sampler_is_exact(traced: Make) -> None:
    """Prefetched indices do not count; drop_last and batch size are the DataLoader's."""

    def make(workers: int) -> Feed:
        data = traced(22)
        loader = DataLoader(
            data, 4, sampler=ResumableSampler(data, seed=2), num_workers=workers, drop_last=True
        )
        return feed_for(loader, resume_data=None, warn=quiet)

    expected = train(make(0), 10)
    feed = make(2)
    assert feed.remaining() == 5
    got = train(feed, 7)
    assert got + train(moved(feed, make(0)), 3) == expected


@pytest.mark.parametrize("choice", ["epoch", "fresh"])
def test_another_order_begins_the_epoch_anew_if_that_is_chosen(traced: Make, choice: str) -> None:
    """Without a choice, and with "skip", it is an error that names both values; with one it is a warning."""
    first = ours(traced(20))
    train(first, 7)
    for refused in (None, "skip"):
        feed = feed_for(ResumableDataLoader(traced(21), 4, True), resume_data=refused, warn=quiet)
        with pytest.raises(StateMismatch, match="length: saved 20, now 21"):
            moved(first, feed)
    warnings: list[str] = []
    feed = feed_for(ResumableDataLoader(traced(21), 4, True), resume_data=choice, warn=warnings.append)
    moved(first, feed)
    assert (feed.epoch, feed.remaining(), feed.state()["samples"]) == (1, 6, 28)
    assert "length: saved 20, now 21" in warnings[0]


def test_a_matching_position_is_exact_whatever_is_chosen(traced: Make) -> None:
    """A choice for the case that a position is lost costs nothing while it is not."""
    first = ours(traced(20))
    train(first, 2)
    feed = moved(first, feed_for(ResumableDataLoader(traced(20), 4, True), resume_data="fresh", warn=quiet))
    assert feed.remaining() == 3


def test_a_position_of_another_kind_of_loader_is_refused(traced: Make) -> None:
    """In every direction, with both kinds named; "epoch" begins the saved epoch with the new kind."""
    feeds = {
        "ResumableDataLoader": lambda choice: feed_for(
            ResumableDataLoader(range(3)), resume_data=choice, warn=[].append
        ),
        "loader with state_dict": lambda choice: feed_for(Stateful(), resume_data=choice, warn=[].append),
        "plain loader": lambda choice: feed_for(
            DataLoader(range(3)), resume_data=choice or "skip", warn=[].append
        ),
    }
    for saved, make_saved in feeds.items():
        state = make_saved(None)
        state.finish_epoch()
        for now, make_now in feeds.items():
            if saved == now:
                continue
            with pytest.raises(StateMismatch, match=f"that of a {saved}, this loop has a {now}"):
                make_now(None).load(state.state())
            chosen = make_now("epoch")
            chosen.load(state.state())
            assert chosen.epoch == 1


@pytest.mark.parametrize(
    "state", [None, [], {}, {"kind": "order"}, {"kind": "order", "version": 1}, {"kind": 3}]
)
def test_a_damaged_state_is_refused(traced: Make, state: Any) -> None:
    """Never read as a position."""
    with pytest.raises(StateMismatch):
        ours(traced(3)).load(state)
