"""The loop forms: what counts as a step, by every way out of a body, with and without a resume."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from spotsafe.activity import Activity
from spotsafe.data.feed import Feed, feed_for
from spotsafe.data.loader import ResumableDataLoader
from spotsafe.errors import LookAhead, RunError
from spotsafe.loops import Loops
from spotsafe.positions import Positions


@dataclass
class FakeEngine:
    """Remembers what the loops asked for."""

    log: list[str] = field(default_factory=list)
    notice_pending: bool = False
    leaving: bool = False
    drawn: bool = False
    leave_at: int | None = None
    points: int = 0
    ends: int = 0
    settled: int = 0

    def before_first_body(self) -> None:
        self.log.append("judge")

    def restore_rng(self) -> None:
        self.log.append("rng")

    def random_numbers_drawn(self) -> bool:
        return self.drawn

    def before_unsafe_commit(self) -> None:
        self.log.append("unsafe")

    def mark_safe(self) -> None:
        self.log.append("safe")

    def at_safe_point(self, *, epoch_ended: bool) -> None:
        self.points += 1
        self.log.append("epoch" if epoch_ended else "point")
        if self.leave_at is not None and self.points >= self.leave_at:
            self.leaving = True

    def settle(self) -> None:
        self.settled += 1

    def at_loop_end(self) -> None:
        self.ends += 1

    def at_interruption(self) -> None:
        self.log.append("interrupted")
        self.leaving = True


class Rig:
    """Loops with a tracked optimizer, as a run has them."""

    def __init__(self, state: Any = None, *, optimizers: int = 1) -> None:
        self.engine = FakeEngine()
        self.model = torch.nn.Linear(1, 1)
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1) for _ in range(optimizers)]
        self.activity = Activity()
        self.activity.start()
        self.activity.track(self.optimizers)
        self.positions = Positions() if state is None else Positions.from_state(state)
        self.stopped: list[tuple[str, str]] = []
        self.loops = Loops(
            engine=self.engine,
            positions=self.positions,
            activity=self.activity,
            modules=lambda: [self.model],
            on_stop=lambda *what: self.stopped.append(what),
        )

    def steps(self, feed: Feed, **options: Any) -> Iterator[tuple[int, Any]]:
        return self.loops.steps(
            feed, **{"until": None, "epochs": None, "accumulate": 1, "name": None, **options}
        )

    def train(self, which: int = 0) -> None:
        self.backward()
        self.optimizers[which].step()
        self.optimizers[which].zero_grad()

    def backward(self) -> None:
        self.model(torch.ones(1, 1)).sum().backward()


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    """Makes rigs and removes their hooks."""
    made: list[Rig] = []

    def make(*args: Any, **options: Any) -> Rig:
        made.append(Rig(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.activity.close()


def feed_of(length: int, batch_size: int = 1, **options: Any) -> Feed:
    loader = ResumableDataLoader(list(range(length)), batch_size=batch_size, shuffle=True, seed=1, **options)
    return feed_for(loader, resume_data=None, warn=pytest.fail)


def ids(batch: torch.Tensor) -> list[int]:
    return batch.tolist()


# -- ends of bodies ---


def test_a_body_is_committed_when_the_next_one_is_asked_for(rig: Callable[..., Rig]) -> None:
    """Inside body k, k steps are committed; after the loop, all."""
    r = rig()
    seen = []
    for step, _ in r.steps(feed_of(3)):
        seen.append((step, r.positions.total))
        r.train()

    assert seen == [(0, 0), (1, 1), (2, 2)]
    assert r.positions.total == 3
    assert r.loops.all_ended


def test_continue_is_a_step_like_any_other(rig: Callable[..., Rig]) -> None:
    """A filtered batch counts, also the very first of the process."""
    r = rig()
    for step, _ in r.steps(feed_of(4)):
        if step in (0, 2):
            continue
        r.train()

    assert r.positions.total == 4


def leave_by_break(r: Rig, feed: Feed, at: int, update: bool) -> None:
    for step, _ in r.steps(feed):
        if step == at and not update:
            break
        r.train()
        if step == at:
            break


def leave_by_return(r: Rig, feed: Feed, at: int, update: bool) -> None:
    for step, _ in r.steps(feed):
        if step == at and not update:
            return
        r.train()
        if step == at:
            return


def leave_by_exception(r: Rig, feed: Feed, at: int, update: bool) -> None:
    with pytest.raises(ZeroDivisionError):
        for step, _ in r.steps(feed):
            if step == at and not update:
                raise ZeroDivisionError
            r.train()
            if step == at:
                raise ZeroDivisionError


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_return, leave_by_exception])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("update", [True, False])
def test_a_body_left_in_the_middle_counts_exactly_after_its_update(
    rig: Callable[..., Rig], leave: Callable[..., None], at: int, update: bool
) -> None:
    """Position and weights agree, however the body was left; a resume trains what was not trained."""
    r = rig()
    leave(r, feed_of(5), at, update)

    assert r.positions.total == at + update
    assert not r.loops.all_ended
    assert r.loops.body_open is not update


def test_islice_commits_what_was_trained(rig: Callable[..., Rig]) -> None:
    """The last body ended although nothing more was asked for."""
    r = rig()
    for _ in itertools.islice(r.steps(feed_of(5)), 3):
        r.train()

    assert r.positions.total == 3


def test_zip_drops_the_batch_that_no_body_got(rig: Callable[..., Rig]) -> None:
    """zip asks for one batch too many; it is not a step, and the next run gets it."""
    r = rig()
    feed = feed_of(5)
    for _ in zip(r.steps(feed), range(2), strict=False):
        r.train()

    assert r.positions.total == 2
    assert feed.remaining() == 3


def test_both_optimizers_of_a_gan_must_have_stepped(rig: Callable[..., Rig]) -> None:
    """Left between the two updates, the body is half done and does not count."""
    r = rig(optimizers=2)
    for step, _ in r.steps(feed_of(5)):
        r.train(0)
        if step == 1:
            break
        r.train(1)

    assert r.positions.total == 1
    assert r.activity.stepped


def test_without_optimizers_a_body_left_in_the_middle_does_not_count(rig: Callable[..., Rig]) -> None:
    """Batch inference: nothing tells that the work was done, so it is done again."""
    r = rig(optimizers=0)
    for step, _ in r.steps(feed_of(5)):
        if step == 2:
            break

    assert r.positions.total == 2


# -- safe points ---


def test_gradients_that_are_only_accumulated_are_no_safe_point(rig: Callable[..., Rig]) -> None:
    """By hand, an update every third body: only there may be saved, and the positions of there are kept."""
    r = rig()
    for step, _ in r.steps(feed_of(6)):
        r.backward()
        if step % 3 == 2:
            r.optimizers[0].step()
            r.optimizers[0].zero_grad()

    assert r.positions.total == 6
    assert [entry for entry in r.engine.log if entry != "judge"] == [
        "unsafe", "unsafe", "safe", "point", "unsafe", "unsafe", "safe", "epoch",
    ]  # fmt: skip


def test_a_skipped_scaler_step_is_a_step_and_only_delays_the_safe_point(rig: Callable[..., Rig]) -> None:
    """GradScaler does not call the optimizer; the batch is used up all the same."""
    r = rig()
    for step, _ in r.steps(feed_of(4)):
        r.optimizers[0].zero_grad()
        r.backward()
        if step != 1:
            r.optimizers[0].step()

    assert r.positions.total == 4
    assert r.engine.log.count("unsafe") == 1
    assert r.engine.points == 3


def test_stale_gradients_are_no_reason_against_a_safe_point(rig: Callable[..., Rig]) -> None:
    """Bodies that compute nothing leave old gradients as they are, and are safe points."""
    r = rig()
    for step, _ in r.steps(feed_of(4)):
        if step == 0:
            r.backward()
            r.optimizers[0].step()

    assert r.engine.points == 4


def test_accumulation_yields_micro_batches_and_commits_the_window(rig: Callable[..., Rig]) -> None:
    """k micro-batches a step; only after the last there is a safe point; a short last window is a step."""
    r = rig()
    seen = []
    for step, batch in r.steps(feed_of(10), accumulate=4):
        seen.append((step, len(batch), r.loops.sync_gradients))
        r.backward()
        if r.loops.sync_gradients:
            r.optimizers[0].step()
            r.optimizers[0].zero_grad()

    assert [step for step, _, _ in seen] == [0] * 4 + [1] * 4 + [2] * 2
    assert [sync for _, _, sync in seen] == ([False] * 3 + [True]) * 2 + [False, True]
    assert r.positions.total == 3
    assert r.engine.points == 3


@pytest.mark.parametrize("micro", [0, 1, 2])
def test_an_accumulation_cut_short_does_not_count(rig: Callable[..., Rig], micro: int) -> None:
    """The window is repeated whole, or the gradient would be too small."""
    r = rig()
    feed = feed_of(12)
    for number, _ in enumerate(r.steps(feed, accumulate=4)):
        r.backward()
        if number == 4 + micro:
            break
        if r.loops.sync_gradients:
            r.optimizers[0].step()
            r.optimizers[0].zero_grad()

    assert r.positions.total == 1
    assert feed.remaining() == 8


def test_accumulation_needs_to_know_where_an_epoch_ends(rig: Callable[..., Rig]) -> None:
    """Without a length nobody can say which micro-batch is the last."""
    r = rig()
    feed = feed_for(iter([1, 2, 3]), resume_data="fresh", warn=pytest.fail)
    with pytest.raises(RunError, match="length"):
        next(r.steps(feed, accumulate=2))


# -- look-ahead ---


def look_ahead(iterator: Iterator[Any]) -> Iterator[Any]:
    held = next(iterator)
    for item in iterator:
        yield held
        held = item
    yield held


def buffered(iterator: Iterator[Any]) -> Iterator[Any]:
    held: list[Any] = []
    for item in iterator:
        held.append(item)
        if len(held) > 2:
            yield held.pop(0)
    yield from held


@pytest.mark.parametrize("wrapper", [look_ahead, buffered])
def test_a_wrapper_that_fetches_ahead_is_refused(
    rig: Callable[..., Rig], wrapper: Callable[[Iterator[Any]], Iterator[Any]]
) -> None:
    """It would count steps before they are made, silently; the error comes before any harm."""
    r = rig()
    with pytest.raises(LookAhead, match="Wrap the"):
        for _ in wrapper(r.steps(feed_of(5))):
            r.train()

    assert r.positions.total == 0


def test_a_wrapper_like_a_progress_bar_is_fine(rig: Callable[..., Rig]) -> None:
    """tqdm asks for the next step only after the body."""

    def bar(iterator: Iterator[Any]) -> Iterator[Any]:
        yield from iterator

    r = rig()
    for _ in bar(r.steps(feed_of(3))):
        r.train()

    assert r.positions.total == 3


# -- ends of loops and resumes ---


def run_flat(r: Rig, feed: Feed, seen: list[Any], *, stop_after: int | None = None, **options: Any) -> None:
    for count, (step, batch) in enumerate(r.steps(feed, **options)):
        seen.append((step, ids(batch)))
        r.train()
        if stop_after is not None and count + 1 == stop_after:
            break


@pytest.mark.parametrize("length", [10, 7, 2])
@pytest.mark.parametrize("options", [{"until": 11}, {"epochs": 3}, {}])
def test_a_resume_after_any_step_goes_on_exactly(
    rig: Callable[..., Rig], length: int, options: dict[str, int]
) -> None:
    """Cut after each step, the batches of both parts together are those of an uninterrupted run."""
    whole: list[Any] = []
    run_flat(rig(), feed_of(length, 3), whole, **options)
    for cut in range(1, len(whole) + 1):
        parts: list[Any] = []
        first = rig()
        run_flat(first, feed_of(length, 3), parts, stop_after=cut, **options)
        second = rig(first.positions.to_state())
        run_flat(second, feed_of(length, 3), parts, **options)

        assert parts == whole, cut
        assert second.positions.total == len(whole)
        assert second.loops.all_ended
        assert second.engine.log.count("rng") == 1


def test_a_finished_loop_yields_nothing_and_a_larger_limit_continues(rig: Callable[..., Rig]) -> None:
    """The same command does nothing; more steps go on with the data where they were."""
    whole: list[Any] = []
    run_flat(rig(), feed_of(7, 2), whole, until=9)
    parts: list[Any] = []
    first = rig()
    run_flat(first, feed_of(7, 2), parts, until=5)
    again = rig(first.positions.to_state())
    run_flat(again, feed_of(7, 2), parts, until=5)
    assert len(parts) == 5
    more = rig(again.positions.to_state())
    run_flat(more, feed_of(7, 2), parts, until=9)

    assert parts == whole


def nested(r: Rig, feed: Feed, seen: list[Any], *, count: int = 3, cut: int | None = None) -> bool:
    """Epochs with a tail; returns at the cut-th entry."""
    for epoch in r.loops.epochs(count, name=None):
        for step, batch in r.steps(feed):
            seen.append((epoch, step, ids(batch)))
            r.train()
            if len(seen) == cut:
                return False
        seen.append(("tail", epoch))
        if len(seen) == cut:
            return False
    return True


@pytest.mark.parametrize("length", [6, 5, 1])
def test_nested_epochs_resume_in_the_middle_and_before_the_tail(rig: Callable[..., Rig], length: int) -> None:
    """A resume between the last step and the tail yields no step and runs the tail."""
    whole: list[Any] = []
    reference = rig()
    nested(reference, feed_of(length, 2), whole)
    for cut in range(1, len(whole) + 1):
        parts: list[Any] = []
        first = rig()
        nested(first, feed_of(length, 2), parts, cut=cut)
        counted = parts[: cut - (parts[-1][0] == "tail" and not _tail_counts(first, parts))]
        second = rig(first.positions.to_state())
        rest: list[Any] = []
        nested(second, feed_of(length, 2), rest)

        assert counted + rest == whole, cut
        assert second.positions.total == reference.positions.total, cut


def _tail_counts(r: Rig, parts: list[Any]) -> bool:
    """Whether the epoch whose tail was left by a return was committed."""
    return r.positions.loops["epochs0"].done == parts[-1][1] + 1


def test_a_break_in_the_inner_loop_does_not_count_the_epoch(rig: Callable[..., Rig]) -> None:
    """Leaving both loops in the middle of an epoch loses none of its batches."""
    r = rig()
    feed = feed_of(6, 2)
    nested(r, feed, [], cut=2)

    assert r.positions.loops["epochs0"].done == 0
    assert feed.remaining() == 1


def test_a_break_in_the_inner_loop_alone_begins_the_next_epoch_anew(rig: Callable[..., Rig]) -> None:
    """As with a DataLoader: a pass that was broken off is over when the next epoch begins."""
    r = rig()
    feed = feed_of(6, 2)
    per_epoch = []
    for _ in r.loops.epochs(2, name=None):
        count = 0
        for count, _ in enumerate(r.steps(feed), start=1):
            r.train()
            if count == 2:
                break
        per_epoch.append(count)

    assert per_epoch == [2, 2]
    assert feed.epoch == 1


def test_a_loop_in_the_body_of_a_step_is_refused(rig: Callable[..., Rig]) -> None:
    """A resume could not come back to it: the outer loop would count as over, and the run as finished."""
    for outer in ("steps", "range"):
        for inner in ("steps", "range", "epochs"):
            r = rig()
            forms = {
                "steps": lambda r=r: r.steps(feed_of(3)),
                "range": lambda r=r: r.loops.range(3, name="named"),
                "epochs": lambda r=r: r.loops.epochs(3, name=None),
            }
            with pytest.raises(RunError, match=r"while loop .* is still open"):
                for _ in forms[outer]():
                    for _ in forms[inner]():
                        r.train()
            assert r.positions.total == 0


def test_two_loops_at_once_are_refused(rig: Callable[..., Rig]) -> None:
    """Each would count the other's steps."""
    r = rig()
    feed = feed_of(5)
    with pytest.raises(RunError, match="one dataset of both"):
        for _ in zip(r.steps(feed), r.steps(feed), strict=True):
            r.train()


