"""Rollbacks: which checkpoints a run goes on from after a person went back to an older one (rule 10).

A rollback is an attempt that trains nothing. Its record says which checkpoint the run goes on from, and the record
of every later attempt repeats it, so that the newest record alone tells what counts. Nothing is deleted: what lies
between the checkpoint and the rollback is *set aside*. It is never resumed from and never the latest or the best,
retention neither counts nor deletes it, and a rollback to it brings it back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spotsafe.checkpoint.layout import CheckpointName


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """One decision of a person, as records hold it."""

    to: str
    """Full name of the checkpoint to go on from."""
    attempt: int
    """The attempt that says so. What later ones publish counts again."""

    @property
    def name(self) -> CheckpointName:
        """The checkpoint to go on from.

        Raises:
            ValueError: `to` is no checkpoint's name.
        """
        name = CheckpointName.parse(self.to)
        if name is None:
            raise ValueError(f"not the name of a checkpoint: {self.to!r}")
        return name

    def sets_aside(self, name: CheckpointName) -> bool:
        """Whether the checkpoint was left behind: newer than the one gone back to, not newer than the decision."""
        return name > self.name and name.attempt <= self.attempt


Branch = tuple[Rollback, ...]
"""The rollbacks that count now, oldest first; empty if there never was one."""


def is_set_aside(name: CheckpointName, branch: Branch) -> bool:
    """Whether a rollback has set the checkpoint aside, published or not."""
    return any(rollback.sets_aside(name) for rollback in branch)


def on_branch(names: Iterable[CheckpointName], branch: Branch) -> tuple[CheckpointName, ...]:
    """Those of `names` that count, in their order: the ones a start may resume from and retention may count."""
    return tuple(name for name in names if not is_set_aside(name, branch))


def until(branch: Branch, attempt: int) -> Branch:
    """The rollbacks that `attempt` may have known of: its history, if its own record cannot tell."""
    return tuple(rollback for rollback in branch if rollback.attempt < attempt)


def rolled_back(history: Branch, *, to: CheckpointName, attempt: int) -> Branch:
    """The branch after a rollback.

    Args:
        history: the branch that the attempt which made `to` was on. Not the present one: a rollback to a
            checkpoint that an earlier rollback set aside undoes that one.
        to: the checkpoint to go on from.
        attempt: the attempt that says so.
    """
    return (*history, Rollback(to=str(to), attempt=attempt))


def gone_back_to(branch: Branch) -> str | None:
    """The checkpoint that a person chose last; its health is not judged any more, for it was seen and chosen."""
    return branch[-1].to if branch else None
