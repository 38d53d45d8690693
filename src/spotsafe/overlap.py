"""Copies that run beside training: which tensors have earned it, and where such a copy has to be over.

A copy is over before any optimizer of the process steps (torch's global hook), and at every other place where the
program may begin to write: the next safe point, the end of a loop, `run.interruptible`, `run.wait_staged` and the end
of the run. There it is waited for and judged; only then it goes to the writer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import AveragedModel

from spotsafe.clock import Clock
from spotsafe.events import Event, Warned
from spotsafe.policy.overlap import OverlapTrust
from spotsafe.tensors.beside import LEAST_BYTES, BesideCopy, Watched, can_be_beside
from spotsafe.tensors.frozen import address_of
from spotsafe.tensors.look import all_are
from spotsafe.tensors.optimizers import parameters_of
from spotsafe.tensors.plan import SavePlan
from spotsafe.tensors.tree import Capture, NamedTensor
from spotsafe.tracking import Tracker

LEAST_TOTAL_BYTES = 1 << 20
"""With less than this to copy it is done sooner than a thread has begun."""

_TABLES = (nn.Embedding, nn.EmbeddingBag)

Then = Callable[[bool, float], None]
"""What is done when a copy is over: whether it is whole, and for how many seconds it was waited for."""


@dataclass(slots=True, eq=False)
class _Running:
    """A copy, or a probe, that nobody has judged or taken over yet."""

    watched: Watched
    then: Then | None
    """None for a probe: its save was copied at the safe point, and is on its way."""
    waited_s: float = 0.0
    whole: bool | None = None
    """None until it is judged."""
    given_up: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """Which tensors were chosen, and all that it depended on."""

    plan: SavePlan
    tensors: tuple[NamedTensor, ...]
    earned: list[torch.Tensor]
    never: list[torch.Tensor]
    waits_for: Collection[str]
    chosen: frozenset[int]

    def still_is(
        self,
        plan: SavePlan,
        capture: Capture,
        earned: list[torch.Tensor],
        never: list[torch.Tensor],
        *,
        waits_for: Collection[str],
    ) -> bool:
        """Whether it would be the same now. Of the same tuple of tensors, each lies where it did (`KeptCapture`)."""
        return (
            plan is self.plan
            and capture.tensors is self.tensors
            and waits_for == self.waits_for
            and all_are(earned, self.earned)
            and all_are(never, self.never)
            and all(can_be_beside(self.tensors[at]) for at in self.chosen)
        )


class Overlap:
    """Runs at most one copy beside training, and sees that it is whole before anybody uses it.

    Args:
        tracker: what is saved.
        enabled: false copies nothing beside training.
        emit: is told, once each, why training waits for copies.
        clock: measures.
    """

    def __init__(
        self, *, tracker: Tracker, enabled: bool, emit: Callable[[Event], None], clock: Clock
    ) -> None:
        self._tracker, self._emit, self._clock = tracker, emit, clock
        self._trust = OverlapTrust(off=None if enabled else "overlap=False")
        self._stepped: set[int] = set()
        self._earned_by: set[int] = set()
        self._step: int | None = None
        self._running: _Running | None = None
        self._choice: _Choice | None = None
        self._lock = threading.RLock()
        self._home = threading.get_ident()
        self._process = os.getpid()
        self._handles: list[Any] = []
        self._said: set[str] = set()

    def start(self) -> None:
        """Install the hooks, if there are optimizers. They are global: any may write to what is being copied."""
        if self._handles or self._trust.off is not None or not self._tracker.optimizers:
            return
        # Traced into a compiled step, they would be compiled anew for every save. Not before there is an optimizer:
        # making the first one loads the same half second of torch.
        outside: Any = torch.compiler.disable
        before, after = outside(self._before_step), outside(self._after_step)
        self._handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def close(self) -> None:
        """Remove the hooks, and wait for a copy that nobody will use any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.give_up()

    @property
    def copying(self) -> bool:
        """Whether a copy is under way, or not judged yet."""
        return self._running is not None and self._running.then is not None

    @property
    def probes(self) -> bool:
        """Whether the next copy is to be made while training waits, and to be watched by `probe`."""
        return self._trust.probes

    def at_safe_point(self, step: int) -> None:
        """A safe point is reached: what stepped in the step that it commits, if it commits one, has earned a copy."""
        if step != self._step:
            self._step = step
            self._earned_by, self._stepped = self._stepped, set()

    # -- which tensors ---

    def choose(self, plan: SavePlan, capture: Capture) -> frozenset[int]:
        """Positions of the tensors to copy beside training; none if that is not worth it, or not safe.

        Only what belongs to an optimizer that stepped in the body before: its next step is seen before it writes.
        """
        if self._trust.off is not None:
            return frozenset()
        earned, never = self._earned(), self._never()
        last = self._choice
        if last is None or not last.still_is(plan, capture, earned, never, waits_for=self._trust.waits_for):
            waits_for = self._trust.waits_for
            chosen = self._choose(plan, capture, _addresses(earned) - _addresses(never))
            last = _Choice(plan, capture.tensors, earned, never, waits_for=waits_for, chosen=chosen)
        self._choice = last
        return last.chosen

    def _choose(self, plan: SavePlan, capture: Capture, may_be: set[int]) -> frozenset[int]:
        sizes = _large_in(plan) if may_be else {}
        tensors, waits_for = capture.tensors, self._trust.waits_for
        chosen = frozenset(
            at
            for at in sizes
            if tensors[at].name not in waits_for
            and can_be_beside(tensors[at])
            and tensors[at].tensor.data_ptr() in may_be
        )
        return chosen if sum(map(sizes.__getitem__, chosen)) >= LEAST_TOTAL_BYTES else frozenset()

    def _earned(self) -> list[torch.Tensor]:
        """The parameters and the state of what stepped, and averages that follow it."""
        found: list[torch.Tensor] = []
        for optimizer in self._tracker.optimizers:
            if id(optimizer) in self._earned_by:
                found += parameters_of(optimizer)
                for state in optimizer.state.values():
                    found += _tensors_in(state)
        if found:
            averages = [one for one in self._tracker.modules if isinstance(one, AveragedModel)]
            found += [one for module in averages for one in module.parameters()]
        return found

    def _never(self) -> list[torch.Tensor]:
        """What may be written before any step: options of groups, tables that a forward pass scales."""
        found: list[torch.Tensor] = []
        for optimizer in self._tracker.optimizers:
            for group in optimizer.param_groups:
                found += _tensors_in(group)
        for optimizer in self._tracker.optimizers_without_hooks:
            found += parameters_of(optimizer)
            kind = type(optimizer).__name__
            self._say(
                f"{kind} runs none of torch's optimizer hooks: training waits while its state is copied"
            )
        for module in self._tracker.modules:
            for part in module.modules():
                if isinstance(part, _TABLES) and part.max_norm is not None:
                    found.append(part.weight)
        return found

    # -- one copy ---

    def begin(
        self,
        plan: SavePlan,
        capture: Capture,
        arena: memoryview,
        chosen: frozenset[int],
        *,
        then: Then,
        ahead: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin to copy; `settle` calls `then` when it is over.

        Args:
            plan: of the whole save.
            capture: what the plan was made of.
            arena: where the save lies.
            chosen: what to copy; see `choose`.
            then: is called in this thread.
            ahead: is called in the thread that copies, to do what would make `then` wait. What it raises is nobody's.

        Raises:
            RuntimeError: there is no thread to be had; nothing was begun.
        """
        assert self._running is None, "two steps never share a slot"
        copy = BesideCopy(plan, capture, arena, chosen, ahead=ahead)
        self._running, self._home = _Running(copy, then), threading.get_ident()
        try:
            copy.start()
        except BaseException:  # Ctrl-C too: perhaps there is a thread
            self.give_up()
            raise

    def probe(self, plan: SavePlan, capture: Capture, arena: memoryview, chosen: frozenset[int]) -> None:
        """Find out whether anybody would have torn a copy beside training; this one was made at the safe point."""
        assert self._running is None, "one save at a time"
        self._running = _Running(Watched(plan, capture, arena, chosen), None)
        self._home = threading.get_ident()

    def settle(self) -> None:
        """Wait until the copy under way is over, judge it, and do what is to be done then. Else nothing."""
        if self._running is not None and self._running.given_up:
            self.give_up()
            return
        running = self._judged()
        if running is not None and self._running is running:
            self._running = None
            if running.then is not None:
                running.then(bool(running.whole), running.waited_s)

    def give_up(self) -> None:
        """The save of the copy under way is not to be: see that its thread is over, and forget it."""
        running = self._running
        if running is None:
            return
        running.given_up = True  # if Ctrl-C comes here, it counts as under way until the next `settle`
        if os.getpid() == self._process:
            running.watched.call_off()
        self._running = None

    def _judged(self) -> _Running | None:
        running = self._running
        if running is None or running.given_up:
            return None
        if os.getpid() != self._process:  # a forked child has no thread that copies
            return None
        began = self._clock.monotonic()
        with self._lock:
            if running.whole is None:
                running.watched.wait()
                running.whole = self._judge(running)
        running.waited_s += self._clock.monotonic() - began
        return running

    def _judge(self, running: _Running) -> bool:
        """INVARIANT: only a copy that this finds whole is ever given to the writer."""
        moved = running.watched.moved()
        differing = set(running.watched.differing()) - set(moved)
        if not moved and not differing:
            self._trust = self._trust.after_whole()
            return True
        if differing:
            self._trust = self._trust.after_difference(differing)
        else:
            self._trust = self._trust.after_moved(moved)
            text = f"{moved[0]} was written before the optimizer's step"
            self._say(f"{text}: from now on training waits while it is copied")
        if self._trust.off is not None:
            text = f"from now on training waits for every copy: {self._trust.off}"
            self._say(f"{text}. run.wait_staged() before such a write, or overlap=False, avoids this")
        return False

    def _before_step(self, _optimizer: Optimizer, *_: Any) -> None:
        if self._running is None:
            return
        if threading.get_ident() == self._home:
            self.settle()
        else:  # what comes after is for the thread that began it
            self._judged()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not _is_being_captured():
            self._stepped.add(id(optimizer))

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._emit(Warned(message=text))


def _is_being_captured() -> bool:
    """Whether this step is only recorded in a CUDA graph: its replays run no hook."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _large_in(plan: SavePlan) -> Mapping[int, int]:
    """Positions of the tensors with a part that is worth it, and their bytes.

    The plan knows the sizes: to ask fifty thousand small tensors takes longer than to copy them.
    """
    sizes = dict.fromkeys((one.tensor for one in plan.placements if one.nbytes >= LEAST_BYTES), 0)
    for one in plan.placements:
        if one.tensor in sizes:
            sizes[one.tensor] += one.nbytes
    return sizes


def _addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    return set(map(address_of, tensors))


def _tensors_in(values: Any) -> Iterable[torch.Tensor]:
    found = values.values() if isinstance(values, dict) else ()
    return [one for one in found if isinstance(one, torch.Tensor)]
