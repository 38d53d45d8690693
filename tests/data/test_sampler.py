"""ResumableSampler in a DataLoader of the user's own."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader

from spotsafe.data.order import Cursor
from spotsafe.data.sampler import ResumableSampler
from spotsafe.errors import StateMismatch


def test_every_iter_is_another_whole_epoch() -> None:
    """Without set_epoch, each pass is a new permutation of all indices."""
    sampler = ResumableSampler(range(100), seed=1)
    epochs = [list(sampler) for _ in range(4)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_without_shuffle_the_order_is_that_of_the_indices() -> None:
    """And the length is that of the data source."""
    sampler = ResumableSampler(range(5), shuffle=False)
    assert list(sampler) == [0, 1, 2, 3, 4]
    assert len(sampler) == 5


@pytest.mark.parametrize("drawn", [0, 1, 57, 99, 100])
def test_a_state_continues_with_the_next_index(drawn: int) -> None:
    """Taken after any number of draws, in the second epoch, through JSON, into a new sampler."""
    sampler = ResumableSampler(range(100), seed=3)
    list(sampler)
    second = iter(sampler)
    for _ in range(drawn):
        next(second)
    state = json.loads(json.dumps(sampler.state_dict()))
    rest = list(second)
    resumed = ResumableSampler(range(100), seed=3)
    resumed.load_state_dict(state)
    if drawn < 100:
        assert list(resumed) == rest
    assert list(resumed) == list(of_epoch(2))


def of_epoch(epoch: int) -> ResumableSampler:
    sampler = ResumableSampler(range(100), seed=3)
    sampler.set_epoch(epoch)
    return sampler


def test_set_epoch_of_the_current_epoch_keeps_the_position() -> None:
    """The habit of calling set_epoch(epoch) in each epoch does not undo a resume; another number does move."""
    sampler = ResumableSampler(range(100), seed=3)
    sampler.start_at(Cursor(epoch=2, position=40))
    sampler.set_epoch(2)
    assert len(list(sampler)) == 60
    sampler.set_epoch(2)
    assert list(sampler) == list(of_epoch(2))


def test_leaving_an_epoch_early_means_the_next_one_comes_next() -> None:
    """As in torch, a new pass over a loader that was left early is a new shuffle."""
    sampler = ResumableSampler(range(100), seed=3)
    next(iter(sampler))
    assert list(sampler) == list(of_epoch(1))


def test_the_global_generators_have_no_say() -> None:
    """Seeding torch differently gives the same order, in a DataLoader too."""
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loader = DataLoader(range(30), sampler=ResumableSampler(range(30)), batch_size=7)
        orders.append([batch.tolist() for batch in loader])
    assert orders[0] == orders[1]


def test_a_state_of_other_data_is_refused() -> None:
    """As in the order itself."""
    state = ResumableSampler(range(100)).state_dict()
    with pytest.raises(StateMismatch, match="length: saved 100, now 99"):
        ResumableSampler(range(99)).load_state_dict(state)
