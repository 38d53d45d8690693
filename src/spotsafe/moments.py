"""What can be saved: the present at a safe point, and the last safe point as long as nothing of it has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spotsafe.activity import Activity
from spotsafe.positions import MANUAL, Positions
from spotsafe.session_state import session_values
from spotsafe.tensors.kept import KeptState
from spotsafe.tensors.marks import PlainMark
from spotsafe.tensors.rng import RngSnapshot, capture_rng
from spotsafe.tensors.versions import BuffersMark
from spotsafe.tracking import Tracker


@dataclass(slots=True)
class _Moment:
    """The last safe point: enough to save it later, and to see whether it can be."""

    step: int
    rng: RngSnapshot
    buffers: BuffersMark
    plain: PlainMark
    positions: Mapping[str, Any] | None = None
    """Set when the positions have moved on without a new safe point; else they are those of now."""
    kept: KeptState | None = None
    """At the end of a loop: the state that code behind it may change, and the resume will change again."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """What the last save of the present held, as far as code behind the loops may still change it."""

    plain: Any
    buffers: BuffersMark


@dataclass(slots=True, eq=False)
class Moments:
    """Remembers the last safe point, and gives the session's state of it or of the present."""

    tracker: Tracker
    positions: Positions
    activity: Activity
    values: dict[str, Any]
    """`run.values`, the user's plain values."""
    restored_rng: RngSnapshot | None
    """The generators of the restored checkpoint, until the program is back in the loop that it was taken in."""
    _last: _Moment = field(init=False)
    _saved: _Saved | None = None

    def __post_init__(self) -> None:
        if self.positions.resume_at == MANUAL:
            self.tracker.arrived()
        self.mark_safe()

    # -- remembering ---

    def mark_safe(self) -> None:
        """The present is a safe point."""
        self._mark(self._rng_now())

    def mark_between_loops(self) -> None:
        """The present is whole, outside of every body: the code that led here runs again after a resume."""
        self._mark(self._rng_to_go_on_from())

    def keep_positions(self) -> None:
        """The positions are about to move, and the state then is no safe point."""
        if self._last.positions is None:
            self._last.positions = self.positions.to_state()

    def keep_state(self) -> None:
        """A loop came to its end: the code behind it may change what a save of this moment needs."""
        if self._untouched:
            with contextlib.suppress(Exception):  # a scheduler of the user's that cannot be copied
                self._last.kept = self.tracker.keep(self.values)

    def restore_rng(self) -> None:
        """The program is back where the checkpoint was taken: set the generators to where they were, once."""
        if self.restored_rng is not None:
            self.restored_rng.restore()
            self.restored_rng = None
            self.tracker.arrived()
            self.mark_safe()

    def note_saved(self) -> None:
        """The present is being saved."""
        self._saved = _Saved(plain=self._plain_now(), buffers=self.tracker.buffers_mark())

    # -- what has happened since ---

    def random_numbers_drawn(self) -> bool:
        """Whether a random number was drawn since the last safe point."""
        return bool(capture_rng().to_state() != self._last.rng.to_state())

    @property
    def tensors_moved(self) -> bool:
        """Whether an optimizer stepped since the last safe point, or a tensor of a tracked module was written."""
        return bool(self.activity.stepped) or self.tracker.buffers_moved(self._last.buffers)

    @property
    def surely_touched(self) -> bool:
        """Whether other state changed for certain; what nobody can look at gets the benefit of the doubt."""
        return self.tracker.plain_mark(self.values).surely_differs(self._last.plain)

    @contextlib.contextmanager
    def last_in_place(self) -> Iterator[bool]:
        """Within it other state is as at the last safe point, put back if need be; false if that cannot be had."""
        if self._untouched:
            yield True
        elif self._last.kept is not None:
            with self._last.kept.in_place() as whole:
                yield whole
        else:
            yield False

    def changed_since_save(self) -> bool:
        """Whether the code behind the loops changed what the last save holds. Random numbers do not count."""
        if self._saved is None:
            return False
        return bool(self._plain_now() != self._saved.plain) or self.tracker.buffers_moved(self._saved.buffers)

    # -- the session's own state, for a save ---

    @property
    def last_step(self) -> int:
        """Committed steps at the last safe point."""
        return self._last.step

    def present(self, *, nonfinite: frozenset[str]) -> dict[str, Any]:
        """Of now, which is a safe point."""
        rng, positions = self._rng_to_go_on_from(), self.positions.to_state()
        return session_values(positions=positions, rng=rng, values=self.values, nonfinite=nonfinite)

    def last(self, *, nonfinite: frozenset[str]) -> dict[str, Any]:
        """Of the last safe point."""
        positions = self._last.positions
        if positions is None:
            positions = self.positions.to_state()
        return session_values(
            positions=positions, rng=self._last.rng, values=self.values, nonfinite=nonfinite
        )

    # -- inside ---

    @property
    def _untouched(self) -> bool:
        return self.tracker.plain_mark(self.values) == self._last.plain

    def _mark(self, rng: RngSnapshot) -> None:
        self._last = _Moment(
            step=self.positions.total,
            rng=rng,
            buffers=self.tracker.buffers_mark(),
            plain=self.tracker.plain_mark(self.values),
        )

    def _plain_now(self) -> Any:
        return self.tracker.encode({"positions": self.positions.to_state(), "values": self.values})

    def _rng_to_go_on_from(self) -> RngSnapshot:
        """The generators at the end of the last body: a resume begins there and runs again what lies behind it.

        Code between two loops then draws what it drew, such as the first weights of a head. A loop of the
        program's own has no place to come back to: there it is the generators of now.
        """
        if self.positions.where in ("", MANUAL) or self._last.positions is not None:
            return self._rng_now()
        return self._last.rng

    def _rng_now(self) -> RngSnapshot:
        """The generators; before the program is back in the loop it was in, as they will be there."""
        ahead = self.restored_rng if self.positions.resume_at is not None else None
        return ahead or capture_rng()
