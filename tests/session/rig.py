"""A small training program in the test's own process, and what it delivered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

import spotsafe
from spotsafe import events as ev
from spotsafe.policy.restarts import Limits
from spotsafe.testing.sinks import RecordingSink

MANY_STARTS = Limits(starts_per_hour=10_000)


class Cut(Exception):
    """The end of an attempt that nobody announced: saves nothing new, as a kill does not."""


class Net(torch.nn.Module):
    """Dropout draws random numbers; a running mean is a buffer that the forward pass writes."""

    mean: torch.Tensor

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, width)
        self.register_buffer("mean", torch.zeros(width))
        self.second = torch.nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        if self.training:
            self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return self.second(torch.nn.functional.dropout(hidden - self.mean, 0.3, self.training))


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Each sample tells its number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        value = torch.tensor([float(index), 1.0]) / self.length
        return {"id": torch.tensor(index), "x": value, "y": value.sum(dim=0, keepdim=True)}


@dataclass
class Program:
    """A model with everything around it, made anew for each attempt like a new process would."""

    length: int = 10
    batch_size: int = 3
    seed: int = 0
    workers: int = 0
    width: int = 4
    sink: RecordingSink = field(default_factory=RecordingSink)
    seen: list[tuple[int, list[int], str]] = field(default_factory=list)
    """Step, sample ids, loss of each body that ran to its end."""

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = Net(self.width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.loader = spotsafe.ResumableDataLoader(
            Samples(self.length), batch_size=self.batch_size, shuffle=True, seed=3, num_workers=self.workers
        )

    def session(self, url: Any, **options: Any) -> spotsafe.Run:
        defaults: dict[str, Any] = {
            "save_every": 1,
            "watch": None,
            "events": self.sink,
            "restart_limits": MANY_STARTS,
            "drain_timeout": timedelta(seconds=60),
            "writer": "thread",  # a process costs as much as most of these tests; `test_writer` has it
        }
        tracked = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return spotsafe.session(
            url if not hasattr(url, "__fspath__") else str(url), **{**defaults, **tracked, **options}
        )

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (self.model(batch["x"]) - batch["y"]).square().mean()

    def train(self, step: int, batch: dict[str, torch.Tensor]) -> None:
        loss = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.seen.append((step, batch["id"].tolist(), loss.item().hex()))

    def weights(self) -> list[float]:
        return [
            value for parameter in self.model.state_dict().values() for value in parameter.flatten().tolist()
        ]

    def of(self, kind: type[ev.Event]) -> list[Any]:
        """The events of a type, in order."""
        return [event for event in self.sink.events if isinstance(event, kind)]

    def checkpoint_steps(self) -> list[int]:
        return [event.step for event in self.of(ev.CheckpointPublished)]


def interrupted(cut: int, body: Callable[[], Iterator[None]]) -> bool:
    """Run a program until it has yielded `cut` times, then cut it; true if it came to its end before."""
    for count, _ in enumerate(body(), start=1):
        if count == cut:
            raise Cut
    return True
