"""`spotsafe.pin`: what a reader pinned can be read while the run goes on."""

from __future__ import annotations

import logging
import time

import pytest

import spotsafe
from spotsafe.checkpoint.candidates import look
from spotsafe.checkpoint.layout import PINS
from spotsafe.checkpoint.manifest import Marker, encode_marker
from spotsafe.errors import CheckpointNotFound, StorageRefused
from spotsafe.pinning import unpin
from spotsafe.policy.retention import latest
from spotsafe.storage.open import open_store
from spotsafe.testing.faults import FailingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt


@pytest.fixture
def run() -> tuple[MemoryStore, Attempt]:
    """A run with the steps 1 to 3 that keeps two of them from the next save on."""
    store = MemoryStore()
    attempt = Attempt(store, keep=latest(2))
    for step in (1, 2, 3):
        attempt.save(step, keep=latest(100))
    return store, attempt


def test_stays_while_the_run_saves_and_goes_afterwards(
    run: tuple[MemoryStore, Attempt], tmp_path: object
) -> None:
    """The reader's checkpoint is there until the end of its block, and no longer."""
    store, attempt = run
    with spotsafe.pin(store) as pinned:
        assert (pinned.step, pinned.url) == (3, f"{store.url}@{pinned.name}")
        assert pinned.until == pytest.approx(time.time() + 86_400, abs=60)
        for step in range(4, 9):
            attempt.save(step)
        assert [name.step for name in look(store).names] == [8, 7, 3]
    assert store.names(PINS) == []
    attempt.save(9)
    assert [name.step for name in look(store).names] == [9, 8]


def test_can_be_released_by_hand_twice(run: tuple[MemoryStore, Attempt]) -> None:
    """A notebook has no block."""
    store, _ = run
    pinned = spotsafe.pin(store, hours=1)
    pinned.release()
    pinned.release()
    assert store.names(PINS) == []


def test_urls_with_selectors(tmp_path: object) -> None:
    """As for `spotsafe.load`."""
    url = str(tmp_path)
    attempt = Attempt(open_store(url), keep=latest(100))
    names = [str(attempt.save(step).name) for step in (1, 2)]
    assert spotsafe.pin(f"{url}@1").name == names[0]
    assert spotsafe.pin(f"{url}@{names[1]}").url == f"{url}@{names[1]}"
    assert unpin(f"{url}@1") == 1
    assert unpin(url) == 1


def test_latest_is_chosen_again_if_it_is_withdrawn_at_that_moment(run: tuple[MemoryStore, Attempt]) -> None:
    """Retention was faster: whoever asked for the latest gets the next one, whoever named a step an error."""
    store, _ = run

    class Withdrawing(MemoryStore):
        """Withdraws the newest as soon as its pin is there."""

        def create(self, path: str, data: bytes) -> bool:
            made = super().create(path, data)
            if path.startswith(f"{PINS}/a000001-s000000003"):
                self.objects[newest.manifest] = encode_marker(Marker(state="retired"))
            return made

    newest = look(store).names[0]
    faulty = Withdrawing()
    faulty.objects.update(store.objects)
    with spotsafe.pin(faulty) as pinned:
        assert pinned.step == 2
        assert len(faulty.names(PINS)) == 1


def test_a_refused_release_is_told_and_ends_nothing(
    run: tuple[MemoryStore, Attempt], caplog: pytest.LogCaptureFixture
) -> None:
    """The pin ends by itself; what the block did counts."""
    store, _ = run
    refusing = FailingStore(store, fail=lambda name, *_: StorageRefused("no") if name == "delete" else None)
    with caplog.at_level(logging.WARNING), spotsafe.pin(refusing):
        pass
    assert "stays until its time" in caplog.text
    pinned = spotsafe.pin(refusing)
    with pytest.raises(StorageRefused):
        pinned.release()


@pytest.mark.parametrize("hours", [0, -1, float("nan"), float("inf"), True])
def test_hours_must_be_some(hours: float) -> None:
    """A mistake of the caller, before anything is asked."""
    with pytest.raises(ValueError, match="hours"):
        spotsafe.pin(MemoryStore(), hours=hours)


def test_nothing_there() -> None:
    """An empty run has nothing to pin."""
    with pytest.raises(CheckpointNotFound):
        spotsafe.pin(MemoryStore())
