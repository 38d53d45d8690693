"""Going back to an older checkpoint on purpose (rule 10): an attempt that says so and trains nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spotsafe.checkpoint.attempts import AttemptRecord, branch_at, read_branch
from spotsafe.checkpoint.branch import Branch, is_set_aside, on_branch, rolled_back
from spotsafe.checkpoint.candidates import Candidate, Listing, look, read_candidate
from spotsafe.checkpoint.catalog import resolve
from spotsafe.checkpoint.claim import claim
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.pins import ROLLBACK, place_pin
from spotsafe.errors import CheckpointNotFound, DamagedCheckpoint, RunInUse
from spotsafe.identity import Identity
from spotsafe.storage.store import Store

KEPT_S = 30 * 86400.0
"""For so long (seconds) what was gone back to is pinned, unless two newer healthy ones are published before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a rollback would do."""

    listing: Listing
    """The look that it is based on."""
    target: Candidate
    """The checkpoint to go back to; its manifest is there."""
    sets_aside: tuple[CheckpointName, ...]
    """What counts now and would not any more, newest first; saves that were never published are among them."""
    brings_back: tuple[CheckpointName, ...]
    """What an earlier rollback set aside and would count again, newest first."""

    @property
    def is_done(self) -> bool:
        """Whether it would change nothing: the checkpoint is the newest that counts."""
        return not self.sets_aside and not self.brings_back


def plan_rollback(store: Store, selector: str | int) -> Plan:
    """Look what a rollback to a checkpoint means. Changes nothing.

    Raises:
        CheckpointNotFound: there is no such checkpoint, or it was never published; the message says which.
        DamagedCheckpoint: the latest or best was asked for, and nobody knows which checkpoints count.
        UnsupportedFormat: a newer spotsafe wrote what has to be read.
        StorageError: the store could not say.
    """
    listing = look(store)
    branch = _branch(store, listing, selector)
    target = resolve(store, selector, branch=branch or ())
    if read_candidate(store, target.name).manifest is None:
        raise CheckpointNotFound(f"{target.name} was withdrawn; only readers that pinned it still have it")
    now = frozenset(listing.names if branch is None else on_branch(listing.names, branch))
    history = branch_at(store, listing, target.name)
    after = rolled_back(history, to=target.name, attempt=listing.highest + 1)
    return Plan(
        listing=listing,
        target=target,
        sets_aside=tuple(name for name in listing.names if name in now and is_set_aside(name, after)),
        brings_back=tuple(
            name for name in listing.names if name not in now and not is_set_aside(name, after)
        ),
    )


def roll_back(
    store: Store,
    plan: Plan,
    *,
    identity: Identity,
    wall: float,
    met: Callable[[AttemptRecord], None] = lambda _: None,
) -> AttemptRecord:
    """Claim the attempt that says so. Nothing is deleted; the next start goes on from the checkpoint.

    Args:
        store: the run.
        plan: from `plan_rollback`.
        identity: who does it.
        wall: now, in Unix seconds.
        met: as for `claim`.

    Raises:
        CheckpointNotFound: the checkpoint was deleted at this moment; nothing was done.
        RunInUse: from `met`; nothing was done.
        StorageError: it is unknown whether it was done; doing it again does no harm.
    """
    name = str(plan.target.name)
    assert plan.target.manifest is not None, "`resolve` answers only published checkpoints"
    # The newest attempt may be about to delete what we go back to: it has looked for a newer attempt already.
    until = wall + KEPT_S
    pin = place_pin(store, plan.target.name, until=until, identity=identity, purpose=ROLLBACK)
    try:
        return claim(
            store,
            listing=plan.listing,
            identity=identity,
            newest_seen=name,
            wall=wall,
            resumed_from=name,
            run=plan.target.manifest.run,
            rollback_to=plan.target.name,
            met=met,
        )
    except RunInUse:
        store.delete(pin.path)
        raise


def _branch(store: Store, listing: Listing, selector: str | int) -> Branch | None:
    """What counts now; None if nobody knows, which a rollback to a step or a name is the way out of."""
    try:
        return read_branch(store, listing)
    except DamagedCheckpoint:
        if isinstance(selector, str) and CheckpointName.parse(selector) is None:
            raise
        return None
