"""The attempt behind a `SpotsafeWriter`: its claim, its heartbeat, the health of its saves, and what it deletes."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from spotsafe.checkpoint import gc
from spotsafe.checkpoint.attempts import AttemptRecord
from spotsafe.checkpoint.candidates import Candidate, candidates, look
from spotsafe.checkpoint.catalog import refuse_parent
from spotsafe.checkpoint.claim import claim, is_exclusive
from spotsafe.checkpoint.index import TensorEntry
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.manifest import Health, Manifest
from spotsafe.checkpoint.publish import publish
from spotsafe.clock import SystemClock
from spotsafe.console import Console, LogSink
from spotsafe.errors import RunInUse, SpotsafeError, Superseded, UnsupportedFormat
from spotsafe.events import CheckpointPublished, Fanout, RunEnded, SingleWriter, Warned, installed
from spotsafe.identity import Identity
from spotsafe.ledger.occupancy import Occupancy
from spotsafe.ledger.reading import ended_at, writes_no_more
from spotsafe.ledger.record import Ledger
from spotsafe.policy.retention import Keep
from spotsafe.storage.store import Store
from spotsafe.writer.health import NAMES, Scan
from spotsafe.writer.job import HealthSpan, StagedFile
from spotsafe.writer.tidying import Tidying

REASON = "dcp"
_JOINED = {REASON, "import"}
"""Why the newest checkpoint of a run was made that a writer may go on in: no session has positions there."""
_SHOWN = 4


@dataclass(slots=True)
class Reached:
    """How far a writer has come; the ledger's thread reads it from the start."""

    step: int = 0
    newest: str | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class WriterAttempt:
    """What a process claimed for a writer. Made by `attempt_of`."""

    store: Store
    record: AttemptRecord
    alone: bool
    """The store cannot refuse to create what is there (rule 12)."""
    fanout: Fanout
    ledger: Ledger
    tidying: Tidying
    finite_but: frozenset[str] | None
    """Names that are known not to be finite; None until a save tells."""
    reached: Reached
    process: int = field(default_factory=os.getpid)
    saves: int = 0
    began: float = 0.0
    marked: bool = False
    closed: bool = False

    def next_name(self, step: int) -> CheckpointName:
        """The name of a save that begins now."""
        if self.closed:
            raise ValueError("this writer is closed; make another one")
        self.saves += 1
        self.began = time.monotonic()
        return CheckpointName(self.record.attempt, step, self.saves, self.record.nonce)

    def health(self, name: CheckpointName, nonfinite: frozenset[str]) -> Health:
        """The verdict over a save: unhealthy if something is not finite that was.

        Which tensors are trained DCP does not tell, and a mask may well hold infinities: so the writer's first save
        says what is finite, or before it the run's newest healthy checkpoint.
        """
        before = nonfinite if self.finite_but is None else self.finite_but
        self.finite_but = before
        health = Scan(state=nonfinite, buffers=frozenset()).health(before=before)
        if not health.healthy:
            lost = sorted(nonfinite - before)
            more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
            text = f"checkpoint {name} is unhealthy: NaN or infinity in {', '.join(lost[:_SHOWN])}{more}"
            self.fanout.emit(Warned(message=text))
        return health

    def publish(self, manifest: Manifest, *, keep: Keep | None) -> None:
        """Make a checkpoint exist; then sweep what older attempts left, and delete what `keep` gives up.

        Raises:
            Superseded: a newer attempt exists.
            StorageError: it is not known whether the checkpoint was published.
        """
        outcome = publish(self.store, manifest, mark=not self.marked, single_writer=self.alone)
        if outcome.published:
            self._note(manifest)
            self.marked = self.marked or outcome.trouble is None
        if outcome.superseded_by is not None:
            self.end("superseded", timeout_s=0.0)
            raise Superseded(
                f"attempt {outcome.superseded_by} of {self.store.url} has been started; save no more here"
            )
        try:
            if outcome.trouble is not None:
                raise outcome.trouble
            if outcome.may_delete:
                self.tidying.after_publish(
                    manifest.name,
                    now=manifest.created,
                    retention=None
                    if keep is None
                    else gc.Retention(keep=keep, resumed_from=None, rollbacks=self.record.rollbacks),
                )
        except SpotsafeError as error:  # the checkpoint is there all the same
            self.tidying.tell_failure(manifest.name, error)

    def end(self, outcome: str, *, timeout_s: float) -> None:
        """Record the end and stop beating, once.

        Args:
            outcome: as in `RunEnded`.
            timeout_s: how long to wait until that is on storage.
        """
        if self.process != os.getpid():
            return  # a forked child has no thread that beats, and the attempt is its parent's
        self.ledger.emit(
            RunEnded(step=self.reached.step, outcome=outcome, code=None, newest=self.reached.newest)
        )
        self.ledger.close(timeout_s)

    def _note(self, manifest: Manifest) -> None:
        self.reached.step, self.reached.newest = manifest.step, str(manifest.name)
        self.tidying.note_published(manifest)
        self.fanout.emit(
            CheckpointPublished(
                checkpoint=str(manifest.name),
                step=manifest.step,
                total_bytes=manifest.total_bytes,
                write_s=time.monotonic() - self.began,
                healthy=manifest.health.healthy,
            )
        )