class Bar:
    """A progress bar: holds the iterable, and a ``break`` does not close it."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        while (item := next(self.iterable, None)) is not None:
            yield item


@pytest.mark.parametrize("update", [True, False])
def test_a_loop_whose_iterator_is_kept_is_left_as_by_a_break(rig: Callable[..., Rig], update: bool) -> None:
    """What the last body trained is committed when the run is left."""
    r = rig()
    bar = Bar(r.steps(feed_of(5)))
    for step, _ in bar:
        if step < 2 or update:
            r.train()
        if step == 2:
            break
    assert r.positions.total == 2

    r.loops.leave_open()
    assert r.positions.total == 2 + update
    assert r.loops.active == []
    assert not r.loops.all_ended
    assert list(bar.iterable) == []


def test_an_inner_loop_whose_iterator_is_kept_ends_with_the_epoch(rig: Callable[..., Rig]) -> None:
    """Its last body belongs to this epoch, not to the next; the other loops of the body are not affected."""
    r = rig()
    feed = feed_of(6, 2)
    bars, totals = [], []
    for _ in r.loops.epochs(3, name=None):
        bars.append(Bar(r.steps(feed)))
        for done, _ in enumerate(bars[-1], start=1):
            r.train()
            if done == 2:
                break
        totals.append(r.positions.total)

    assert totals == [1, 3, 5]
    assert r.positions.total == 6
    assert r.positions.loops["epochs0"].done == 3
    assert r.loops.all_ended


def test_a_break_out_of_an_epoch_leaves_the_kept_inner_loop_too(rig: Callable[..., Rig]) -> None:
    """Leaving both loses nothing, and the epoch is not over."""
    r = rig()
    bar: Any = None
    for _ in r.loops.epochs(3, name=None):
        bar = Bar(r.steps(feed_of(6, 2)))
        for done, _ in enumerate(bar, start=1):
            r.train()
            if done == 2:
                break
        break

    assert r.positions.total == 2
    assert r.positions.loops["epochs0"].done == 0
    assert r.loops.active == []


def test_epochs_of_ones_own_count_as_steps(rig: Callable[..., Rig]) -> None:
    """A body of an epochs-loop without a loop in it is one step."""
    r = rig()
    for _ in r.loops.epochs(3, name=None):
        r.train()

    assert r.positions.total == 3


def test_a_second_stage_over_the_same_loader_goes_on_with_a_new_epoch(rig: Callable[..., Rig]) -> None:
    """And a resume in the second stage passes the first, however that was left."""

    def stages(r: Rig, feed: Feed, seen: list[Any], cut: int | None = None) -> None:
        for step, batch in r.steps(feed):
            seen.append((1, step, ids(batch)))
            r.train()
            if step == 1:
                break
        for step, batch in r.steps(feed):
            seen.append((2, step, ids(batch)))
            r.train()
            if len(seen) == cut:
                return

    whole: list[Any] = []
    stages(rig(), feed_of(8, 2), whole)
    assert len(whole) == 2 + 4
    for cut in range(3, 7):
        parts: list[Any] = []
        first = rig()
        stages(first, feed_of(8, 2), parts, cut)
        stages(rig(first.positions.to_state()), feed_of(8, 2), parts)

        assert parts == whole


def test_a_second_stage_behind_epochs_that_are_over_goes_on_with_a_new_epoch(rig: Callable[..., Rig]) -> None:
    """Also in a process in which no epoch's body runs any more, so that nothing went over the loader there."""

    def stages(r: Rig, seen: list[Any], *, second: bool = True) -> None:
        feed = feed_of(6, 2)
        for _ in r.loops.epochs(2, name=None):
            for _, batch in r.steps(feed):
                seen.append(ids(batch))
                r.train()
        if second:
            for _, batch in r.steps(feed):
                seen.append(ids(batch))
                r.train()

    whole: list[Any] = []
    stages(rig(), whole)
    parts: list[Any] = []
    first = rig()
    stages(first, parts, second=False)
    stages(rig(first.positions.to_state()), parts)

    assert parts == whole
    assert len(whole) == 9
    assert whole[6:] not in (whole[:3], whole[3:6])


