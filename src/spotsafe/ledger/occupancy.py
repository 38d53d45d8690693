"""Does another job run on this folder? Asked before a start or a rollback supersedes it (rule 11)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from spotsafe import human
from spotsafe.checkpoint.attempts import AttemptRecord, read_attempt
from spotsafe.checkpoint.candidates import Listing
from spotsafe.checkpoint.claim import WATCHED_S, in_use
from spotsafe.clock import Clock
from spotsafe.errors import DamagedCheckpoint, RunInUse, StorageNotFound
from spotsafe.events import Event, Warned
from spotsafe.identity import Identity, is_running
from spotsafe.ledger.reading import read_end, read_heartbeat
from spotsafe.storage.store import Store


class Occupancy:
    """Watches the attempts that a start would supersede.

    Args:
        store: the run.
        identity: who wants to start.
        clock: waits between two looks at a heartbeat.
        emit: is told what is being waited for.
        remedy: what the error tells a person to do.
    """

    def __init__(
        self,
        store: Store,
        *,
        identity: Identity,
        clock: Clock,
        emit: Callable[[Event], object],
        remedy: str = "Use another folder, stop it, or pass takeover=True",
    ) -> None:
        self._store = store
        self._identity = identity
        self._clock = clock
        self._emit = emit
        self._remedy = remedy
        self._said: set[int] = set()

    def check(self, listing: Listing) -> None:
        """Make sure that the newest attempt which trains is not that of another living job.

        Raises:
            RunInUse: it is. Found out by watching its heartbeat for a little more than one interval, unless the
                answer is known: it is the same job, it recorded its end, or its process is gone.
            StorageError: the store could not say.
        """
        for attempt in listing.numbers:
            try:
                record = read_attempt(self._store, attempt)
            except StorageNotFound:
                continue
            except DamagedCheckpoint as error:  # nothing is known of who that was, and nobody is kept waiting
                self._emit(Warned(message=f"{error}; this attempt is left out of account"))
                return
            if not record.is_rollback:
                self.check_record(record)
                return

    def check_record(self, record: AttemptRecord) -> None:
        """The same for an attempt that is known already.

        Raises:
            RunInUse: another job runs it.
            StorageError: the store could not say.
        """
        if record.is_rollback:
            return
        watched = human.duration(WATCHED_S)
        words = f"attempt {record.attempt} of another job ({_who(record)})"

        def wait(seconds: float) -> None:
            if record.attempt not in self._said:
                self._said.add(record.attempt)
                text = f"{words} has recorded no end; watching for up to {watched} whether it is alive"
                self._emit(Warned(message=text))
            self._clock.wait(threading.Event(), seconds)

        if in_use(
            record,
            ended=lambda: read_end(self._store, record.attempt) is not None,
            identity=self._identity,
            is_running=is_running,
            read_heartbeat=lambda: read_heartbeat(self._store, record.attempt),
            wait=wait,
        ):
            raise RunInUse(f"{self._store.url} is in use: {words} is alive. {self._remedy}")


def _who(record: AttemptRecord) -> str:
    """What a person finds the job by. Without a launcher it has no name but a digest; its program and process tell."""
    named = not record.job.startswith("host=") or not record.arguments
    return f"{record.job if named else record.arguments[0]}, process {record.pid} on {record.host}"