_attempts: dict[str, WriterAttempt] = {}
_lock = threading.Lock()


def attempt_of(token: str, store: Store, *, takeover: bool) -> WriterAttempt:
    """The attempt of a writer, claimed if this process has none for it yet.

    Args:
        token: tells this writer from another one, in whatever process it is used.
        store: the run.
        takeover: go on in a run that another job, or a session, uses.

    Raises:
        ValueError: the folder holds runs.
        RunInUse: another job is alive here, or the newest checkpoint is that of a session.
        UnsupportedFormat: a newer spotsafe wrote the newest.
        StorageError: the store could not say what is there.
    """
    with _lock:
        if token not in _attempts:
            _attempts[token] = _claim(store, takeover=takeover)
        return _attempts[token]


def known_attempt(token: str) -> WriterAttempt:
    """The attempt that this process has claimed for a writer.

    Raises:
        KeyError: it has not.
    """
    return _attempts[token]


def end_attempt(token: str, *, timeout_s: float) -> None:
    """Record the end of a writer's attempt, if this process has claimed one; its saves are refused from then on."""
    attempt = _attempts.get(token)
    if attempt is not None and not attempt.closed:
        attempt.closed = True
        attempt.end("left", timeout_s=timeout_s)


@atexit.register
def _end_all() -> None:
    for token in list(_attempts):
        end_attempt(token, timeout_s=10.0)


def spans_of(files: Iterable[StagedFile], tensors: Iterable[TensorEntry]) -> Iterator[HealthSpan]:
    """All bytes of a rank's tensors that may hold a NaN, for `spotsafe.writer.health.scan`."""
    offsets = {file.name: file.arena_offset for file in files}
    for entry in tensors:
        for piece in entry.slices:
            yield HealthSpan(
                tensor=entry.name,
                arena_offset=offsets[piece.file] + piece.start,
                nbytes=piece.nbytes,
                dtype=entry.dtype,
                role=entry.role,
            )


def _claim(store: Store, *, takeover: bool) -> WriterAttempt:
    clock, identity = SystemClock(), Identity.of_this_process()
    fanout = Fanout([*installed(), LogSink(), Console()])
    refuse_parent(store)
    listing = look(store)
    there = list(candidates(store, listing))
    newest = there[0] if there else None
    if newest is not None and isinstance(newest.fault, UnsupportedFormat):
        raise newest.fault
    occupancy = Occupancy(store, identity=identity, clock=clock, emit=fanout.emit)
    if not takeover:
        _refuse_session(store, there)
        occupancy.check(listing)
    record = claim(
        store,
        listing=listing,
        identity=identity,
        newest_seen=None if newest is None else str(newest.name),
        wall=clock.wall(),
        run=None if newest is None or newest.manifest is None else newest.manifest.run,
        met=(lambda _: None) if takeover else occupancy.check_record,
    )
    alone = not is_exclusive(store, record)
    if alone:
        fanout.emit(SingleWriter(url=store.url, attempt=record.attempt))
    reached = Reached()
    ledger = Ledger(store, record.attempt, clock=clock, emit=fanout.emit, step=lambda: reached.step)
    fanout.add(ledger)
    return WriterAttempt(
        store=store,
        record=record,
        alone=alone,
        fanout=fanout,
        ledger=ledger,
        tidying=Tidying(
            store,
            emit=fanout.emit,
            ended=partial(writes_no_more, store) if alone else None,
            ended_at=partial(ended_at, store),
        ),
        finite_but=_not_finite_before(there),
        reached=reached,
    )


def _refuse_session(store: Store, there: Iterable[Candidate]) -> None:
    newest = next((one.manifest for one in there if one.manifest is not None), None)
    if newest is not None and newest.reason not in _JOINED:
        raise RunInUse(
            f"{store.url} is the run of a session, whose newest checkpoint is {newest.name}. What a SpotsafeWriter "
            "saves there would be newer, and has no positions and random numbers for that program to resume from. Use "
            "another folder, or pass takeover=True"
        )


def _not_finite_before(there: Iterable[Candidate]) -> frozenset[str] | None:
    manifests = (one.manifest for one in there if one.manifest is not None and one.manifest.health.healthy)
    newest = next(manifests, None)
    if newest is None:
        return None
    names = (*newest.health.nonfinite, *newest.health.nonfinite_buffers)
    return frozenset(names) if len(names) < NAMES else None  # a manifest lists no more
