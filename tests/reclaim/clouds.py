"""What the tests of all clouds' watchers share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from spotsafe.errors import WatcherUnavailable
from spotsafe.testing.metadata import FakeMetadata
from spotsafe.testing.watchers import WatcherConformance

PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
"""Variables by which clients find a proxy."""


class CloudConformance(WatcherConformance):
    """Of a cloud whose service can be gone."""

    make_fake: ClassVar[Callable[[], FakeMetadata]]
    fake: FakeMetadata

    @pytest.fixture(autouse=True)
    def world(self) -> Iterator[None]:
        with type(self).make_fake() as self.fake:
            yield

    def quiet(self) -> None:
        self.fake.start()
        self.fake.cancel()

    def announce(self) -> None:
        self.fake.start()
        self.fake.notice(self.fake.actions[0])

    def break_(self) -> None:
        self.fake.stop()


class ServerErrors(CloudConformance):
    """The same of one that answers, but with errors. Goes before the other base class."""

    def quiet(self) -> None:
        self.fake.faults.refuse_all = None
        super().quiet()

    def announce(self) -> None:
        self.fake.faults.refuse_all = None
        super().announce()

    def break_(self) -> None:
        self.fake.faults.refuse_all = 503


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Begin a call; what is returned waits for its end, and gives what it gave."""
    ended: list[tuple[Any, WatcherUnavailable | None]] = []

    def run() -> None:
        try:
            ended.append((call(), None))
        except WatcherUnavailable as error:
            ended.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join(60)
        assert ended, "it still waits"
        value, error = ended[0]
        if error is not None:
            raise error
        return value

    return wait


def send_through_a_proxy(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Set every variable by which clients find a proxy, and none that exempts this machine from it."""
    for name in PROXIES:
        monkeypatch.setenv(name, url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
