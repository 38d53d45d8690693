"""The word for an end says whether the program was to blame."""

from __future__ import annotations

import pytest

from spotsafe import errors
from spotsafe.outcomes import outcome_of
from spotsafe.policy.restarts import FAILED, STOPPED, STORAGE_FAILED


def failed_by(cause: BaseException | None) -> errors.SaveFailed:
    error = errors.SaveFailed("3 save(s) failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "word", "code"),
    [
        (errors.Reclaimed("gone", code=7), "reclaimed", 7),
        (errors.Superseded(), "superseded", errors.EXIT_SUPERSEDED),
        (errors.RestartLoop(), STOPPED, errors.EXIT_RESTART_LOOP),
        (KeyboardInterrupt(), "interrupted", None),
        (SystemExit(), "left", None),
        (SystemExit(0), "left", None),
        (SystemExit(1), FAILED, None),
        (SystemExit("no such file"), FAILED, None),
        (ZeroDivisionError(), FAILED, None),
        (OSError("the program's own"), FAILED, None),
        (errors.StateMismatch("other shapes"), FAILED, None),
        (errors.StorageUnavailable("no answer"), STORAGE_FAILED, None),
        (errors.StorageFull("no space"), STORAGE_FAILED, None),
        (failed_by(errors.StorageRefused("no")), STORAGE_FAILED, None),
        (failed_by(MemoryError()), FAILED, None),
        (failed_by(None), FAILED, None),
    ],
    ids=repr,
)
def test_each_way_to_end_has_its_word(error: BaseException, word: str, code: int | None) -> None:
    """Only `failed` counts towards a restart loop."""
    assert outcome_of(error) == (word, code)
