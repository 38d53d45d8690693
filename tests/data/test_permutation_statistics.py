"""The permutation is as random as training needs: over many keys, and fixed ones, so that nothing flakes.

The limits are 4 standard deviations of the statistic under the uniform distribution (about 6 in 100,000 for
each look). They were passed before the golden vectors of `test_permutation.py` were frozen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from spotsafe.data.permutation import TABLE_LENGTH, Permutation, counter_random, order_key

pytestmark = pytest.mark.slow

LIMIT = 4.0


def permutations(n: int, count: int, *, seed: int = 1) -> Iterator[np.ndarray]:
    """The whole permutations of `count` consecutive epochs."""
    for epoch in range(count):
        yield Permutation(n, order_key(seed=seed, epoch=epoch)).block(0, n)


def chi_square_z(observed: np.ndarray, *, expected: float, freedom: int) -> float:
    """How many standard deviations the chi-square statistic lies from its mean."""
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [2, 3, 5, 10, 17, 33, 64, 100, 200])
def test_every_value_is_equally_likely_at_every_position(n: int) -> None:
    """Chi-square over positions x values. Rows and columns have fixed sums: (n - 1)^2 degrees of freedom."""
    keys = 2000
    seen = np.zeros((n, n))
    for values in permutations(n, keys):
        seen[np.arange(n), values] += 1
    assert abs(chi_square_z(seen, expected=keys / n, freedom=(n - 1) ** 2)) < LIMIT


def test_all_permutations_of_five_are_equally_likely() -> None:
    """The strictest look at small sets, which few-round Feistel networks fail by hundreds of deviations."""
    keys = 12_000
    counts: dict[tuple[int, ...], int] = {}
    for values in permutations(5, keys):
        counts[tuple(values.tolist())] = counts.get(tuple(values.tolist()), 0) + 1
    assert len(counts) == 120
    assert abs(chi_square_z(np.array(list(counts.values())), expected=keys / 120, freedom=119)) < LIMIT


@pytest.mark.parametrize("n", [4, 7, 12, 20])
def test_neighbouring_pairs_are_uniform(n: int) -> None:
    """The pair (value at 0, value at 1) takes each of its n (n - 1) values equally often."""
    keys = 4000
    seen = np.zeros((n, n))
    for values in permutations(n, keys, seed=2):
        seen[values[0], values[1]] += 1
    pairs = seen[~np.eye(n, dtype=bool)]
    assert seen.trace() == 0
    assert abs(chi_square_z(pairs, expected=keys / len(pairs), freedom=len(pairs) - 1)) < LIMIT


@pytest.mark.parametrize(
    ("n", "keys"), [(2, 2000), (50, 2000), (200, 2000), (TABLE_LENGTH + 1, 60), (100_003, 60)]
)
def test_successors_stay_neighbours_as_often_as_chance_has_it(n: int, keys: int) -> None:
    """The number of i with p(i + 1) = p(i) + 1 has mean (n - 1)/n and a variance close to one."""
    counts = [int((np.diff(values) == 1).sum()) for values in permutations(n, keys, seed=3)]
    mean = (n - 1) / n
    second = (n - 2) / n  # E[X (X - 1)], adding up overlapping and separate pairs of places
    deviation = math.sqrt((second + mean - mean**2) / keys)
    assert abs(sum(counts) / keys - mean) < LIMIT * deviation


@pytest.mark.parametrize(("n", "keys"), [(100, 500), (200, 500), (TABLE_LENGTH + 1, 60), (1_000_003, 8)])
def test_neighbours_in_the_order_are_uncorrelated(n: int, keys: int) -> None:
    """The correlation of p(i) and p(i + 1) averages to -1/n (they are never equal)."""
    correlations = [np.corrcoef(values[:-1], values[1:])[0, 1] for values in permutations(n, keys, seed=4)]
    assert abs(float(np.mean(correlations)) + 1 / n) < LIMIT / math.sqrt(n * keys)


@pytest.mark.parametrize("n", [TABLE_LENGTH + 1, 2**17, 100_003, 2**18 + 1])
def test_large_permutations_spread_every_region_evenly(n: int) -> None:
    """32 regions of positions x 32 of values, and the same for the lowest bits, over 10 keys."""
    parts, keys = 32, 10
    seen = np.zeros((parts, parts))
    low = np.zeros((parts, parts))
    edges = np.arange(parts + 1) * n // parts
    where = np.searchsorted(edges, np.arange(n), side="right") - 1
    for values in permutations(n, keys, seed=5):
        np.add.at(seen, (where, where[values]), 1)
        np.add.at(low, (np.arange(n) % parts, values % parts), 1)
    # Dealt into fixed margins, the cells make up a chi-square with (parts - 1)^2 degrees of freedom.
    for table in (seen, low):
        expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
        chi_square = float(((table - expected) ** 2 / expected).sum())
        freedom = (parts - 1) ** 2
        assert abs(chi_square - freedom) / math.sqrt(2 * freedom) < LIMIT


@pytest.mark.parametrize("position", [0, 1, TABLE_LENGTH])
def test_one_position_of_a_large_permutation_takes_every_region_over_the_keys(position: int) -> None:
    """Over 2000 keys the value at a fixed position is uniform over 50 regions, wherever it lies."""
    n, keys, parts = TABLE_LENGTH + 1, 2000, 50
    seen = np.zeros(parts)
    for epoch in range(keys):
        seen[Permutation(n, order_key(seed=6, epoch=epoch))[position] * parts // n] += 1
    assert abs(chi_square_z(seen, expected=keys / parts, freedom=parts - 1)) < LIMIT


@pytest.mark.parametrize("n", [1000, 100_003, 10**9])
def test_epochs_and_seeds_share_only_what_chance_has_it(n: int) -> None:
    """The first m values of different epochs and of different seeds overlap like random subsets (m^2/n)."""
    m = 100 if n == 1000 else 20_000
    heads = [
        Permutation(n, order_key(seed=seed, epoch=epoch)).block(0, m)
        for seed in range(4)
        for epoch in range(4)
    ]
    shared = [len(np.intersect1d(a, b)) for i, a in enumerate(heads) for b in heads[:i]]
    mean = m * m / n
    deviation = math.sqrt(max(mean, 0.01) * (1 - m / n) ** 2 / len(shared))
    assert abs(sum(shared) / len(shared) - mean) < LIMIT * deviation + 1e-9


@pytest.mark.parametrize("n", [1000, 100_003])
def test_consecutive_epochs_and_seeds_are_uncorrelated(n: int) -> None:
    """p of one (seed, epoch) and p of another have no linear relation at the same position."""
    rows = [
        Permutation(n, order_key(seed=seed, epoch=epoch)).block(0, n).astype(float)
        for seed in range(5)
        for epoch in range(5)
    ]
    table = np.corrcoef(rows)
    off = table[np.triu_indices(len(rows), 1)]
    assert np.abs(off).max() < 5 / math.sqrt(n)  # the largest of 300
    assert abs(off.mean()) < LIMIT / math.sqrt(n * len(off))


def test_seed_and_epoch_are_not_added() -> None:
    """Seed 0 in epoch 1 and seed 1 in epoch 0 are unrelated, for streams as well."""
    n = 1000
    keys = [(0, 1, 0), (1, 0, 0), (0, 0, 1)]
    heads = [Permutation(n, order_key(seed=s, epoch=e, stream=t)).block(0, n) for s, e, t in keys]
    for i, a in enumerate(heads):
        for b in heads[:i]:
            assert (a == b).sum() < 10


def test_seeds_of_samples_have_balanced_bits() -> None:
    """Each of the 64 bits is set half of the time, and between neighbours it flips half of the time."""
    values = counter_random(12345, start=0, stop=200_000)
    bits = (values[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(0) - 0.5).max() < 4.5 * 0.5 / math.sqrt(len(values))
    flips = bits[1:] != bits[:-1]
    assert np.abs(flips.mean(0) - 0.5).max() < 4.5 * 0.5 / math.sqrt(len(values))
