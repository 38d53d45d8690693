"""The suite of every store, on real servers and by the clients that people use."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from spotsafe.errors import StorageExists, StorageNotFound
from spotsafe.storage.remote import FsspecStore
from spotsafe.storage.store import Store
from spotsafe.testing.stores import MEBIBYTE, StoreConformance, pattern_bytes
from tests.servers import Server

pytestmark = pytest.mark.slow


@cache
def botocore_session() -> Any:
    """What botocore reads from its files, for half a second, is the same for all stores."""
    from aiobotocore.session import AioSession

    return AioSession()


def new_store(server: Server, **options: Any) -> FsspecStore:
    """An empty store on a server."""
    if server.root.startswith("s3:"):
        options["session"] = botocore_session()
    return FsspecStore(server.url(f"{uuid.uuid4().hex}/run"), **server.options, **options)


def fresh(server: Server) -> Iterator[FsspecStore]:
    """An empty store on a server, closed after the test."""
    store = new_store(server)
    yield store
    store.close()


class TestS3(StoreConformance):
    """SeaweedFS, by s3fs."""

    unkept_names = ("back\\slash",)  # SeaweedFS takes it for a slash
    races = 4  # writers of one key wait for each other, for seconds

    @pytest.fixture
    def store(self, seaweedfs: Server) -> Iterator[Store]:
        yield from fresh(seaweedfs)


class TestGoogle(StoreConformance):
    """fake-gcs-server, by gcsfs."""

    @pytest.fixture
    def store(self, fake_gcs: Server) -> Iterator[Store]:
        yield from fresh(fake_gcs)


class TestAzure(StoreConformance):
    """azurite, by adlfs."""

    unkept_names = ("back\\slash", "what?")
    races = 10

    @pytest.fixture
    def store(self, azurite: Server) -> Iterator[Store]:
        yield from fresh(azurite)


def no_look(*_args: object, **_kwargs: object) -> None:
    raise StorageNotFound("not looked")


@pytest.mark.parametrize("fixture", ["seaweedfs", "fake_gcs", "azurite"])
def test_the_server_itself_refuses_a_second_object(
    fixture: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new object is written under a condition, small or large; to look first would lose a race."""
    store = new_store(request.getfixturevalue(fixture))
    large = memoryview(pattern_bytes(33 * MEBIBYTE))
    store.put("small", b"first")
    store.put("large", b"first")
    monkeypatch.setattr(store, "size", no_look)
    for path, data in (("small", b"second"), ("large", large)):
        with pytest.raises(StorageExists):
            store._write_new(path, data)
    monkeypatch.undo()
    assert [entry.size for entry in store.list("")] == [5, 5]
    assert store.begun("") == []
    store.close()