def test_range_counts_and_resumes(rig: Callable[..., Rig]) -> None:
    """For loops that draw their own batches."""
    first = rig()
    for step in first.loops.range(5, name=None):
        first.train()
        if step == 2:
            break
    second = rig(first.positions.to_state())
    rest = []
    for step in second.loops.range(5, name=None):
        rest.append(step)
        second.train()

    assert rest == [3, 4]
    assert second.positions.total == 5


def test_safe_points_of_ones_own_count_steps(rig: Callable[..., Rig]) -> None:
    """Each call commits one step, and inside another loop's body it is refused."""
    r = rig()
    for _ in range(3):
        r.train()
        r.loops.safe_point()

    assert r.positions.total == 3
    with pytest.raises(RunError, match="is the safe point already"):
        for _ in r.loops.range(1, name=None):
            r.loops.safe_point()


def test_stop_ends_the_loop_at_the_end_of_this_body_for_good(rig: Callable[..., Rig]) -> None:
    """Early stopping: like reaching the end; only a larger limit continues."""
    r = rig()
    for step, _ in r.steps(feed_of(20), until=10):
        if step == 3:
            r.loops.stop("no progress")
        r.train()

    assert r.positions.total == 4
    assert r.loops.all_ended
    assert r.stopped == [("steps0", "no progress")]
    assert list(rig(r.positions.to_state()).steps(feed_of(20), until=10)) == []
    assert len(list(rig(r.positions.to_state()).steps(feed_of(20), until=12))) == 8


