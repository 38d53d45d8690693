"""How an attempt ended, in the word that the ledger keeps, by the error that ended it.

Later starts judge by it whether this is a restart loop, so it must say whether the program was to blame.
"""

from __future__ import annotations

from spotsafe.errors import Reclaimed, RestartLoop, SaveFailed, StorageError, Superseded
from spotsafe.policy.restarts import FAILED, STOPPED, STORAGE_FAILED

FINISHED = "finished"
"""All loops came to their ends."""
LEFT = "left"
"""The block was left early, on purpose."""
RECLAIMED = "reclaimed"
SUPERSEDED = "superseded"
INTERRUPTED = "interrupted"
"""Ctrl-C."""


def outcome_of(error: BaseException) -> tuple[str, int | None]:
    """The outcome, and the exit code if the session has set one."""
    if isinstance(error, RestartLoop | Reclaimed | Superseded):
        word = {RestartLoop: STOPPED, Reclaimed: RECLAIMED}.get(type(error), SUPERSEDED)
        return word, error.code if isinstance(error.code, int) else None
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, None
    if isinstance(error, SystemExit) and not error.code:
        return LEFT, None  # sys.exit() in the block: the program is done
    return (STORAGE_FAILED if _by_storage(error) else FAILED), None


def _by_storage(error: BaseException) -> bool:
    """Whether the store ended it. `SaveFailed` has the last save's error as its cause."""
    if isinstance(error, SaveFailed) and error.__cause__ is not None:
        return _by_storage(error.__cause__)
    return isinstance(error, StorageError)
