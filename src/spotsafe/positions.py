"""Where each loop of a run stands. Pure values: no torch, no clock, no I/O.

A run may hold several loops, one after the other or inside an epochs-loop. Each has a name that is the same after a
resume: the one the user gave, or its kind and the ordinal of the call, within the enclosing epoch's body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spotsafe.errors import RunError, StateMismatch

MANUAL = "safe_point"
"""Name of the loop that `run.safe_point()` calls make up."""

_SAVED = ("done", "passes", "within", "stopped", "stopped_under")


@dataclass(slots=True)
class Position:
    """How far one loop has come, over all attempts. Saved with every checkpoint."""

    done: int = 0
    """Committed steps (of an epochs-loop: epochs)."""
    passes: int = 0
    """Passes over the loader that were completed (within the enclosing epoch, if there is one)."""
    within: int | None = None
    """The enclosing epoch to which the current or last pass belongs; None outside an epochs-loop."""
    stopped: bool = False
    """`run.stop` ended it."""
    stopped_under: int | None = None
    """The limit that was in force then; a larger one continues."""
    feed: Any = None
    """Plain values: the position in the data, as restored or as the loop was left."""
    live_feed: Callable[[], Any] | None = None
    """While the loop runs: gives the position in the data as committed."""

    def to_state(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _SAVED}
        state["feed"] = self.feed_now()
        return state

    def feed_now(self) -> Any:
        """The position in the data, as committed; None before the first pass."""
        return self.feed if self.live_feed is None else self.live_feed()

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Position:
        """The inverse of `to_state`."""
        return Position(**{name: state[name] for name in (*_SAVED, "feed")})

    def ended_by_stop(self, limit: int | None) -> bool:
        """Whether `run.stop` ended this loop and `limit` does not go beyond the limit of then."""
        if not self.stopped:
            return False
        return limit is None or self.stopped_under is None or limit <= self.stopped_under

    def freeze_feed(self) -> None:
        """The loop is left: keep the position in the data as a value, since the loader may serve another loop."""
        if self.live_feed is not None:
            self.feed = self.live_feed()
            self.live_feed = None


@dataclass(slots=True)
class _Scope:
    """A place in which loops are started: the block itself, or one body of an epochs-loop."""

    prefix: str = ""
    names: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Positions:
    """All loops of a run, and the count of committed steps over all of them."""

    total: int = 0
    """Committed steps of all loops: `run.step`."""
    where: str = ""
    """The loop at whose safe point the state was last consistent."""
    loops: dict[str, Position] = field(default_factory=dict)
    resume_at: str | None = None
    """The loop in which the restored checkpoint was taken, until the program gets there."""
    _scopes: list[_Scope] = field(default_factory=lambda: [_Scope()])

    def to_state(self) -> dict[str, Any]:
        """Plain values for the checkpoint, independent of what happens to this object later."""
        return {
            "total": self.total,
            "where": self.where,
            "loops": {name: position.to_state() for name, position in self.loops.items()},
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Positions:
        """Positions as a checkpoint holds them.

        Raises:
            StateMismatch: the checkpoint's session state has another shape.
        """
        try:
            loops = {name: Position.from_state(value) for name, value in state["loops"].items()}
            total, where = int(state["total"]), str(state["where"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateMismatch(f"the checkpoint's loop positions cannot be read: {error!r}") from error
        return Positions(total=total, where=where, loops=loops, resume_at=where or None)

    def claim(self, kind: str, name: str | None) -> tuple[str, Position]:
        """Name a loop that starts now and give its position.

        Raises:
            RunError: a name that another loop at the same place has.
            StateMismatch: the checkpoint was taken in another loop, which has not been reached yet, and knows
                nothing of this one: the program's loops have changed.
        """
        scope = self._scopes[-1]
        full = scope.prefix + (name if name is not None else f"{kind}{len(scope.names)}")
        if full in scope.names:
            raise RunError(f"two loops of this run are named {full!r}; give each a name= of its own")
        self._refuse_unknown_before_resume_point(full)
        scope.names.add(full)
        return full, self.loops.setdefault(full, Position())

    def enter(self, loop: str) -> None:
        """A body of an epochs-loop begins: loops in it are counted anew."""
        self._scopes.append(_Scope(prefix=f"{loop}/"))

    def leave(self) -> None:
        """The body has ended."""
        assert len(self._scopes) > 1, "a body ended that never began"
        self._scopes.pop()

    def passed(self, loop: str) -> bool:
        """Whether the program had left `loop` behind when the restored checkpoint was taken.

        Such a loop yields nothing, however it was left; the loop that holds the resume point does not count.
        """
        pending = self.resume_at
        return pending is not None and pending != loop and not self.resumes_inside(loop)

    def resumes_inside(self, loop: str) -> bool:
        """Whether the restored checkpoint was taken in a loop inside the body of `loop` that begins now."""
        return self.resume_at is not None and self.resume_at.startswith(f"{loop}/")

    def reached(self, loop: str) -> bool:
        """Whether `loop` is the one that the checkpoint was taken in; true once only."""
        if self.resume_at != loop:
            return False
        self.resume_at = None
        return True

    def _refuse_unknown_before_resume_point(self, full: str) -> None:
        if self.resume_at is None or full in self.loops:
            return
        raise StateMismatch(
            f"the checkpoint was taken in loop {self.resume_at!r}, but the program now starts loop {full!r}, which "
            f"the checkpoint does not know (it knows {', '.join(sorted(self.loops))}). "
            "Restore the order of the loops, or give them their names of before with name=.",
            problems=(f"loop {full}: not in the checkpoint",),
        )


@dataclass(frozen=True, slots=True)
class CommitRule:
    """Says whether a body that was left in the middle is a step. See `closed_early`."""

    stepped_before: frozenset[int] | None = None
    """Optimizers that stepped in the last committed body of this process; None before the first."""

    def after(self, stepped: frozenset[int]) -> CommitRule:
        """The rule after a committed body; a body without any update says nothing new."""
        return CommitRule(stepped or self.stepped_before)

    def closed_early(self, stepped: frozenset[int]) -> bool:
        """Whether a body left by ``break``, ``return`` or ``islice`` counts.

        It does exactly if every optimizer that stepped in the previous body has stepped in this one too. In the
        first body of a process: if any did. Without optimizers: it does not.
        """
        if self.stepped_before is None:
            return bool(stepped)
        return self.stepped_before <= stepped