def test_stop_inside_an_epoch_ends_both_loops_after_the_tail(rig: Callable[..., Rig]) -> None:
    """The tail of the stopped epoch still runs."""
    r = rig()
    tails = []
    for epoch in r.loops.epochs(5, name=None):
        for _ in r.steps(feed_of(6, 2)):
            r.train()
            if epoch == 1:
                r.loops.stop("enough")
        tails.append(epoch)

    assert tails == [0, 1]
    assert r.positions.total == 4
    assert r.loops.all_ended


def test_a_resume_in_the_tail_of_a_stopped_epoch_runs_the_tail_and_no_other_epoch(
    rig: Callable[..., Rig],
) -> None:
    """The stop was committed with the step in which it was called, for the loops around it as well."""

    states: list[Any] = []

    def train(r: Rig, tails: list[int], *, count: int = 5) -> None:
        for epoch in r.loops.epochs(count, name=None):
            for step, _ in r.steps(feed_of(6, 2)):
                r.train()
                if step == 4:
                    r.loops.stop("enough")
            states.append(r.positions.to_state())
            tails.append(epoch)

    train(rig(), [])
    before_tail = states[1]
    second, tails = rig(before_tail), []
    train(second, tails)

    assert tails == [1]
    assert second.positions.total == 5
    assert second.loops.all_ended

    more, tails = rig(before_tail), []
    train(more, tails, count=6)
    assert tails == [1, 2, 3, 4, 5]


