"""Retention: what policies keep, and the floor that no policy can break."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from spotsafe.policy.retention import (
    DEFAULT_KEEP,
    Best,
    Keep,
    Saved,
    best,
    every,
    latest,
    newest_first,
    parse_keep,
    victims,
)

HOUR = 3600.0


def saved(
    number: int,
    *,
    attempt: int = 1,
    created: float | None = None,
    healthy: bool = True,
    **metrics: float,
) -> Saved:
    return Saved(
        name=f"a{attempt}-s{number}",
        order=(attempt, number, number),
        step=number,
        created=number * 60.0 if created is None else created,
        healthy=healthy,
        metrics=metrics,
    )


def names(ones: Sequence[Saved]) -> list[str]:
    return [one.name for one in ones]


def withdrawn(
    ones: Sequence[Saved],
    keep: Keep,
    *,
    resumed_from: str | None = None,
    passed_over: frozenset[str] = frozenset(),
) -> list[str]:
    return names(victims(ones, keep=keep, resumed_from=resumed_from, passed_over=passed_over))


@st.composite
def runs(draw: st.DrawFn) -> list[Saved]:
    """Checkpoints of a few attempts in any order, with gaps, odd clocks, odd metrics and sick ones."""
    orders = draw(
        st.lists(
            st.tuples(st.integers(1, 3), st.integers(0, 40), st.integers(1, 40)), unique=True, max_size=14
        )
    )
    metric = st.one_of(st.none(), st.floats(-5, 5), st.just(math.nan), st.just(math.inf), st.just(-math.inf))
    ones = []
    for order in orders:
        value = draw(metric)
        ones.append(
            Saved(
                name="-".join(map(str, order)),
                order=order,
                step=order[1],
                created=draw(st.floats(0, 10 * HOUR)),
                healthy=draw(st.booleans()),
                metrics={} if value is None else {"loss": value},
            )
        )
    return ones


policies = st.recursive(
    st.one_of(
        st.integers(1, 5).map(latest),
        st.builds(best, st.just("loss"), mode=st.sampled_from(["min", "max"]), n=st.integers(1, 3)),
        st.builds(every, hours=st.sampled_from([0.25, 1, 3]), keep=st.integers(1, 4)),
    ),
    lambda inner: st.builds(lambda left, right: left | right, inner, inner),
    max_leaves=4,
)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Saved], Keep, str | None, frozenset[str]]:
    ones = draw(runs())
    known = [one.name for one in ones]
    resumed_from = draw(st.sampled_from([None, "gone", *known]))
    passed_over = draw(st.frozensets(st.sampled_from(known), max_size=3)) if known else frozenset[str]()
    return ones, draw(policies), resumed_from, passed_over


def apply(situation: tuple[list[Saved], Keep, str | None, frozenset[str]]) -> tuple[list[Saved], list[Saved]]:
    ones, keep, resumed_from, passed_over = situation
    gone = victims(ones, keep=keep, resumed_from=resumed_from, passed_over=passed_over)
    return gone, [one for one in ones if one not in gone]


# -- what can never happen


@given(situations())
def test_two_whole_healthy_ones_always_stay(
    situation: tuple[list[Saved], Keep, str | None, frozenset[str]],
) -> None:
    """However greedy the policy, two healthy checkpoints that were not passed over stay, if there are two."""
    ones, _, _, passed_over = situation

    _, left = apply(situation)

    there_were = sum(one.healthy and one.name not in passed_over for one in ones)
    assert sum(one.healthy and one.name not in passed_over for one in left) >= min(2, there_were)


@given(situations())
def test_two_checkpoints_always_stay(
    situation: tuple[list[Saved], Keep, str | None, frozenset[str]],
) -> None:
    """Also where none is healthy, two of those that count stay, if there are two."""
    ones, _, _, passed_over = situation

    _, left = apply(situation)

    there_were = sum(one.name not in passed_over for one in ones)
    assert sum(one.name not in passed_over for one in left) >= min(2, there_were)


@given(situations())
def test_the_newest_and_the_newest_healthy_stay(
    situation: tuple[list[Saved], Keep, str | None, frozenset[str]],
) -> None:
    """The newest checkpoint of all and the newest healthy one are never withdrawn."""
    ones, _, _, passed_over = situation

    gone, _ = apply(situation)

    ordered = newest_first(ones)
    healthy = [one for one in ordered if one.healthy and one.name not in passed_over]
    assert not {one.name for one in (*ordered[:1], *healthy[:1])} & set(names(gone))


@given(situations())
def test_the_origin_stays_until_two_newer_healthy_ones_exist(
    situation: tuple[list[Saved], Keep, str | None, frozenset[str]],
) -> None:
    """The checkpoint resumed from is withdrawn only once two newer healthy ones are published."""
    ones, _, resumed_from, passed_over = situation

    gone, _ = apply(situation)

    if resumed_from in names(gone):
        origin = next(one for one in ones if one.name == resumed_from)
        newer = [one for one in ones if one.order > origin.order and one.name not in passed_over]
        assert sum(one.healthy for one in newer) >= 2


@given(situations())
def test_what_was_passed_over_is_not_touched(
    situation: tuple[list[Saved], Keep, str | None, frozenset[str]],
) -> None:
    """What a resume found and did not use is evidence; retention leaves it alone."""
    gone, _ = apply(situation)

    assert not set(names(gone)) & situation[3]


@given(situations())
def test_passed_over_ones_do_not_count(
    situation: tuple[list[Saved], Keep, str | None, frozenset[str]],
) -> None:
    """Whether the passed-over checkpoints exist or not, the same others are withdrawn."""
    ones, keep, resumed_from, passed_over = situation

    without = [one for one in ones if one.name not in passed_over]

    resumed_from = None if resumed_from in passed_over else resumed_from
    assert withdrawn(ones, keep, resumed_from=resumed_from, passed_over=passed_over) == withdrawn(
        without, keep, resumed_from=resumed_from
    )


@given(situations(), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(
    situation: tuple[list[Saved], Keep, str | None, frozenset[str]], random: object
) -> None:
    """A listing may come in any order; the answer is the same, oldest first."""
    ones, keep, resumed_from, passed_over = situation
    shuffled = list(ones)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis gives a random.Random

    gone, _ = apply(situation)

    assert gone == victims(shuffled, keep=keep, resumed_from=resumed_from, passed_over=passed_over)
    assert gone == newest_first(gone)[::-1]


@given(situations())
def test_once_is_enough(situation: tuple[list[Saved], Keep, str | None, frozenset[str]]) -> None:
    """After the victims are gone there are no others: a repeated retention withdraws nothing more."""
    _, keep, resumed_from, passed_over = situation

    _, left = apply(situation)

    assert victims(left, keep=keep, resumed_from=resumed_from, passed_over=passed_over) == []


@given(situations())
def test_what_the_policy_keeps_is_kept(
    situation: tuple[list[Saved], Keep, str | None, frozenset[str]],
) -> None:
    """Nothing is withdrawn that the policy selects among the healthy ones that count."""
    ones, keep, _, passed_over = situation
    counted = [one for one in ones if one.healthy and one.name not in passed_over]

    gone, _ = apply(situation)

    assert not keep.select(counted) & set(names(gone))


@given(runs(), st.integers(1, 4), st.integers(1, 3))
def test_retention_after_every_save_keeps_what_retention_at_the_end_would(
    ones: list[Saved], count: int, hours: int
) -> None:
    """Withdrawing step by step loses nothing that `every` would have kept with all of history before it."""
    healthy = [one for one in newest_first(ones)[::-1] if one.healthy]
    keep = every(hours=hours, keep=count)
    left: list[Saved] = []
    for one in healthy:
        left.append(one)
        gone = victims(left, keep=keep, resumed_from=None, passed_over=frozenset())
        left = [other for other in left if other not in gone]

    assert keep.select(healthy) <= set(names(left))


# -- the policies


def test_latest_keeps_the_newest() -> None:
    """`latest(3)` keeps the three newest of any number."""
    ones = [saved(n) for n in range(1, 7)]

    assert withdrawn(ones, latest(3)) == ["a1-s1", "a1-s2", "a1-s3"]


def test_newest_is_by_attempt_then_step_then_save() -> None:
    """A later attempt's checkpoint is newer than an earlier attempt's of a higher step or a later clock."""
    early, late = saved(900, attempt=1, created=9e9), saved(10, attempt=2, created=1.0)
    tenth = saved(5, attempt=10)

    assert names(newest_first([early, tenth, late])) == ["a10-s5", "a2-s10", "a1-s900"]


def test_latest_one_still_leaves_two() -> None:
    """`keep=1` cannot leave a single checkpoint: it may turn out to be damaged."""
    ones = [saved(n) for n in range(1, 5)]

    assert withdrawn(ones, latest(1)) == ["a1-s1", "a1-s2"]


@pytest.mark.parametrize(("mode", "kept"), [("min", "a1-s2"), ("max", "a1-s3")])
def test_best_keeps_the_best_value(mode: str, kept: str) -> None:
    """`best` keeps the lowest or the highest value besides the floor of two."""
    values = {1: 0.5, 2: 0.1, 3: 0.9, 4: 0.5, 5: 0.5}
    ones = [saved(n, loss=value) for n, value in values.items()]

    gone = withdrawn(ones, best("loss", mode=mode))  # type: ignore[arg-type]  # parametrized text

    assert set(names(ones)) - set(gone) == {kept, "a1-s4", "a1-s5"}


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_best(mode: str, value: float) -> None:
    """NaN compares as nothing and infinities as everything: neither is a measurement."""
    ones = [saved(1, loss=value), saved(2, loss=0.5), saved(3), saved(4, acc=1.0)]

    assert Best("loss", mode, 3).select(ones) == {"a1-s2"}  # type: ignore[arg-type]  # parametrized text


def test_of_equal_values_the_older_is_best() -> None:
    """On a plateau the best stays the same one; it does not move with every save."""
    ones = [saved(n, loss=0.5) for n in (3, 1, 2)]

    assert best("loss", mode="min").select(ones) == {"a1-s1"}


def test_every_keeps_the_first_of_each_period() -> None:
    """Of several in an hour the first stays; of many hours the last `keep` do."""
    ones = [saved(n, created=n * HOUR / 3) for n in range(12)]

    assert every(hours=1, keep=2).select(ones) == {"a1-s6", "a1-s9"}


def test_every_skips_periods_without_a_checkpoint() -> None:
    """A day without a machine does not use up the periods that are kept."""
    ones = [saved(1, created=0.0), saved(2, created=30 * HOUR), saved(3, created=31 * HOUR)]

    assert every(hours=1, keep=3).select(ones) == {"a1-s1", "a1-s2", "a1-s3"}


def test_or_keeps_what_either_keeps() -> None:
    """`|` is the union."""
    ones = [saved(n, loss=float(n)) for n in range(1, 6)]

    assert (latest(1) | best("loss", mode="min")).select(ones) == {"a1-s5", "a1-s1"}


# -- health


def test_sick_ones_do_not_push_out_healthy_ones() -> None:
    """A run that has gone to NaN keeps its last healthy checkpoints and only the newest sick one."""
    ones = [saved(1), saved(2), saved(3), *(saved(n, healthy=False) for n in range(4, 9))]

    assert withdrawn(ones, latest(2)) == ["a1-s1", "a1-s4", "a1-s5", "a1-s6", "a1-s7"]


def test_without_a_healthy_one_the_policy_holds_for_the_sick() -> None:
    """If the verdict about health is wrong for a model, its user still has what `keep` promised."""
    ones = [saved(n, healthy=False) for n in range(1, 7)]

    assert withdrawn(ones, latest(4)) == ["a1-s1", "a1-s2"]


def test_one_healthy_one_among_the_sick_stays_with_the_two_newest() -> None:
    """The only healthy checkpoint stays however old it is, and so do the two newest."""
    ones = [saved(1), *(saved(n, healthy=False) for n in range(2, 6))]

    assert withdrawn(ones, latest(1)) == ["a1-s2", "a1-s3"]


# -- where the attempt came from


def test_the_origin_outlives_one_newer_checkpoint() -> None:
    """Also an unhealthy origin, all that there was, stays while a restart may still need it."""
    ones = [saved(1, healthy=False), saved(2, attempt=2), saved(3, attempt=2, healthy=False)]

    assert withdrawn(ones, latest(1), resumed_from="a1-s1") == []
    ones.append(saved(4, attempt=2))
    assert withdrawn(ones, latest(1), resumed_from="a1-s1") == ["a1-s1", "a2-s3"]


def test_a_resume_that_passed_over_newer_ones_keeps_its_origin() -> None:
    """What was passed over does not count as newer: the origin and the new one are the two that stay."""
    ones = [saved(1), saved(2), saved(3), saved(4, attempt=2)]
    passed_over = frozenset({"a1-s2", "a1-s3"})

    assert withdrawn(ones, latest(1), resumed_from="a1-s1", passed_over=passed_over) == []
    ones.append(saved(5, attempt=2))
    assert withdrawn(ones, latest(1), resumed_from="a1-s1", passed_over=passed_over) == ["a1-s1"]


def test_an_origin_that_is_gone_keeps_nothing_else() -> None:
    """A name that is not among the published ones changes nothing."""
    ones = [saved(n) for n in range(1, 4)]

    assert withdrawn(ones, latest(2), resumed_from="a9-s9") == ["a1-s1"]


# -- values


def test_policies_are_values() -> None:
    """Equal by content, hashable, the same after pickling; joined, neither grouping nor repeats matter."""
    one = latest(3) | best("acc", mode="max", n=2) | every(hours=0.5, keep=24)
    same = latest(3) | (best("acc", mode="max", n=2) | every(hours=0.5, keep=24) | latest(3))

    assert one == same
    assert len({one, same}) == 1
    assert pickle.loads(pickle.dumps(one)) == one
    assert pickle.loads(pickle.dumps(saved(3, loss=0.1))) == saved(3, loss=0.1)
    assert hash(saved(3, loss=0.1)) == hash(saved(3, loss=0.1))


def test_policies_read_as_they_are_written() -> None:
    """The repr is the expression."""
    text = (
        'latest(3) | best("val_loss", mode="min") | best("acc", mode="max", n=2) | every(hours=0.5, keep=24)'
    )

    value = eval(text, {"latest": latest, "best": best, "every": every})

    assert repr(value) == text
    assert repr(DEFAULT_KEEP) == "latest(2) | every(hours=1, keep=1)"


def test_parse_keep() -> None:
    """A number means the newest so many; a policy means itself."""
    policy = best("loss", mode="min")

    assert parse_keep(3) == latest(3)
    assert parse_keep(policy) is policy


@pytest.mark.parametrize("value", [0, -1, True, False])
def test_a_number_below_one_is_refused(value: int) -> None:
    """Keeping nothing is a mistake, and so is a truth value."""
    with pytest.raises(ValueError, match="at least 1"):
        parse_keep(value)


@pytest.mark.parametrize("value", ["3", 2.0, None, [latest(2)]])
def test_what_is_no_policy_is_refused_with_a_hint(value: object) -> None:
    """The error shows what to write."""
    with pytest.raises(TypeError, match=r"latest\(3\)"):
        parse_keep(value)  # type: ignore[arg-type]  # the mistake is the test


@pytest.mark.parametrize(
    "make",
    [
        lambda: latest(0),
        lambda: best("", mode="min"),
        lambda: best("loss", mode="least"),  # type: ignore[arg-type]  # the mistake is the test
        lambda: best("loss", mode="min", n=0),
        lambda: every(hours=0, keep=1),
        lambda: every(hours=-1, keep=1),
        lambda: every(hours=math.nan, keep=1),
        lambda: every(hours=math.inf, keep=1),
        lambda: every(hours=True, keep=1),
        lambda: every(hours=1, keep=0),
    ],
)
def test_policies_that_mean_nothing_are_refused(make: object) -> None:
    """A mistake is a ValueError where it is written, not a surprise when something is deleted."""
    with pytest.raises(ValueError, match=r"latest|best|every"):
        make()  # type: ignore[operator]  # a parametrized lambda


def test_or_with_something_else_is_a_type_error() -> None:
    """`latest(2) | 3` is no policy."""
    with pytest.raises(TypeError):
        latest(2) | 3  # type: ignore[operator]  # the mistake is the test


def test_a_policy_of_ones_own_takes_part() -> None:
    """A class derived from `Keep` can be joined and is obeyed."""

    class Milestones(Keep):
        def select(self, saved: Sequence[Saved]) -> frozenset[str]:
            return frozenset(one.name for one in saved if one.step % 5 == 0)

    ones = [saved(n) for n in range(1, 9)]

    assert withdrawn(ones, latest(1) | Milestones()) == ["a1-s1", "a1-s2", "a1-s3", "a1-s4", "a1-s6"]
