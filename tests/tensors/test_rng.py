"""The state of every random number generator, taken and set again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from spotsafe.errors import UnsupportedState
from spotsafe.tensors import rng
from spotsafe.tensors.rng import RngSnapshot, capture_rng


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave the process's generators as they were."""
    before = capture_rng()
    yield
    before.restore()


def draws() -> list[Any]:
    """Numbers of every generator, of every kind that caches something."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        np.random.randint(0, 1 << 30),
        torch.rand(3).tolist(),
        torch.randperm(5).tolist(),
    ]


def through_json(snapshot: RngSnapshot) -> RngSnapshot:
    """Written and read as a checkpoint does."""
    return RngSnapshot.from_state(json.loads(json.dumps(snapshot.to_state())))


def test_what_is_drawn_after_a_restore_is_what_was_drawn_before() -> None:
    """A snapshot brings back all generators exactly."""
    snapshot = capture_rng()
    first = draws()
    draws()
    snapshot.restore()
    assert draws() == first


@pytest.mark.parametrize("odd", [1, 2, 3])
def test_cached_normal_deviates_survive(odd: int) -> None:
    """Generators that make normal numbers in pairs keep the second one over a snapshot."""
    for _ in range(odd):
        random.gauss(0, 1)
        np.random.randn()
    snapshot = through_json(capture_rng())
    first = draws()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    snapshot.restore()
    assert draws() == first


def test_a_snapshot_does_not_change() -> None:
    """Drawing after a snapshot leaves the snapshot as it was."""
    snapshot = capture_rng()
    before = json.dumps(snapshot.to_state())
    draws()
    assert json.dumps(snapshot.to_state()) == before


def test_using_up_the_cached_deviate_is_seen() -> None:
    """Two snapshots differ although numpy's words did not move, only its cached deviate."""
    np.random.seed(3)
    np.random.randn()
    holding = capture_rng()
    cached = np.random.randn()
    used = capture_rng()
    assert (holding.numpy["has_gauss"], used.numpy["has_gauss"]) == (1, 0)
    holding.restore()
    assert np.random.randn() == cached


def test_setting_an_older_state_back_is_seen() -> None:
    """The remembered state is not taken for a state that a user set in between."""
    np.random.seed(3)
    np.random.randn()
    older = np.random.get_state()
    np.random.randn()
    assert capture_rng().numpy["has_gauss"] == 0
    np.random.set_state(older)
    assert capture_rng().numpy["has_gauss"] == 1


def test_equal_moments_have_equal_states() -> None:
    """A snapshot's JSON tells whether anything was drawn."""
    first = capture_rng().to_state()
    assert capture_rng().to_state() == first
    random.random()
    assert capture_rng().to_state() != first


def test_another_global_bit_generator_of_numpy() -> None:
    """A program that exchanged numpy's global generator is restored too."""
    original = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        snapshot = through_json(capture_rng())
        first = np.random.rand(3).tolist()
        snapshot.restore()
        assert np.random.rand(3).tolist() == first
    finally:
        np.random.set_bit_generator(original)


def test_no_cuda_means_no_cuda_state() -> None:
    """Without CUDA in use nothing of it is saved; states of devices that are not here are left out."""
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use in this process")
    assert capture_rng().cuda == ()
    foreign = RngSnapshot(
        python=random.getstate(),
        numpy=np.random.get_state(legacy=False),
        torch_cpu=torch.get_rng_state(),
        cuda=(torch.zeros(16, dtype=torch.uint8),),
    )
    if not torch.cuda.is_available():
        through_json(foreign).restore()


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("torch", "AAAA"),
        ("torch", "no base64!"),
        ("torch", 7),
        ("python", {}),
        ("python", {"version": 2, "words": "", "gauss": None}),
        ("python", {"version": 3, "words": "AAAA", "gauss": None}),
        ("numpy", {}),
        ("numpy", []),
        ("numpy", {"bit_generator": "MT19937", "state": {"key": 3, "pos": 1}}),
        ("cuda", 3),
        ("cuda", [""]),
    ],
)
def test_what_is_no_state_is_refused(member: str, value: object) -> None:
    """A damaged or hostile state is a ValueError, and nothing is set."""
    state = capture_rng().to_state()
    state[member] = value
    with pytest.raises(ValueError, match="not a state of random number generators"):
        RngSnapshot.from_state(state)


@pytest.mark.parametrize("whole", [None, 3, [], "text", {}])
def test_something_else_altogether_is_refused(whole: object) -> None:
    """What is not even a dict of generators is a ValueError."""
    with pytest.raises(ValueError, match="random number"):
        RngSnapshot.from_state(whole)


def test_a_position_outside_the_words_is_refused() -> None:
    """numpy would read foreign memory at such a position."""
    state = capture_rng().to_state()
    for position in (-1, 625, 1 << 40, "3"):
        state["numpy"]["state"]["pos"] = position
        with pytest.raises(ValueError, match="Mersenne"):
            RngSnapshot.from_state(state)


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "Philox", "SFC64", "MT19937"])
def test_states_of_every_bit_generator_are_json(kind: str) -> None:
    """Integers of 128 bits and arrays of words come back exactly."""
    bits = getattr(np.random, kind)(11)
    np.random.Generator(bits).random(3)
    state = rng.decode_bits(json.loads(json.dumps(rng.encode_bits(bits.state))))
    other = getattr(np.random, kind)(12)
    other.state = state
    assert np.random.Generator(other).random(4).tolist() == np.random.Generator(bits).random(4).tolist()


def test_an_unknown_generator_state_is_refused() -> None:
    """A bit generator of a user's own with a strange state says so at the save."""
    with pytest.raises(UnsupportedState, match="object"):
        rng.encode_bits({"bit_generator": "Mine", "state": object()})
