"""The writer as a thread of this process: writes one staged save after the other and never disturbs the caller."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.markers import EndedAt
from spotsafe.clock import Clock
from spotsafe.events import Event, SaveFailed
from spotsafe.storage.store import Store
from spotsafe.writer.copied import Staging
from spotsafe.writer.flight import InFlight
from spotsafe.writer.job import SaveJob, SaveResult
from spotsafe.writer.upload import Uploader

NAME = "spotsafe-writer"
_Task = tuple[SaveJob, memoryview, memoryview | None, Staging | None]
_Offer = list[_Task]
"""A save for the thread. Whoever takes it out has it: the thread, or a caller who was interrupted."""


class WriterThread:
    """Writes saves in the background, in the order in which they are given.

    The thread starts with the first save and is a daemon: whoever wants the saves to be durable must `drain`.

    Args:
        store: the run.
        emit: is told of everything that happens, from the writer's thread.
        clock: measures, and waits in `drain`.
        ended: see `Uploader`.
        ended_at: see `Uploader`.
    """

    shares = False
    """Whether saves lie in memory that another process can read."""

    def __init__(
        self,
        store: Store,
        *,
        emit: Callable[[Event], object],
        clock: Clock,
        ended: Callable[[int], bool] | None = None,
        ended_at: EndedAt | None = None,
    ) -> None:
        self._uploader = Uploader(store, emit=emit, monotonic=clock.monotonic, ended=ended, ended_at=ended_at)
        self._emit = emit
        self._clock = clock
        self._jobs: queue.SimpleQueue[_Offer | None] = queue.SimpleQueue()
        self._flying: InFlight[SaveJob] = InFlight()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether nothing is being written; costs nothing."""
        return not self._flying

    def has(self, name: CheckpointName) -> bool:
        """Whether a save was given to it whose result is not there."""
        return name in self._flying

    @property
    def undecided(self) -> bool:
        """See `Uploader.undecided`; ask when it is `idle`."""
        return self._uploader.undecided

    def note_lost(self, name: CheckpointName) -> None:
        """See `Uploader.note_lost`; before the first save."""
        self._uploader.note_lost(name)

    def staging(self) -> Staging:
        """The progress of a copy that is about to begin, for `submit`."""
        return Staging()

    def prepare(self, job: SaveJob, arena: memoryview, frozen: memoryview | None = None) -> None:
        """Do ahead of `submit`, in any thread, what would take time there; nothing here."""

    def submit(
        self,
        job: SaveJob,
        arena: memoryview,
        frozen: memoryview | None = None,
        *,
        staging: Staging | None = None,
    ) -> None:
        """Write a save, when those before it are written. What goes wrong with it is in its result, never raised here.

        Args:
            job: what to write.
            arena: the staged bytes; they must not change until the result is there.
            frozen: those of frozen tensors, if any were staged; the same holds for them.
            staging: of an arena that the caller is still about to fill. It must be finished, or failed: the writer
                waits for it.

        Raises:
            RuntimeError: too many saves are in flight, or the writer is closed; both are mistakes of the caller.
        """
        if self._closed:
            raise RuntimeError(f"save {job.name} given to a writer that is closed")
        self._flying.require_room(job.name)
        offer: _Offer = [(job, arena, frozen, staging)]
        try:
            self._flying.add(job.name, job)
            self._start()
            self._jobs.put(offer)
        except (RuntimeError, MemoryError) as error:  # no thread to be had
            self._flying.end(self._failed(job, error))
        except BaseException:  # Ctrl-C: taken back, unless the thread was faster, and writes it
            if _take(offer) is not None:
                self._flying.forget(job.name)
            raise

    def poll(self) -> list[SaveResult]:
        """The results of the saves that have ended since the last call, in their order."""
        return self._flying.poll()

    def drain(self, timeout_s: float | None = None, *, left: int = 0) -> bool:
        """Wait until nothing is being written, or not more than that.

        Args:
            timeout_s: seconds to wait at most; None waits as long as it takes.
            left: how many saves may still be in flight.

        Returns:
            Whether that is so now.
        """
        return self._flying.wait(self._clock, timeout_s=timeout_s, left=left)

    def close(self) -> None:
        """Take no more saves. One that is being written is not waited for; `drain` first."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        if self.idle and self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():  # one that Ctrl-C caught in its start is not
            self._thread = threading.Thread(target=self._work, name=NAME, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (
            self._thread is threading.current_thread()
        ):  # one that was thought not to have started ends here
            offer = self._jobs.get()
            if offer is None:
                return
            task = _take(offer)
            if task is not None:
                result = self._run(*task)
                del task  # the arenas must not be held while waiting for the next save
                self._flying.end(result)

    def _run(
        self, job: SaveJob, arena: memoryview, frozen: memoryview | None, staging: Staging | None
    ) -> SaveResult:
        try:
            return self._uploader.run(job, arena, frozen, staging)
        except BaseException as error:  # noqa: BLE001 - an error of our own must reach the caller too
            return self._failed(job, error)

    def _failed(self, job: SaveJob, error: BaseException) -> SaveResult:
        with contextlib.suppress(Exception):  # the result matters more, and whoever waits for it
            self._emit(SaveFailed(checkpoint=str(job.name), step=job.name.step, error=str(error)))
        return SaveResult(
            name=job.name, published=False, healthy=True, total_bytes=0, write_s=0.0, error=error
        )


def _take(offer: _Offer) -> _Task | None:
    try:
        return offer.pop()
    except IndexError:
        return None
