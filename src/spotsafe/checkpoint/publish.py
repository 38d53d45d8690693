"""Publishing: the one place where a checkpoint comes to exist."""

from __future__ import annotations

from dataclasses import dataclass

from spotsafe.checkpoint import manifest as manifest_format
from spotsafe.checkpoint.attempts import attempt_exists, encode_mark, newer_attempt
from spotsafe.checkpoint.layout import CheckpointName, attempt_published
from spotsafe.checkpoint.manifest import Manifest, Marker, encode_manifest
from spotsafe.errors import DamagedCheckpoint, StorageNotFound, StorageUnavailable
from spotsafe.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOutcome:
    """How it went. Nothing may be deleted unless `may_delete`."""

    published: bool
    superseded_by: int | None
    """A newer attempt that exists, if one was seen."""
    trouble: Exception | None = None
    """What failed after the manifest was there. The checkpoint exists all the same."""

    @property
    def may_delete(self) -> bool:
        """Whether this attempt is known to have been the newest after its manifest was there."""
        return self.published and self.superseded_by is None and self.trouble is None


def publish(
    store: Store, manifest: Manifest, *, mark: bool = True, single_writer: bool = False
) -> PublishOutcome:
    """Make a checkpoint exist whose data and indexes are all durable (rule 4).

    A superseded attempt still publishes what it has completely staged; it deletes nothing and then ends. Only what
    refers to files of other checkpoints is not published once a newer attempt has published, for that one may have
    begun to delete such files. Before it begins, it decides the name of every save that it sees: if there is no mark
    of its publish yet, it will see this one, whose index is there.

    Args:
        store: the run.
        manifest: the checkpoint.
        mark: leave the trace of the attempt's first publish; false if it is known to be there.
        single_writer: the store has no create-if-absent, so that our own record may have been taken from us.

    Returns:
        The outcome. From the moment the manifest exists nothing is raised: what fails later is its `trouble`.

    Raises:
        StorageError: it is not known whether the manifest was created. If it was, the checkpoint is whole.
        DamagedCheckpoint: something that is neither ours nor a marker lies under the manifest's name.
    """
    nonce = manifest.nonce if single_writer else None
    newer = newer_attempt(store, manifest.attempt, nonce=nonce)
    if newer is not None and manifest.references and _has_published(store, newer):
        return PublishOutcome(published=False, superseded_by=newer)
    if not _create_manifest(store, manifest):
        # Only the gc of a newer attempt decides this name against its owner.
        return PublishOutcome(published=False, superseded_by=manifest.attempt + 1)
    try:
        if mark:
            _mark_published(store, manifest)
        newer = newer_attempt(store, manifest.attempt, nonce=nonce)
    except Exception as error:  # noqa: BLE001 - whatever fails now, the checkpoint exists and must be told so
        return PublishOutcome(published=True, superseded_by=newer, trouble=error)
    return PublishOutcome(published=True, superseded_by=newer)


def _has_published(store: Store, attempt: int) -> bool:
    """Whether this attempt or one after it has left the mark of its first publish. By keys: a listing may be old."""
    while attempt_exists(store, attempt):
        try:
            store.size(attempt_published(attempt))
        except StorageNotFound:
            attempt += 1
        else:
            return True
    return False


def _create_manifest(store: Store, manifest: Manifest) -> bool:
    """Create the manifest if nothing is under its name; false if gc has abandoned the checkpoint."""
    data = encode_manifest(manifest)
    # ------------------------------------------------------------------------------------------------------
    # MANIFEST LAST. Before this line the checkpoint does not exist; after it, it does. Every file that it
    # names must be durable by now, and nothing but this line may ever create a manifest. Do not move it, do
    # not call it earlier, do not make it a `put` or a `replace`: each of these loses or tears checkpoints.
    # ------------------------------------------------------------------------------------------------------
    if store.create(manifest.name.manifest, data):
        return True
    return _is_ours(store, manifest.name, data)


def _is_ours(store: Store, name: CheckpointName, data: bytes) -> bool:
    try:
        found = store.read(name.manifest, max_bytes=manifest_format.MAX_BYTES)
    except StorageNotFound as error:
        raise StorageUnavailable(
            f"{name.manifest}: the store says both that it exists and that it does not", path=name.manifest
        ) from error
    if found == data:
        return True
    if isinstance(manifest_format.decode(found, expected=name), Marker):
        return False
    reason = "another manifest lies there, although its name is ours alone; do two programs share one nonce?"
    raise DamagedCheckpoint(checkpoint=str(name), file="manifest.json", reason=reason)


def _mark_published(store: Store, manifest: Manifest) -> None:
    """Leave a trace that outlives the checkpoint: a later start that sees none knows that one was there."""
    store.create(attempt_published(manifest.attempt), encode_mark(manifest.name, run=manifest.run))