def test_stop_outside_a_loop_is_refused(rig: Callable[..., Rig]) -> None:
    """There is nothing to end."""
    with pytest.raises(RunError, match="outside a loop"):
        rig().loops.stop("why")


def test_leaving_ends_all_loops_without_another_commit(rig: Callable[..., Rig]) -> None:
    """on_reclaim="return": after the final save the loops end, the code behind them runs, nothing counts."""
    r = rig()
    r.engine.leave_at = 2
    tails = []
    for epoch in r.loops.epochs(3, name=None):
        for _ in r.steps(feed_of(8, 2)):
            r.train()
        tails.append(epoch)

    assert r.positions.total == 2
    assert tails == [0]
    assert r.positions.loops["epochs0"].done == 0
    assert not r.loops.all_ended


def test_an_interrupted_phase_is_never_half_counted(rig: Callable[..., Rig]) -> None:
    """A notice in an evaluation ends it at once, and the body that it belongs to is not committed."""
    r = rig()
    evaluated = []
    for step, _ in r.steps(feed_of(6)):
        r.train()
        for item in r.loops.interruptible(range(10)):
            evaluated.append((step, item))
            if (step, item) == (1, 4):
                r.engine.notice_pending = True

    assert evaluated[-1] == (1, 4)
    assert r.positions.total == 1
    assert r.engine.log[-1] == "interrupted"
    assert r.engine.settled == 2, "the phase may write to what is being copied"


def test_the_first_body_judges_once(rig: Callable[..., Rig]) -> None:
    """What is tracked is judged before the first body, whichever loop it belongs to."""
    r = rig()
    for _ in r.loops.epochs(2, name=None):
        for _ in r.steps(feed_of(2)):
            r.train()

    assert r.engine.log[0] == "judge"
    assert r.engine.log.count("judge") == 1


def test_the_engine_is_told_of_each_end_of_a_loop(rig: Callable[..., Rig]) -> None:
    """Of those that came to their end; not of one that was left."""
    r = rig()
    for epoch in r.loops.epochs(2, name=None):
        for _ in r.loops.range(2 * (epoch + 1), name=None):
            r.train()
    assert r.engine.ends == 3
    for _ in r.loops.range(2, name=None):
        break
    assert r.engine.ends == 3
