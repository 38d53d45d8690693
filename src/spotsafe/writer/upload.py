"""Writing one staged save: data, index, manifest, in this order, and then what retention takes away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import Any

from spotsafe.checkpoint import gc
from spotsafe.checkpoint.attempts import newer_attempt
from spotsafe.checkpoint.digest import BLOCK, block_digests, sha256_hex
from spotsafe.checkpoint.index import EncodedIndex, FileEntry, Index, encode_index
from spotsafe.checkpoint.layout import CheckpointName, index_file
from spotsafe.checkpoint.manifest import Health, Manifest, Part, Reference
from spotsafe.checkpoint.markers import EndedAt
from spotsafe.checkpoint.publish import publish
from spotsafe.errors import SpotsafeError, StorageError, StorageNotFound, WriterDied
from spotsafe.events import (
    AttemptSuperseded,
    CheckpointPublished,
    Event,
    FileWritten,
    IndexWritten,
    SaveFailed,
)
from spotsafe.storage.store import Store
from spotsafe.writer.beside import WORTH_IT, Begin, beside
from spotsafe.writer.copied import CopyFailed, Staging
from spotsafe.writer.examining import Examined, examine, spans_by_file
from spotsafe.writer.health import Scan
from spotsafe.writer.job import FrozenFile, SaveJob, SaveResult, StagedFile
from spotsafe.writer.lending import Lender
from spotsafe.writer.tidying import Tidying

Emit = Callable[[Event], object]

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Progress:
    """How far a save has come; what is known of it when something fails."""

    started: float
    write_s: float = 0.0
    healthy: bool = True
    manifest_tried: bool = False
    published: bool = False
    superseded_by: int | None = None
    error: BaseException | None = None
    abandoned: bool = False
    written: int = 0
    frozen: tuple[FileEntry, ...] = ()


class Uploader:
    """Writes the saves of one attempt, one after another, and remembers what need not be done twice.

    Args:
        store: the run.
        emit: is told of everything that happens.
        monotonic: seconds that never go back.
        ended: see `Tidying`; without it the store is taken for one that refuses to create what is there.
        ended_at: see `Tidying`.
    """

    def __init__(
        self,
        store: Store,
        *,
        emit: Emit,
        monotonic: Callable[[], float],
        ended: Callable[[int], bool] | None = None,
        ended_at: EndedAt | None = None,
    ) -> None:
        self._store = store
        self._alone = ended is not None
        self._emit = emit
        self._monotonic = monotonic
        self._lender = Lender(store)
        self._encoded = EncodedIndex()
        self._tidying = Tidying(store, emit=emit, ended=ended, ended_at=ended_at)
        self._marked = self._superseded = False

    @property
    def undecided(self) -> bool:
        """See `Tidying.undecided`."""
        return self._tidying.undecided

    def note_lost(self, name: CheckpointName) -> None:
        """Another writer of this attempt died over a save: nobody knows how far it came, not even whether it exists."""
        self._tidying.note_failed(name, manifest_tried=True, error=WriterDied(f"{name}: its writer died"))

    def run(
        self,
        job: SaveJob,
        arena: memoryview,
        frozen: memoryview | None = None,
        staging: Staging | None = None,
    ) -> SaveResult:
        """Make the checkpoint exist, then apply retention if this attempt is the newest.

        Args:
            job: what to write.
            arena: the staged bytes; they must not change until this returns.
            frozen: those of frozen tensors, if any were staged.
            staging: if the arena is still being filled: how far that is. A file is written when all of it is there.

        Returns:
            How it ended. Nothing is raised. With `published` an `error` is what failed after the checkpoint
            was there, and costs nothing but garbage. Without it, the checkpoint does not count as saved;
            earlier ones are untouched.
        """
        progress = _Progress(started=self._monotonic())
        try:
            self._save(job, arena, frozen, staging, progress)
        except CopyFailed as error:
            progress.abandoned = True
            self._tidying.note_failed(job.name, manifest_tried=False, error=error)
        except BaseException as error:  # noqa: BLE001 - MemoryError too: training goes on whatever happens here
            expected = isinstance(error, SpotsafeError)
            _log.log(logging.DEBUG if expected else logging.ERROR, "save %s failed", job.name, exc_info=True)
            progress.error = _without_tracebacks(error)
        if isinstance(progress.error, StorageNotFound) and not progress.manifest_tried:
            self._ask_who_took(job, progress)
        if progress.error is not None:
            self._report(job, progress, progress.error)
        return SaveResult(
            name=job.name,
            published=progress.published,
            healthy=progress.healthy,
            total_bytes=progress.written,
            write_s=progress.write_s or self._monotonic() - progress.started,
            superseded_by=progress.superseded_by,
            error=progress.error,
            abandoned=progress.abandoned,
            frozen=progress.frozen,
        )

    def _save(
        self,
        job: SaveJob,
        arena: memoryview,
        frozen: memoryview | None,
        staging: Staging | None,
        progress: _Progress,
    ) -> None:
        found = (
            self._write_pieces(job, arena, staging)
            if job.streamed and staging is not None
            else self._write_files(job, arena, frozen, staging, progress)
        )
        health = _all(one.scan for one in found).health(before=job.nonfinite_before)
        own = [
            FileEntry(name=file.name, size=file.size, digests=one.digests)
            for file, one in zip(job.files, found, strict=True)
        ]
        progress.healthy = health.healthy
        files = (*own, *progress.frozen)
        own += [file for file in progress.frozen if file.checkpoint is None]
        progress.written = sum(file.size for file in own)
        part = self._write_index(job, files)
        self._confirm(job, own, part)
        self._publish(job, _manifest(job, health, part, files), progress)

    def _write_files(
        self,
        job: SaveJob,
        arena: memoryview,
        frozen: memoryview | None,
        staging: Staging | None,
        progress: _Progress,
    ) -> list[Examined]:
        staged = [(file, _staged(file, arena)) for file in job.files]
        idle = [(file, _staged_frozen(file, frozen)) for file in job.frozen]
        size = sum(len(data) for _, data in (*staged, *idle) if data is not None)
        with beside(size if staging is None else max(size, WORTH_IT)) as at_once:
            begin = _after_the_copy(at_once, staging)
            examined = [
                begin(partial(examine, file, arena=arena, spans=spans))
                for file, spans in spans_by_file(job.files, job.health)
            ]
            idle_digests = [None if data is None else begin(partial(block_digests, data)) for _, data in idle]
            for file, data in staged:
                if staging is not None:
                    _wait_for(file, job, staging)
                self._write_file(job, file.name, data)
            progress.frozen = tuple(
                self._place_frozen(job, file, data, None if digest is None else digest.result())
                for (file, data), digest in zip(idle, idle_digests, strict=True)
            )
            return [one.result() for one in examined]

    def _write_pieces(self, job: SaveJob, arena: memoryview, staging: Staging) -> list[Examined]:
        """Write files that lie in the arena one after the other; each makes room for the next."""
        found: list[Examined] = []
        with beside(WORTH_IT) as begin:
            for file, spans in spans_by_file(job.files, job.health):
                here = replace(file, arena_offset=0)
                inside = [one._replace(arena_offset=one.arena_offset - file.arena_offset) for one in spans]
                _wait_for(file, job, staging)
                look = begin(partial(examine, here, arena=arena, spans=inside))
                self._write_file(job, file.name, _staged(here, arena))
                found.append(look.result())
                staging.written(file.arena_offset + file.size)
        return found

    def _write_file(self, job: SaveJob, name: str, data: memoryview) -> None:
        self._store.put_large(job.name.file(name), data)
        self._emit(FileWritten(checkpoint=str(job.name), file=name, total_bytes=len(data)))

    def _place_frozen(
        self, job: SaveJob, file: FrozenFile, data: memoryview | None, digests: tuple[str, ...] | None
    ) -> FileEntry:
        """Refer to a file that is there already, if that is allowed and its bytes are these; else write it."""
        lent = self._lender.lent(file, digests)
        if lent is not None:
            return lent
        assert data is not None, "what is not at hand is lent, or an error"
        assert digests is not None, "what is at hand was digested"
        self._write_file(job, file.name, data)
        return FileEntry(name=file.name, size=file.size, digests=digests)

    def _write_index(self, job: SaveJob, files: tuple[FileEntry, ...]) -> Part:
        index = Index(
            rank=job.rank,
            block_size=BLOCK,
            files=files,
            tensors=job.tensors,
            state=job.state,
            session=job.session,
        )
        data = encode_index(index, last=self._encoded)
        part = Part(rank=job.rank, file=index_file(job.rank), size=len(data), sha256=sha256_hex(data))
        self._store.put(job.name.file(part.file), data)
        self._emit(IndexWritten(checkpoint=str(job.name), file=part.file))
        return part

    def _confirm(self, job: SaveJob, files: Sequence[FileEntry], part: Part) -> None:
        """Ask the store for the sizes: some confirm a write and keep a shorter object."""
        for name, size in [*((file.name, file.size) for file in files), (part.file, part.size)]:
            path = job.name.file(name)
            found = self._store.size(path)
            if found != size:
                raise StorageError(f"{path} has {found} bytes after {size} were written to it", path=path)

    def _publish(self, job: SaveJob, manifest: Manifest, progress: _Progress) -> None:
        progress.manifest_tried = True
        outcome = publish(self._store, manifest, mark=not self._marked, single_writer=self._alone)
        progress.published = outcome.published
        progress.superseded_by = outcome.superseded_by
        progress.write_s = self._monotonic() - progress.started
        if outcome.published:
            self._marked = self._marked or outcome.trouble is None
            self._tidying.note_published(manifest)
            self._lender.note_published(job.name)
            self._emit(
                CheckpointPublished(
                    checkpoint=str(job.name),
                    step=job.name.step,
                    total_bytes=manifest.total_bytes,
                    write_s=progress.write_s,
                    healthy=progress.healthy,
                )
            )
        if outcome.superseded_by is not None:
            self._tell_superseded(job, outcome.superseded_by)
        if outcome.trouble is not None:
            raise outcome.trouble
        if outcome.may_delete:
            self._tidying.after_publish(
                job.name,
                now=job.created,
                retention=gc.Retention(
                    keep=job.keep,
                    resumed_from=job.resumed_from,
                    passed_over=job.passed_over,
                    rollbacks=job.rollbacks,
                ),
            )

    def _ask_who_took(self, job: SaveJob, progress: _Progress) -> None:
        """A file of ours is gone. The sweep of a newer attempt takes what is not published yet: was it that?"""
        try:
            newer = newer_attempt(
                self._store, job.name.attempt, nonce=job.name.nonce if self._alone else None
            )
        except SpotsafeError:  # what is known already is told
            return
        if newer is not None:
            progress.error, progress.superseded_by = None, newer
            self._tell_superseded(job, newer)

    def _tell_superseded(self, job: SaveJob, newer: int) -> None:
        """Once: another save may have been behind the one that found it out."""
        if not self._superseded:
            self._superseded = True
            self._emit(AttemptSuperseded(attempt=job.name.attempt, newer=newer))

    def _report(self, job: SaveJob, progress: _Progress, error: BaseException) -> None:
        text = str(error) or type(error).__name__
        if progress.published:
            self._tidying.tell_failure(job.name, error)
            return
        self._emit(SaveFailed(checkpoint=str(job.name), step=job.name.step, error=text))
        if isinstance(error, Exception):
            self._tidying.note_failed(job.name, manifest_tried=progress.manifest_tried, error=error)


def _all(scans: Iterable[Scan]) -> Scan:
    return reduce(or_, scans, Scan(state=frozenset(), buffers=frozenset()))


def _wait_for(file: StagedFile, job: SaveJob, staging: Staging) -> None:
    """Until the file is there. With the last one it is known that the copy was not given up."""
    staging.wait(None if file is job.files[-1] else file.arena_offset + file.size)


def _after_the_copy(begin: Begin, staging: Staging | None) -> Begin:
    """Training waits for the copy, so nothing that takes processor time runs beside it; writing takes little."""
    if staging is None:
        return begin
    copy = staging

    def begin_later(work: Callable[[], Any]) -> Future[Any]:
        def wait_and_work() -> Any:
            copy.wait()
            return work()

        return begin(wait_and_work)

    return begin_later


def _staged_frozen(file: FrozenFile, frozen: memoryview | None) -> memoryview | None:
    if file.arena_offset is None or frozen is None:
        return None
    return _staged(StagedFile(name=file.name, arena_offset=file.arena_offset, size=file.size), frozen)


def _staged(file: StagedFile, arena: memoryview) -> memoryview:
    staged = arena[file.arena_offset : file.arena_offset + file.size]
    if len(staged) != file.size:
        raise ValueError(f"{file.name}: {file.size} bytes at {file.arena_offset} are outside the arena")
    return staged


def _manifest(job: SaveJob, health: Health, part: Part, files: Sequence[FileEntry]) -> Manifest:
    return Manifest(
        run=job.run,
        attempt=job.name.attempt,
        step=job.name.step,
        save=job.name.save,
        nonce=job.name.nonce,
        parent=job.parent,
        created=job.created,
        world_size=job.world_size,
        reason=job.reason,
        health=health,
        metrics=job.metrics,
        parts=(part,),
        total_bytes=sum(file.size for file in files if file.checkpoint is None),
        references=tuple(
            Reference(checkpoint=file.checkpoint, file=file.name, size=file.size)
            for file in files
            if file.checkpoint is not None
        ),
    )


def _without_tracebacks(error: BaseException) -> BaseException:
    """Let go of the frames, whose variables hold the arena and copies of the index. They have been logged."""
    link: BaseException | None = error
    while link is not None and link.__traceback__ is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
