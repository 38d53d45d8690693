"""What an attempt deletes behind its publishes, and what need not be done, or said, twice."""

from __future__ import annotations

import logging
from collections.abc import Callable

from spotsafe.checkpoint import gc
from spotsafe.checkpoint.candidates import Candidate
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.manifest import Manifest
from spotsafe.checkpoint.markers import EndedAt, remove_markers
from spotsafe.errors import StorageFull
from spotsafe.events import DeleteRefused, Event, Warned
from spotsafe.storage.store import Store

Emit = Callable[[Event], object]

_log = logging.getLogger(__name__)


class Tidying:
    """Deletes for one attempt: remains of its failed saves, once those of older attempts, and what retention gives up.

    Args:
        store: the run.
        emit: is told what was deleted, and once what cannot be.
        ended: given on a store without create-if-absent (rule 12): whether an attempt recorded its end. Only what
            such attempts left is deleted there, besides our own.
        ended_at: when an attempt ended, in Unix seconds, by its own record; without it no marker of an older attempt
            is ever removed.
    """

    def __init__(
        self,
        store: Store,
        *,
        emit: Emit,
        ended: Callable[[int], bool] | None = None,
        ended_at: EndedAt | None = None,
    ) -> None:
        self._store = store
        self._emit = emit
        self._ended, self._ended_at = ended, ended_at
        self._known: dict[CheckpointName, Candidate] = {}
        self._leftovers: dict[CheckpointName, bool] = {}  # failed save -> whether its manifest was tried
        self._swept = False
        self._said: set[str] = set()
        self._failing: type[BaseException] | None = None

    @property
    def undecided(self) -> bool:
        """Whether the manifest of a save that failed may still arrive: nobody may delete that save's files yet."""
        return any(self._leftovers.values())

    def note_published(self, manifest: Manifest) -> None:
        """A checkpoint of this attempt exists."""
        self._known[manifest.name] = Candidate(name=manifest.name, manifest=manifest)

    def after_publish(self, mine: CheckpointName, *, now: float, retention: gc.Retention | None) -> None:
        """Delete what is not needed any more: only after the second look of rule 4 found no newer attempt.

        Args:
            mine: what was published.
            now: Unix seconds.
            retention: what stays; None keeps everything that is published.

        Raises:
            StorageError: the store could not say what is there, or stopped answering.
        """
        for name, tried in list(self._leftovers.items()):
            if tried and self._ended is not None:
                continue  # its manifest may still arrive, and nothing would refuse it: left for after our end
            gc.discard(self._store, name, manifest_tried=tried, on_event=self._emit_once)
            del self._leftovers[name]
        may_delete = self._may_delete(mine)
        if not self._swept:
            self._sweep(mine.attempt, may_delete, now)
            self._swept = True
        if retention is not None:
            gc.apply_retention(
                self._store,
                attempt=mine.attempt,
                retention=retention,
                on_event=self._emit_once,
                known=self._known,
                may_delete=may_delete,
                now=now,
            )
        self._failing = None

    def note_failed(self, name: CheckpointName, *, manifest_tried: bool, error: Exception) -> None:
        """A failed save's files go after the next publish; at once if it is their space that is missing."""
        self._leftovers[name] = manifest_tried
        if isinstance(error, StorageFull) and not (manifest_tried and self._ended is not None):
            try:
                gc.discard(self._store, name, manifest_tried=manifest_tried, on_event=self._emit_once)
                del self._leftovers[name]
            except Exception:  # noqa: BLE001 - the save has failed already; this is tried again later
                _log.debug("could not delete the files of %s yet", name, exc_info=True)

    def tell_failure(self, name: CheckpointName, error: BaseException) -> None:
        """Warn of what failed after a publish; not again while it fails in the same way at every save."""
        if self._failing is type(error):
            return
        self._failing = type(error)
        text = str(error) or type(error).__name__
        self._emit(Warned(message=f"checkpoint {name} is published, but cleaning up after it failed: {text}"))

    def _sweep(self, attempt: int, may_delete: gc.MayDelete, now: float) -> None:
        gc.sweep(
            self._store,
            attempt=attempt,
            on_event=self._emit_once,
            known=self._known,
            may_delete=may_delete,
            now=now,
        )
        if self._ended_at is not None:
            remove_markers(
                self._store,
                attempt=attempt,
                ended_at=self._ended_at,
                now=now,
                on_event=self._emit_once,
                known=self._known,
                may_delete=may_delete,
            )

    def _may_delete(self, mine: CheckpointName) -> gc.MayDelete:
        ended = self._ended
        if ended is None:
            return gc.anything
        return lambda name: (
            (name.attempt, name.nonce) == (mine.attempt, mine.nonce)
            or (name.attempt < mine.attempt and ended(name.attempt))
        )

    def _emit_once(self, event: Event) -> None:
        """What keeps something from being deleted keeps it at every save; once is enough to be told."""
        said = None
        if isinstance(event, Warned):
            said = event.message
        elif isinstance(event, DeleteRefused):
            said = event.path
        if said is not None:
            if said in self._said:
                return
            self._said.add(said)
        self._emit(event)
