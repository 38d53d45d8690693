"""ResumableDataLoader against torch's DataLoader and against its own uninterrupted self."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from spotsafe.data.loader import ResumableDataLoader
from spotsafe.data.order import Cursor
from spotsafe.errors import LoaderNotResumable, StateMismatch
from tests.data.traced import Traced, as_rows

pytestmark = [
    # Three workers are more than a small machine has cores; torch says so, and that is not the subject here.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # Python 3.12 warns of fork in a process with threads; torch's own threads do not hold locks here.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]

Make = Callable[[int], Traced]


def rows_of(batches: Iterator[Any]) -> list[list[tuple[float, ...]]]:
    return [as_rows(batch) for batch in batches]


def ids_of(batches: Iterator[Any]) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


# -- as torch's ------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(1, 40),
    batch_size=st.one_of(st.none(), st.integers(1, 12)),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_lengths_and_ends_are_those_of_torch(
    length: int, batch_size: int | None, drop_last: bool, shuffle: bool
) -> None:
    """len(loader), the number of batches and their sizes agree with DataLoader for every combination."""
    drop_last = drop_last and batch_size is not None
    data = TensorDataset(torch.arange(length))
    options = {"batch_size": batch_size, "drop_last": drop_last}
    theirs, ours = DataLoader(data, **options), ResumableDataLoader(data, shuffle=shuffle, **options)
    assert len(ours) == len(theirs)
    got, expected = [b[0] for b in ours], [b[0] for b in theirs]
    assert [b.shape for b in got] == [b.shape for b in expected]
    assert len(got) == len(ours)
    if not shuffle:
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_arguments_have_the_places_of_torch() -> None:
    """Positional calls mean the same; our own arguments are keywords."""
    theirs = list(inspect.signature(DataLoader.__init__).parameters.values())
    ours = inspect.signature(ResumableDataLoader.__init__).parameters
    positional = [p.name for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    for parameter in theirs[1:]:
        if parameter.name in ours:
            assert ours[parameter.name].default == parameter.default
    assert {"seed", "stream"} <= {p.name for p in ours.values() if p.kind is p.KEYWORD_ONLY}


def test_it_shows_the_users_objects(traced: Make) -> None:
    """The attributes that programs read are what was given, not our wrappers."""
    data, collate, init = traced(10), (lambda samples: samples), (lambda worker: None)
    loader = ResumableDataLoader(data, 4, True, collate_fn=collate, worker_init_fn=init)
    assert loader.dataset is data
    assert loader.collate_fn is collate
    assert loader.worker_init_fn is init
    assert (loader.batch_size, loader.num_workers, loader.drop_last) == (4, 0, False)


def test_options_set_later_count(traced: Make) -> None:
    """Torch lets programs set most attributes after the loader is made; so do we."""
    loader = ResumableDataLoader(traced(6), 2)
    loader.collate_fn = lambda samples: "collated"
    assert list(loader) == ["collated"] * 3


def test_batch_size_none_yields_samples(traced: Make) -> None:
    """Without batching each sample comes by itself, resumable as well."""
    loader = ResumableDataLoader(traced(5), None, shuffle=True)
    whole = [int(sample[0]) for sample in loader]
    again = ResumableDataLoader(traced(5), None, shuffle=True)
    assert sorted(whole) == list(range(5))
    assert [int(sample[0]) for sample in again.iter_from(Cursor(position=2))] == whole[2:]


class AtOnce(Dataset):
    """Prefers to be asked for several samples at once."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        raise AssertionError("__getitems__ is there")

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.asked.append(indices)
        return [10 * index + random.randrange(10) for index in indices]


def test_getitems_is_used_and_seeded() -> None:
    """A dataset with __getitems__ is asked once per batch, with plain indices, under the batch's seed."""
    data = AtOnce()
    first = [batch.tolist() for batch in ResumableDataLoader(data, 4)]
    assert data.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert first == [batch.tolist() for batch in ResumableDataLoader(AtOnce(), 4)]
    list(ResumableDataLoader(Subset(range(10), [1, 2, 3]), 2))  # a Subset has __getitems__ too


