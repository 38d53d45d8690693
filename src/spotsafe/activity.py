"""What the optimizers and modules of a run did since the last look: the evidence that a body has run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_SAMPLES = 8
"""Parameters looked at to tell whether gradients were accumulated; looking at all would cost every step."""

GradientMark = tuple[tuple[int, int], ...]


class Activity:
    """Watches the steps of some optimizers through torch's global hook.

    The hook fires for every optimizer of the process, also under `torch.compile`; those that are not tracked are
    ignored. A step that `GradScaler` skips does not fire it.
    """

    def __init__(self, on_stranger: Callable[[Optimizer], None] | None = None) -> None:
        """Nothing is watched before `start`.

        Args:
            on_stranger: told once of each optimizer that steps and is not tracked.
        """
        self._on_stranger = on_stranger
        self._strangers: set[int] = set()
        self._tracked: dict[int, Optimizer] = {}
        self._stepped: set[int] = set()
        self.ever_stepped = False
        self._handle: Any = None

    def start(self) -> None:
        """Install the hook."""
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._note)

    def close(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def track(self, optimizers: Iterable[Optimizer]) -> None:
        """Say which optimizers count."""
        self._tracked = {id(optimizer): optimizer for optimizer in optimizers}

    @property
    def tracks_any(self) -> bool:
        """Whether any optimizer is tracked."""
        return bool(self._tracked)

    @property
    def stepped(self) -> frozenset[int]:
        """Ids of the tracked optimizers that stepped since `forget`."""
        return frozenset(self._stepped)

    def forget(self) -> None:
        """Begin a new body."""
        self._stepped.clear()

    def gradient_mark(self) -> GradientMark:
        """Identity and version of some gradients: it changes when a backward pass adds to them."""
        return tuple(
            mark
            for optimizer in self._tracked.values()
            for group in optimizer.param_groups
            for mark in _marks(group["params"])
        )

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) in self._tracked:
            self._stepped.add(id(optimizer))
            self.ever_stepped = True
        elif self._on_stranger is not None and id(optimizer) not in self._strangers:
            self._strangers.add(id(optimizer))
            self._on_stranger(optimizer)


class FirstBody:
    """Tells a first body that ran from one that a prefetching wrapper has not run yet.

    A wrapper that asks for step 1 before the body of step 0 ran would make every commit one step early, silently.
    Between the two requests then nothing at all has happened: no forward pass of a tracked module, no optimizer
    step, no random number. A plain ``for`` in the program cannot look ahead, so only a caller that is a generator
    or another thread is suspected.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._ran = False
        self._handles = [module.register_forward_pre_hook(self._note) for module in modules]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def forward_ran(self) -> bool:
        """Whether a tracked module was called."""
        return self._ran

    def _note(self, *_: Any) -> None:
        self._ran = True


def called_by_generator() -> bool:
    """Whether the program's frame that asks for the next step is a generator, as in a wrapper around the loop."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("spotsafe."):
        frame = frame.f_back
    generator = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
    return frame is not None and bool(frame.f_code.co_flags & generator)


def _marks(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    stride = max(1, len(parameters) // _SAMPLES)
    return [
        (id(parameter.grad), parameter.grad._version)  # noqa: SLF001 - torch has no public name for it
        for parameter in parameters[::stride]
        if parameter.grad is not None
    ]
