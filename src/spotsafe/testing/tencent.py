"""A stand-in for the metadata service of Tencent's CVM, on 127.0.0.1, that a test or a person can script.

It answers as Tencent's "Querying Instance Metadata" says the real one does, with times in UTC+8 that do not say so.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from spotsafe.clock import Clock
from spotsafe.testing.metadata import Answer, FakeMetadata, Request

TERMINATION = "spot/termination-time"
_ROOT = "/latest/meta-data/"


class FakeTencentMetadata(FakeMetadata):
    """The service of one instance. Use it as a context manager, or `start` and `stop` it.

    Attributes:
        faults: what goes wrong; set its members at any time.
    """

    server = "nginx"
    actions = ("terminate",)

    def __init__(self, *, clock: Clock | None = None, port: int = 0) -> None:
        """Nothing listens yet.

        Args:
            clock: for times in answers, and for what becomes visible later.
            port: to listen on; 0 takes a free one.
        """
        super().__init__(clock=clock, port=port)
        self._values: dict[str, tuple[str, float]] = {}
        self.set_key("instance-id", "ins-spotsafe")

    @property
    def environ(self) -> dict[str, str]:
        """The variable that makes spotsafe ask here. Tencent's own libraries have none."""
        return {"SPOTSAFE_TENCENT_METADATA": self.url}

    def notice(
        self, action: str = "terminate", *, in_seconds: float = 120.0, after_seconds: float = 0.0
    ) -> None:
        """Announce that the instance is taken back.

        Args:
            action: ``terminate``; there is nothing else.
            in_seconds: from now to the end; negative gives the stale time of one that failed.
            after_seconds: from now until it can be seen.
        """
        assert action in self.actions
        zone = timezone(timedelta(hours=8))
        at = datetime.fromtimestamp(self.clock.wall() + in_seconds, tz=zone)
        self.set_key(TERMINATION, at.strftime("%Y-%m-%d %H:%M:%S"), after_seconds=after_seconds)

    def cancel(self) -> None:
        """Take it back."""
        self.set_key(TERMINATION, None)

    def set_key(self, key: str, body: str | None, *, after_seconds: float = 0.0) -> None:
        """Set any key below ``meta-data/``; None removes it, so that it answers 404."""
        with self.lock:
            if body is None:
                self._values.pop(key, None)
            else:
                self._values[key] = body, self.clock.monotonic() + after_seconds

    def answer(self, request: Request) -> Answer | None:
        """What the service in good health says."""
        if request.method not in {"GET", "HEAD"}:
            return Answer(405)
        body, visible_from = self._values.get(request.place.removeprefix(_ROOT), ("", float("inf")))
        if not request.place.startswith(_ROOT) or self.clock.monotonic() < visible_from:
            return Answer(404)
        return Answer(200, body)
