"""Publishing: a checkpoint exists from one instant on, and whoever is superseded finds out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from spotsafe.checkpoint.attempts import encode_record
from spotsafe.checkpoint.layout import CheckpointName, attempt_published, attempt_record
from spotsafe.checkpoint.manifest import (
    Health,
    Manifest,
    Marker,
    Part,
    Reference,
    decode,
    encode_manifest,
    encode_marker,
)
from spotsafe.checkpoint.publish import publish
from spotsafe.errors import DamagedCheckpoint, StorageRefused, StorageUnavailable
from spotsafe.storage.store import Store
from spotsafe.testing.faults import CountingStore, FailingStore, LostResponseStore
from spotsafe.testing.memory import MemoryStore
from tests.checkpoint.test_attempts import RECORD

NAME = CheckpointName(3, 300, 41, "7f3a9c21")
MANIFEST = Manifest(
    run="0123abcd",
    attempt=NAME.attempt,
    step=NAME.step,
    save=NAME.save,
    nonce=NAME.nonce,
    parent=None,
    created=1.0,
    world_size=1,
    reason="interval",
    health=Health(healthy=True),
    parts=(Part(rank=0, file="index-00000.json", size=1, sha256="0" * 64),),
)


def claimed(attempt: int) -> Callable[[Store], None]:
    """What makes an attempt exist."""
    return lambda store: store.put(attempt_record(attempt), encode_record(RECORD))


class Between:
    """A store that lets something happen right before or after an operation on a path."""

    def __init__(self, inner: MemoryStore, *, before: str, path: str, act: Callable[[Store], None]) -> None:
        self.inner, self.before, self.path, self.act, self.done = inner, before, path, act, False

    def __call__(self, name: str, path: str, number: int) -> None:
        if (name, path) == (self.before, self.path) and not self.done:
            self.done = True
            self.act(self.inner)


def test_order_of_operations() -> None:
    """Look, create the manifest, leave the mark, look again: in this order and nothing else."""
    store = CountingStore(MemoryStore())
    outcome = publish(store, MANIFEST)
    assert [(operation.name, operation.path) for operation in store.operations] == [
        ("read", attempt_record(4)),
        ("create", NAME.manifest),
        ("create", attempt_published(3)),
        ("read", attempt_record(4)),
    ]
    assert outcome.published
    assert outcome.may_delete


def test_manifest_is_what_was_given() -> None:
    """What lies there decodes to the manifest, and the mark names the checkpoint."""
    store = MemoryStore()
    publish(store, MANIFEST)
    assert decode(store.objects[NAME.manifest], expected=NAME) == MANIFEST
    assert store.objects[attempt_published(3)].startswith(str(NAME).encode())


def test_mark_is_left_out_on_request() -> None:
    """Later publishes of the attempt need no mark."""
    store = MemoryStore()
    assert publish(store, MANIFEST, mark=False).may_delete
    assert attempt_published(3) not in store.objects


@pytest.mark.parametrize(
    ("before", "path"),
    [
        pytest.param("read", attempt_record(4), id="before the first look"),
        pytest.param("create", NAME.manifest, id="between look and creation"),
        pytest.param("create", attempt_published(3), id="after the creation"),
    ],
)
def test_superseded_attempt_publishes_and_may_not_delete(before: str, path: str) -> None:
    """Whenever the newer attempt appears, what is staged is published and nothing may be deleted."""
    inner = MemoryStore()
    store = FailingStore(inner, fail=Between(inner, before=before, path=path, act=claimed(4)))
    outcome = publish(store, MANIFEST)
    assert outcome.published
    assert outcome.superseded_by == 4
    assert not outcome.may_delete
    assert NAME.manifest in inner.objects


def test_a_newer_attempt_after_the_second_look_is_not_seen() -> None:
    """The rule promises no more than the second look: what comes later is the newer one's own business."""
    store = MemoryStore()
    outcome = publish(store, MANIFEST)
    claimed(4)(store)
    assert outcome.may_delete


def test_abandoned_checkpoint_is_not_published() -> None:
    """Where gc has decided the name, the checkpoint never comes to exist and its writer is superseded."""
    store = MemoryStore()
    marker = encode_marker(Marker(state="abandoned"))
    store.put(NAME.manifest, marker)
    outcome = publish(store, MANIFEST)
    assert (outcome.published, outcome.superseded_by, outcome.may_delete) == (False, 4, False)
    assert store.objects[NAME.manifest] == marker
    assert attempt_published(3) not in store.objects


def test_own_manifest_there_already_is_success() -> None:
    """A manifest equal to ours was created by us, whatever the store answered."""

    class Forgetful(MemoryStore):
        """Says that it exists, even if it is the same."""

        def create(self, path: str, data: bytes) -> bool:
            super().create(path, data)
            return path != NAME.manifest

    assert publish(Forgetful(), MANIFEST).may_delete


