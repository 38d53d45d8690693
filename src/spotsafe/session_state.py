"""What the session itself keeps in a checkpoint, beside the tracked objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spotsafe.errors import StateMismatch
from spotsafe.positions import Positions
from spotsafe.tensors.rng import RngSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """Everything that a session goes on from; of a fresh run, what it begins with."""

    positions: Positions
    rng: RngSnapshot | None
    """The generators of the process; None in a fresh run, which draws on as the program set them."""
    values: Mapping[str, Any]
    """`run.values`."""
    nonfinite: frozenset[str]
    """Parameters and moments that were not finite where the run began: they say nothing about its health."""
    threads: int | None = None
    """Threads by which torch computed on the CPU then; None if that is not known. Sums are cut by it."""

    @staticmethod
    def read(state: Any) -> SessionState:
        """Of the plain values that `session_values` made.

        Raises:
            StateMismatch: they are not what a session writes.
        """
        try:
            return SessionState(
                positions=Positions.from_state(state["positions"]),
                rng=RngSnapshot.from_state(state["rng"]),
                values=dict(state["values"]),
                nonfinite=_names(state["nonfinite"]),
                threads=_count(state.get("threads")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatch(f"the checkpoint's session state cannot be read: {error!r}") from error


def _names(values: Any) -> frozenset[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("'nonfinite' is not a list of names")
    return frozenset(values)


def _count(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise TypeError("'threads' is no number")
    return value


def session_values(
    *, positions: Mapping[str, Any], rng: RngSnapshot, values: Mapping[str, Any], nonfinite: frozenset[str]
) -> dict[str, Any]:
    """Plain values for a checkpoint; `positions` as `Positions.to_state` gave them, perhaps some time ago."""
    return {
        "positions": positions,
        "rng": rng.to_state(),
        "values": values,
        "nonfinite": sorted(nonfinite),
        "threads": torch.get_num_threads(),
    }
