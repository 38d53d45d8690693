"""The demo's training script with one thing that is not restored: what the demo must find out.

broken_gpt.py --broken rng ...   and then the options of train_gpt.py
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from spotsafe.positions import Position
from spotsafe.tensors.rng import RngSnapshot, capture_rng

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"


def rng() -> None:
    """No generator is set back: what is read from a checkpoint is what they are anyway."""
    RngSnapshot.from_state = staticmethod(lambda state: capture_rng())


def dropout_seed() -> None:
    """Every generator but the one that dropout draws from."""
    from_state = RngSnapshot.from_state
    RngSnapshot.from_state = staticmethod(
        lambda state: from_state({**state, "torch": capture_rng().to_state()["torch"]})
    )


def moments() -> None:
    """Adam's first step finds empty moments."""
    step = torch.optim.AdamW.step
    seen = []

    def step_without_moments(optimizer: torch.optim.AdamW, *arguments: Any) -> Any:
        if not seen:
            seen.append(optimizer)
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
        return step(optimizer, *arguments)

    torch.optim.AdamW.step = step_without_moments


def scheduler() -> None:
    """The schedule begins anew."""
    torch.optim.lr_scheduler.SequentialLR.load_state_dict = lambda self, state: None


def position() -> None:
    """The loader begins at the first sample."""
    from_state = Position.from_state

    def without_feed(state: Any) -> Position:
        position = from_state(state)
        position.feed = None
        return position

    Position.from_state = staticmethod(without_feed)


BREAKS = {each.__name__: each for each in (rng, dropout_seed, moments, scheduler, position)}

if __name__ == "__main__":
    at = sys.argv.index("--broken")
    BREAKS[sys.argv[at + 1]]()
    del sys.argv[at : at + 2]
    sys.argv[0] = str(EXAMPLE)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