def test_another_manifest_under_our_name_is_an_error() -> None:
    """Two writers of one nonce are a fault that is said aloud."""
    store = MemoryStore()
    other = Manifest(**{**{f: getattr(MANIFEST, f) for f in Manifest.__slots__}, "reason": "asked"})
    store.put(NAME.manifest, encode_manifest(other))
    with pytest.raises(DamagedCheckpoint, match="another manifest"):
        publish(store, MANIFEST)


def test_garbage_under_our_name_is_an_error() -> None:
    """Something unreadable under the manifest's name is never taken for a publish."""
    store = MemoryStore()
    store.put(NAME.manifest, b"garbage")
    with pytest.raises(DamagedCheckpoint):
        publish(store, MANIFEST)


def test_store_that_contradicts_itself() -> None:
    """'It exists' and 'there is none' about one object is no answer."""

    class Liar(MemoryStore):
        """Refuses to create what does not exist."""

        def create(self, path: str, data: bytes) -> bool:
            return False

    with pytest.raises(StorageUnavailable, match="both"):
        publish(Liar(), MANIFEST)


def test_failed_first_look_publishes_nothing() -> None:
    """Without an answer to the first look the manifest is not created."""
    inner = MemoryStore()
    store = FailingStore(
        inner, fail=lambda name, path, number: StorageUnavailable("down") if number == 1 else None
    )
    with pytest.raises(StorageUnavailable):
        publish(store, MANIFEST)
    assert inner.objects == {}


def test_unknown_answer_of_the_creation_is_raised() -> None:
    """If nobody knows whether the manifest was created, that is an error; the checkpoint is whole."""
    inner = MemoryStore()
    with pytest.raises(StorageUnavailable):
        publish(LostResponseStore(inner), MANIFEST)
    assert decode(inner.objects[NAME.manifest], expected=NAME) == MANIFEST


@pytest.mark.parametrize("number", [3, 4])
@pytest.mark.parametrize("error", [StorageUnavailable("down"), StorageRefused("no"), MemoryError()])
def test_what_fails_after_the_manifest_is_trouble(number: int, error: Exception) -> None:
    """Once the manifest exists nothing is raised: the outcome says published, and forbids to delete."""
    inner = MemoryStore()
    store = FailingStore(inner, fail=lambda name, path, count: error if count == number else None)
    outcome = publish(store, MANIFEST)
    assert outcome.published
    assert outcome.trouble is error
    assert not outcome.may_delete
    assert NAME.manifest in inner.objects


def test_trouble_does_not_hide_a_newer_attempt() -> None:
    """What the first look saw is kept when the second one fails."""
    inner = MemoryStore()
    claimed(4)(inner)
    store = FailingStore(
        inner, fail=lambda name, path, count: StorageUnavailable("x") if count == 4 else None
    )
    outcome = publish(store, MANIFEST)
    assert outcome.superseded_by == 4


LENT = replace(
    MANIFEST,
    references=(
        Reference(checkpoint="a000002-s000000100-0001-89abcdef", file="frozen-00000-000.safetensors", size=1),
    ),
)


def has_published(attempt: int) -> Callable[[Store], None]:
    """What an attempt leaves at its first publish."""
    return lambda store: store.put(attempt_published(attempt), b"somebody")


@pytest.mark.parametrize("by", [4, 5])
def test_a_superseded_attempt_does_not_refer_to_what_a_newer_one_may_delete(by: int) -> None:
    """As soon as any newer attempt has published, it may be deleting; the save is given up, and nothing is left."""
    store = MemoryStore()
    for attempt in (3, 4, 5):
        claimed(attempt)(store)
    has_published(by)(store)
    before = dict(store.objects)
    outcome = publish(store, LENT)
    assert (outcome.published, outcome.superseded_by, outcome.may_delete) == (False, 4, False)
    assert store.objects == before
    assert publish(store, MANIFEST).published, "what refers to nothing may be published"


def test_a_superseded_attempt_refers_while_nobody_has_published() -> None:
    """Who has not published yet deletes nothing, and will see this checkpoint before it does."""
    store = MemoryStore()
    for attempt in (3, 4, 5):
        claimed(attempt)(store)
    has_published(3)(store)
    outcome = publish(store, LENT)
    assert (outcome.published, outcome.superseded_by) == (True, 4)


@pytest.mark.parametrize("path", [attempt_published(4), attempt_record(5)])
def test_whether_a_newer_attempt_published_has_to_be_known(path: str) -> None:
    """No answer is not "no"."""
    store = MemoryStore()
    claimed(4)(store)
    failing = FailingStore(
        store, fail=lambda name, at, number: StorageUnavailable("down") if at == path else None
    )
    with pytest.raises(StorageUnavailable):
        publish(failing, LENT)
    assert NAME.manifest not in store.objects
