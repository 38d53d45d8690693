"""Where runs lie whose steps are crashed: a folder of this machine, and a bucket of a real S3 server.

Both know how to put a run there as it was before a life, and how to make its steps go wrong, at two levels: the
operations of a store, and what those consist of.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, Protocol
from unittest import mock

import botocore.endpoint

from spotsafe.storage import parts, s3_client, s3_transfer
from spotsafe.storage.local import LocalStore
from spotsafe.storage.paths import temporary_name
from spotsafe.storage.s3 import S3Store
from spotsafe.storage.s3_client import Bucket
from spotsafe.storage.store import Store
from tests.crashes.lives import PART, Before
from tests.crashes.steps import Operations, Steps, Wire, system_calls
from tests.servers import BUCKET, KEY, SECRET

Level = Literal["operations", "inside"]


class Place(Protocol):
    """Where runs lie."""

    name: str
    inside: str
    """What an operation consists of here."""
    made: dict[tuple[str, Level], list[str]]
    """The steps of whole lives, which are the same each time."""

    def lay(self, before: Before) -> Store:
        """A new run as it was before a life. The last one laid here is gone: of all of them there is no room."""
        ...

    def faulty(self, store: Store, level: Level, steps: Steps) -> AbstractContextManager[Store]:
        """The run as a process sees it whose steps go wrong."""
        ...


class Disk:
    """Folders below one folder.

    Args:
        folder: an empty one.
    """

    name = "local disk"
    inside = "system call that changes the disk"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.made: dict[tuple[str, Level], list[str]] = {}

    def lay(self, before: Before) -> LocalStore:
        for old in self._folder.glob("run-*"):
            shutil.rmtree(old)
        root = self._folder / f"run-{uuid.uuid4().hex}"
        begun = Path(before.begun).with_name(temporary_name())
        for path, data in {**before.objects, str(begun): b"half of it"}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        return LocalStore(root)

    @contextmanager
    def faulty(self, store: Store, level: Level, steps: Steps) -> Iterator[Store]:
        if level == "operations":
            yield Operations(store, steps)
            return
        with system_calls(store, steps) as watched:
            yield watched


class SmallParts(S3Store):
    """Cuts small objects too."""

    def _is_large(self, size: int) -> bool:
        return size > PART


class Seaweed:
    """Prefixes in a bucket, all by one client that sends one part after the other.

    Args:
        endpoint: of a real server.

    Attributes:
        endpoint: the same.
    """

    name = "SeaweedFS"
    inside = "request"

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._options = {
            "endpoint_url": endpoint,
            "aws_access_key_id": KEY,
            "aws_secret_access_key": SECRET,
            "region_name": "us-east-1",
        }
        self.made: dict[tuple[str, Level], list[str]] = {}
        self._last: str | None = None
        self._bucket = Bucket(BUCKET, self._options)
        with mock.patch.object(s3_client, "CONNECTIONS", 1):
            self._client = self._bucket.live().client
        sender = self._client._endpoint
        self._wire = sender.http_session = Wire(sender.http_session)

    def lay(self, before: Before) -> S3Store:
        if self._last is not None:
            paths = [{"Key": f"{self._last}/{entry.path}"} for entry in self.store(self._last).list("")]
            self._client.delete_objects(Bucket=BUCKET, Delete={"Objects": paths, "Quiet": True})
        run = self._last = uuid.uuid4().hex
        put = partial(self._client.put_object, Bucket=BUCKET)
        with ThreadPoolExecutor(4) as pool:
            tuple(pool.map(lambda one: put(Key=f"{run}/{one[0]}", Body=one[1]), before.objects.items()))
        where = {"Bucket": BUCKET, "Key": f"{run}/{before.begun}"}
        upload = self._client.create_multipart_upload(**where)["UploadId"]
        self._client.upload_part(**where, UploadId=upload, PartNumber=1, Body=b"half of it")
        return self.store(run)

    def store(self, run: str) -> S3Store:
        """The run below a prefix."""
        store = SmallParts(f"s3://{BUCKET}/{run}", **self._options)
        store._bucket = self._bucket
        return store

    @contextmanager
    def faulty(self, store: Store, level: Level, steps: Steps) -> Iterator[Store]:
        at_once = SimpleNamespace(sleep=lambda _seconds: None)
        with (
            mock.patch.object(s3_transfer, "cut", partial(parts.cut, piece=PART)),
            mock.patch.object(botocore.endpoint, "time", at_once),
        ):
            if level == "operations":
                yield Operations(store, steps)
                return
            self._wire.steps = steps
            try:
                yield store
            finally:
                self._wire.steps = Steps()

    def close(self) -> None:
        """The client's connections and thread."""
        self._bucket.live().pool.shutdown()
        self._client.close()