def test_an_empty_dataset_has_an_empty_epoch(traced: Make) -> None:
    """Nothing is yielded, nothing fails."""
    loader = ResumableDataLoader(traced(0), 4)
    assert len(loader) == 0
    assert list(loader) == []


# -- refusals --------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsized(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": range(3)}, "takes no sampler=.*shuffle=True"),
        ({"batch_sampler": [[0]]}, "takes no batch_sampler="),
        ({"generator": torch.Generator()}, "seed=generator.initial_seed"),
        ({"in_order": False}, "in_order=False"),
        ({"seed": -1}, "seed must be"),
        ({"batch_size": None, "drop_last": True}, "mutually exclusive"),
    ],
)
def test_what_contradicts_an_order_of_its_own_is_refused(options: dict[str, Any], words: str) -> None:
    """Each with what to write instead."""
    with pytest.raises(ValueError, match=words):
        ResumableDataLoader(range(3), **options)


@pytest.mark.parametrize("data", [Stream(), Unsized()])
def test_data_without_known_order_are_refused(data: Any) -> None:
    """Iterable-style datasets and those without a length cannot be resumed by index."""
    with pytest.raises(LoaderNotResumable, match=r"IterableDataset|__len__"):
        ResumableDataLoader(data)


def test_a_dataset_that_changed_its_length_is_refused() -> None:
    """Another length is another order; going on silently would mix two."""
    data = [1, 2, 3]
    loader = ResumableDataLoader(data)
    data.append(4)
    with pytest.raises(ValueError, match="from 3 to 4"):
        iter(loader)


# -- random numbers --------------------------------------------------------------------------------------------


