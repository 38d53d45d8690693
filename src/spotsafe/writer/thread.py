"""The writer as a thread of this process: takes one staged save at a time and never disturbs the caller."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.markers import EndedAt
from spotsafe.clock import Clock
from spotsafe.events import Event, SaveFailed
from spotsafe.storage.store import Store
from spotsafe.writer.copied import Staging
from spotsafe.writer.job import SaveJob, SaveResult
from spotsafe.writer.upload import Uploader

NAME = "spotsafe-writer"
_Task = tuple[SaveJob, memoryview, memoryview | None, Staging | None]

_LONG_S = 3600.0


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
        self._jobs: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[SaveResult] = queue.SimpleQueue()
        self._free = threading.Event()
        self._free.set()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether nothing is being written; costs nothing."""
        return self._free.is_set()

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

    def submit(
        self,
        job: SaveJob,
        arena: memoryview,
        frozen: memoryview | None = None,
        *,
        staging: Staging | None = None,
    ) -> None:
        """Begin to write a save. What goes wrong with it is in its result, never raised here.

        Args:
            job: what to write.
            arena: the staged bytes; they must not change until the writer is `idle` again.
            frozen: those of frozen tensors, if any were staged; the same holds for them.
            staging: of an arena that the caller is still about to fill. It must be finished, or failed: the writer
                waits for it.

        Raises:
            RuntimeError: a save is being written, or the writer is closed; both are mistakes of the caller.
        """
        if self._closed:
            raise RuntimeError(f"save {job.name} given to a writer that is closed")
        if not self.idle:
            raise RuntimeError(f"save {job.name} given while another is being written")
        self._free.clear()
        try:
            self._start()
        except (RuntimeError, MemoryError) as error:  # no thread to be had
            self._fail(job, error)
            self._free.set()
            return
        self._jobs.put((job, arena, frozen, staging))

    def poll(self) -> list[SaveResult]:
        """The results of the saves that have ended since the last call, in their order."""
        results = []
        while True:
            try:
                results.append(self._results.get_nowait())
            except queue.Empty:
                return results

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being written.

        Args:
            timeout_s: seconds to wait at most; None waits as long as it takes.

        Returns:
            Whether the writer is idle now.
        """
        if timeout_s is not None:
            return self._clock.wait(self._free, max(timeout_s, 0.0))
        while not self._clock.wait(self._free, _LONG_S):
            pass
        return True

    def close(self) -> None:
        """Take no more saves. One that is being written is not waited for; `drain` first."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        if self.idle and self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=NAME, daemon=True)
            thread.start()
            self._thread = thread

    def _work(self) -> None:
        while True:
            task = self._jobs.get()
            if task is None:
                return
            job, arena, frozen, staging = task
            del task  # the arenas must not be held while waiting for the next save
            try:
                self._results.put(self._uploader.run(job, arena, frozen, staging))
            except BaseException as error:  # noqa: BLE001 - an error of our own must reach the caller too
                self._fail(job, error)
            finally:
                del job, arena, frozen
                self._free.set()

    def _fail(self, job: SaveJob, error: BaseException) -> None:
        result = SaveResult(
            name=job.name, published=False, healthy=True, total_bytes=0, write_s=0.0, error=error
        )
        self._results.put(result)
        self._emit(SaveFailed(checkpoint=str(job.name), step=job.name.step, error=str(error)))
