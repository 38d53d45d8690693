"""What the loops ask of the run: the one seam between when a step counts and what is done about it."""

from __future__ import annotations

from typing import Protocol


class Engine(Protocol):
    """Saves, restores and leaves. `safepoint.SafePoints` is the one of a run."""

    def before_first_body(self) -> None:
        """The program has set itself up: judge what is tracked."""
        ...

    def restore_rng(self) -> None:
        """Set all random number generators to where they were at the restored safe point."""
        ...

    def random_numbers_drawn(self) -> bool:
        """Whether a random number was drawn since the last safe point (or the start)."""
        ...

    def before_unsafe_commit(self) -> None:
        """Positions are about to move although the state is no safe point: gradients were only accumulated."""
        ...

    def mark_safe(self) -> None:
        """Remember this moment as the last safe point."""
        ...

    def at_safe_point(self, *, epoch_ended: bool) -> None:
        """Save, or leave. May raise `Reclaimed`, `Superseded`, `SaveFailed`."""
        ...

    def at_loop_end(self) -> None:
        """A loop came to its end, at a safe point."""
        ...

    def at_interruption(self) -> None:
        """A notice came inside a long phase: save what is still whole or publish the newest staged; leave."""
        ...

    def settle(self) -> None:
        """The program may write to what is tracked from here on: a copy that runs beside it has to be over."""
        ...

    @property
    def notice_pending(self) -> bool:
        """Whether a reclaim has been announced."""
        ...

    @property
    def leaving(self) -> bool:
        """Whether the loops must end now, without another commit (``on_reclaim="return"``)."""
        ...