def all_generators() -> tuple[Any, ...]:
    state = np.random.get_state(legacy=False)
    return (
        random.getstate(),
        state["state"]["key"].tolist(),
        state["state"]["pos"],
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_generators_are_never_disturbed(traced: Make, workers: int) -> None:
    """Neither iter() nor any batch draws from, seeds or moves the training's own random numbers."""
    before = all_generators()
    iterator = iter(ResumableDataLoader(traced(6), 2, True, num_workers=workers))
    assert all_generators() == before
    for _ in iterator:
        assert all_generators() == before


class Failing(Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        raise RuntimeError("unreadable sample")


def test_the_generators_are_put_back_when_a_sample_fails() -> None:
    """An exception out of the dataset reaches the user as it is, and the random numbers stay untouched."""
    before = all_generators()
    with pytest.raises(RuntimeError, match="unreadable sample"):
        list(ResumableDataLoader(Failing()))
    assert all_generators() == before


@pytest.mark.parametrize("workers", [1, 3])
def test_augmentation_is_the_same_for_any_number_of_workers(traced: Make, workers: int) -> None:
    """All three generators give each sample the same numbers wherever it is fetched; no two samples agree."""
    options = {"batch_size": 4, "shuffle": True, "seed": 11}
    alone = rows_of(ResumableDataLoader(traced(21), **options))
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    assert rows_of(ResumableDataLoader(traced(21), num_workers=workers, **options)) == alone
    numbers = [row[column] for batch in alone for row in batch for column in (1, 2, 3)]
    assert len(set(numbers)) == len(numbers)


def test_each_epoch_augments_anew(traced: Make) -> None:
    """Without shuffle the samples repeat, their random numbers do not."""
    loader = ResumableDataLoader(traced(8), 4)
    first, second = rows_of(loader), rows_of(loader)
    assert [[row[0] for row in batch] for batch in first] == [[row[0] for row in batch] for batch in second]
    assert not {row[1:] for batch in first for row in batch} & {row[1:] for batch in second for row in batch}


def noisy_collate(samples: list[Any]) -> tuple[list[int], float, float]:
    return [sample[0] for sample in samples], random.random(), float(torch.rand(()))


@pytest.mark.parametrize("workers", [0, 2])
def test_random_collation_repeats(traced: Make, workers: int) -> None:
    """Masking or mixing in the collate function has its own seed for each batch."""
    options = {"batch_size": 3, "collate_fn": noisy_collate}
    expected = list(ResumableDataLoader(traced(9), **options))
    assert list(ResumableDataLoader(traced(9), num_workers=workers, **options)) == expected
    assert len({batch[1] for batch in expected}) == 3


# -- epochs ----------------------------------------------------------------------------------------------------


def test_every_iter_is_the_next_epoch_without_set_epoch(traced: Make) -> None:
    """Forgetting set_epoch repeats no order; calling it changes nothing."""
    plain, called = ResumableDataLoader(traced(30), 7, True), ResumableDataLoader(traced(30), 7, True)
    epochs = []
    for epoch in range(3):
        called.set_epoch(epoch)
        epochs.append(ids_of(plain))
        assert epochs[-1] == ids_of(called)
    assert len({str(epoch) for epoch in epochs}) == 3


def test_set_epoch_goes_to_any_epoch(traced: Make) -> None:
    """Backward too; seed 0 in epoch 1 is not seed 1 in epoch 0."""
    loader = ResumableDataLoader(traced(30), 7, True)
    epochs = [ids_of(loader) for _ in range(3)]
    loader.set_epoch(1)
    assert ids_of(loader) == epochs[1]
    assert ids_of(ResumableDataLoader(traced(30), 7, True, seed=1)) != epochs[1]


def test_leaving_an_epoch_early_leads_to_the_next(traced: Make) -> None:
    """As with torch, a new pass after a break is a new shuffle, not the same beginning again."""
    loader = ResumableDataLoader(traced(30), 7, True)
    whole = [ids_of(ResumableDataLoader(traced(30), 7, True).iter_from(Cursor(epoch=e))) for e in range(2)]
    for batch in loader:
        assert batch[0].tolist() == whole[0][0]
        break
    assert ids_of(loader) == whole[1]


def test_an_iterator_that_yielded_nothing_uses_no_epoch(traced: Make) -> None:
    """Making one and dropping it does not skip data; nor does it lose a loaded position."""
    loader = ResumableDataLoader(traced(30), 7, True)
    iter(loader)
    first = ids_of(loader)
    assert first == ids_of(ResumableDataLoader(traced(30), 7, True))
    loader.load_state_dict(loader.order.state(Cursor(position=14)))
    iter(loader)
    assert ids_of(loader) == first[2:]


class KnowsEpoch(Traced):
    """Notes what it is told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.note(f"{1000 + epoch}")

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_the_dataset_is_told_the_epoch_where_it_fetches(traced: Make, workers: int, persistent: bool) -> None:
    """Also in persistent workers, whose copy of the dataset the training process cannot reach."""
    data = KnowsEpoch(4, traced(0).trace)
    loader = ResumableDataLoader(data, 2, num_workers=workers, persistent_workers=persistent)
    got = [[value for batch in loader for value in batch.tolist()] for _ in range(3)]
    assert got == [[100 * epoch + index for index in range(4)] for epoch in range(3)]
    told = data.fetched()
    per_epoch = max(workers, 1)
    assert told == sorted(per_epoch * [1000, 1001, 1002])


# -- resume ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize(
    ("length", "batch_size", "drop_last"), [(23, 4, False), (23, 4, True), (24, 4, False), (3, 8, False)]
)
def test_a_resume_anywhere_continues_exactly(
    traced: Make, workers: int, length: int, batch_size: int, drop_last: bool
) -> None:
    """Two epochs, interrupted after some batches: ids and augmentation equal, and nothing skipped is fetched."""
    options = {"shuffle": True, "seed": 5, "drop_last": drop_last}
    reference = ResumableDataLoader(traced(length), batch_size, **options)
    whole = [rows_of(reference), rows_of(reference)]
    stream = whole[0] + whole[1]
    for done in {1, len(whole[0]) - 1, len(whole[0]), len(whole[0]) + 1} - {0, len(stream)}:
        first = ResumableDataLoader(traced(length), batch_size, **options)
        got = []
        while len(got) < done:
            for batch in first:
                got.append(as_rows(batch))
                if len(got) == done:
                    break
        state = json.loads(json.dumps(first.state_dict()))
        data = traced(length)
        resumed = ResumableDataLoader(data, batch_size, num_workers=workers, **options)
        resumed.load_state_dict(state)
        rest = rows_of(resumed)
        assert data.fetched() == sorted(int(row[0]) for batch in rest for row in batch)
        if done < len(whole[0]):
            rest += rows_of(resumed)
        assert got + rest == stream


def test_five_interruptions_in_one_epoch(traced: Make) -> None:
    """Positions are of the epoch, not of the attempt."""
    options = {"batch_size": 3, "shuffle": True}
    whole = rows_of(ResumableDataLoader(traced(40), **options))
    got: list[Any] = []
    state: dict[str, Any] | None = None
    for stop in (2, 3, 7, 8, 12, 14):
        loader = ResumableDataLoader(traced(40), **options)
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            got.append(as_rows(batch))
            state = loader.state_dict()
            if len(got) == stop:
                break
    assert got == whole
    assert state == loader.order.state(Cursor(epoch=1))


def test_epochs_after_a_resumed_one_are_whole(traced: Make) -> None:
    """The position is used once; persistent workers do not make it stick."""
    loader = ResumableDataLoader(traced(20), 4, num_workers=2, persistent_workers=True)
    loader.load_state_dict(loader.order.state(Cursor(epoch=5, position=12)))
    assert [len(ids_of(loader)) for _ in range(3)] == [2, 5, 5]
    assert loader.state_dict()["epoch"] == 8


def test_an_iterator_ends_when_a_state_is_loaded(traced: Make) -> None:
    """It would yield from the old position otherwise; the next one has the new position."""
    loader = ResumableDataLoader(traced(20), 4)
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(loader.order.state(Cursor(position=16)))
    assert list(iterator) == []
    assert ids_of(loader) == [[16, 17, 18, 19]]


def test_an_older_iterator_does_not_move_the_position(traced: Make) -> None:
    """Only the newest one is the loop that is being counted."""
    loader = ResumableDataLoader(traced(20), 4)
    old = iter(loader)
    next(iter(loader))
    next(old)
    next(old)
    assert loader.state_dict()["position"] == 4


def test_a_state_of_another_order_is_refused(traced: Make) -> None:
    """With both values."""
    state = ResumableDataLoader(traced(20), 4, True).state_dict()
    with pytest.raises(StateMismatch, match="batch_size: saved 4, now 5"):
        ResumableDataLoader(traced(20), 5, True).load_state_dict(state)


def test_asking_for_state_and_length_changes_nothing(traced: Make) -> None:
    """len() and state_dict() are free of effects, in the middle of an epoch too; no worker starts."""
    loader = ResumableDataLoader(traced(20), 4, True, num_workers=2)
    assert loader.state_dict() == loader.state_dict()
    plain = ids_of(ResumableDataLoader(traced(20), 4, True))
    got = []
    for batch in loader:
        got.append(batch[0].tolist())
        assert len(loader) == 5
        loader.state_dict()
    assert got == plain


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(1, 30), batch_size=st.integers(1, 9), drop_last=st.booleans(), data=st.data())
def test_any_schedule_of_interruptions_delivers_the_same(
    length: int, batch_size: int, drop_last: bool, data: st.DataObject
) -> None:
    """Over several epochs, new loaders at random moments: the delivered ids are those of one loader."""
    options = {"batch_size": batch_size, "drop_last": drop_last, "shuffle": True, "collate_fn": list}
    reference = ResumableDataLoader(range(length), **options)
    total = 3 * len(reference)
    expected = [batch for _ in range(3) for batch in reference]
    got: list[Any] = []
    state: dict[str, Any] | None = None
    while len(got) < total:
        loader = ResumableDataLoader(range(length), **options)
        if state is not None:
            loader.load_state_dict(state)
        budget = data.draw(st.integers(1, total))
        while budget > 0 and len(got) < total:
            for batch in loader:
                got.append(batch)
                budget -= 1
                if budget == 0 or len(got) == total:
                    break
        state = loader.state_dict()
    assert got == expected


def test_worker_info_has_the_users_dataset(traced: Make) -> None:
    """Programs that set up their dataset in worker_init_fn find it there."""
    data = traced(4)

    def set_up(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.note(str(1000 + worker))

    list(ResumableDataLoader(data, 2, num_workers=2, worker_init_fn=set_up))
    assert data.fetched() == [0, 1, 2, 3, 1000, 1001]
