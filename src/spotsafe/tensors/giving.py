"""Tensors of a checkpoint that are handed over, not copied: memory, and the time to touch it, are needed only once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from spotsafe.checkpoint.typed_values import tensor_names
from spotsafe.errors import StateMismatch
from spotsafe.tensors.tree import Json, clone
from spotsafe.tensors.versions import version_of


class Giving:
    """Gives each tensor that only one place of a checkpoint refers to, once, to the object that asks for it.

    Args:
        trees: everything that refers to tensors of the checkpoint.
    """

    def __init__(self, trees: Iterable[Json]) -> None:
        counts = Counter(tensor_names(list(trees)))
        self._names = {name for name, count in counts.items() if count == 1}
        self._given: dict[str, int] = {}

    def give(self, name: str, saved: torch.Tensor) -> torch.Tensor:
        """The tensor itself if nobody else needs it, else a copy.

        Raises:
            StateMismatch: it was given before, to an object that refused its state but had changed it by then.
        """
        if name not in self._names:
            return clone(saved)
        if name not in self._given:
            self._given[name] = version_of(saved)
            return saved
        if version_of(saved) != self._given[name]:
            problem = f"{name}: was changed by the object that it was restored into at first; start again"
            raise StateMismatch(problem, problems=[problem])
        return clone(saved)
