"""Training that saves as often as it can: of every checkpoint that was ever published, all elements are of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import spotsafe
from spotsafe import events as ev
from spotsafe.events import Event
from spotsafe.loading import decode, with_selected
from tests.proof import record
from tests.session.numbered import SIZE, Numbered, Numbering

Change = Callable[[spotsafe.Run], object]


def nothing(_: spotsafe.Run) -> None:
    """Does nothing."""


@dataclass
class Variant:
    """What the program does beside numbering."""

    run: Numbered
    before: Change = nothing
    """Between the safe point and the optimizer's step."""
    after: Change = nothing
    """Behind the step."""
    tracked: dict[str, Any] = field(default_factory=dict)
    overlaps: bool = True
    """Whether anything is left that is copied beside training."""


def plain() -> Variant:
    return Variant(Numbered())


def average() -> Variant:
    run = Numbered()
    average = torch.optim.swa_utils.AveragedModel(run.model, avg_fn=lambda _, now, __: now.clone())
    return Variant(run, after=lambda _: average.update_parameters(run.model), tracked={"average": average})


def buffers() -> Variant:
    """As of BatchNorm: the forward pass writes them."""
    run = Numbered()
    run.model.register_buffer("mean", torch.zeros(SIZE))
    return Variant(run, before=lambda session: run.model.mean.fill_(session.step + 1.0))


def scheduler() -> Variant:
    run = Numbered()
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0 / (step + 1))
    return Variant(run, after=lambda _: schedule.step(), tracked={"scheduler": schedule})


def max_norm() -> Variant:
    run = Numbered()
    table = torch.nn.Embedding(512, SIZE // 512, max_norm=1e9)
    table.weight.data.zero_()
    run.optimizer = Numbering([*run.model.parameters(), table.weight])
    return Variant(run, before=lambda _: table(torch.arange(8)), tracked={"table": table})


def sam() -> Variant:
    """Climbs before the second pass, and comes back before the step."""
    run = Numbered()

    def climb(_: spotsafe.Run) -> None:
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.add_(0.5)
                parameter.sub_(0.5)

    return Variant(run, before=climb)


def schedule_free() -> Variant:
    """Goes to evaluation and back, now and then."""
    run = Numbered()

    def evaluate(session: spotsafe.Run) -> None:
        if session.step % 7 == 3:
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter.lerp_(torch.full_like(parameter, -1.0), 0.5)
                    parameter.mul_(2.0).add_(1.0)

    return Variant(run, before=evaluate)


def clamp() -> Variant:
    run = Numbered()

    def write(session: spotsafe.Run) -> None:
        session.wait_staged()
        run.model.first.data.add_(0.25)
        run.model.first.data.sub_(0.25)

    return Variant(run, before=write)


def clamp_without_a_word() -> Variant:
    """Found by the first probe; nothing is overlapped afterwards."""
    run = Numbered()

    def write(_: spotsafe.Run) -> None:
        run.model.first.data.add_(0.25)

    def whole_again(_: spotsafe.Run) -> None:
        run.model.first.data.sub_(0.25)

    return Variant(run, before=write, after=whole_again, overlaps=False)


def two_optimizers() -> Variant:
    """Each with its own parameters; torch counts the writes of neither."""
    run = Numbered(uncounted=True)
    run.optimizer = Numbering([run.model.first], uncounted=True)
    other = Numbering([run.model.second], uncounted=True)
    return Variant(run, before=lambda _: other.step(), tracked={"other": other})


VARIANTS = [
    plain,
    average,
    buffers,
    scheduler,
    max_norm,
    sam,
    schedule_free,
    clamp,
    clamp_without_a_word,
    two_optimizers,
]


class Looker:
    """Reads every checkpoint at the moment of its publish, in the writer's thread."""

    def __init__(self, run: Numbered) -> None:
        self.run = run
        self.seen = 0
        self.torn: list[str] = []

    def emit(self, event: Event) -> None:
        if not isinstance(event, ev.CheckpointPublished):
            return
        values = with_selected(
            self.run.store, event.checkpoint, lambda opened: decode(opened, dict(opened.contents.values))
        )
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() >= SIZE:
                low, high = value.min().item(), value.max().item()
                if not low == high == event.step:
                    self.torn.append(f"{name} of step {event.step}: {low} to {high}")
        if values.get("scheduler.last_epoch", event.step) != event.step:
            self.torn.append(f"the scheduler of step {event.step}: {values['scheduler.last_epoch']}")
        self.seen += 1


def trained(variant: Callable[[], Variant], steps: int) -> tuple[Looker, Numbered]:
    case = variant()
    run = case.run
    looker = Looker(run)
    with spotsafe.session(
        run.store,
        model=run.model,
        optimizer=run.optimizer,
        save_every=1,
        keep=2,
        events=[looker, run.sink],
        **case.tracked,
    ) as session:
        for _ in session.range(steps):
            case.before(session)
            run.optimizer.step()
            case.after(session)
    off = "training waits for every copy" in run.warnings
    assert off is not case.overlaps
    return looker, run


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_checkpoint_is_torn(variant: Callable[[], Variant]) -> None:
    """Whatever the program does beside."""
    looker, _ = trained(variant, 500)
    assert not looker.torn
    assert looker.seen >= 20


@pytest.mark.prove
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_checkpoint_of_many_is_torn(variant: Callable[[], Variant]) -> None:
    """The same for thousands of steps."""
    steps = 10_000 if variant is plain else 2_000
    looker, run = trained(variant, steps)
    record(
        f"torn weights: {variant.__name__.replace('_', ' ')}",
        steps=steps,
        checkpoints=looker.seen,
        discarded=len(run.discarded),
        torn=len(looker.torn),
    )
    assert not looker.torn
