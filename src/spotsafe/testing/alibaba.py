"""A stand-in for the metadata service of Alibaba's ECS, on 127.0.0.1, that a test or a person can script.

It answers as Alibaba's "View instance metadata" says the real one does, in the normal mode or the hardened one.
"""

from __future__ import annotations

from datetime import datetime, timezone

from spotsafe.clock import Clock
from spotsafe.testing.tokens import FakeTokenMetadata

TERMINATION = "instance/spot/termination-time"


class FakeAlibabaMetadata(FakeTokenMetadata):
    """The service of one instance. Use it as a context manager, or `start` and `stop` it.

    Attributes:
        faults: what goes wrong; set its members at any time.
    """

    server = "metadata"
    actions = ("terminate",)
    token_header = "X-aliyun-ecs-metadata-token"  # noqa: S105 - a header's name
    ttl_header = "X-aliyun-ecs-metadata-token-ttl-seconds"

    def __init__(self, *, clock: Clock | None = None, tokens_required: bool = False, port: int = 0) -> None:
        """Nothing listens yet.

        Args:
            clock: for times in answers, for token lifetimes and for what becomes visible later.
            tokens_required: the hardened mode; False is the normal one, which answers without a token, too.
            port: to listen on; 0 takes a free one.
        """
        super().__init__(clock=clock, tokens_required=tokens_required, port=port)
        self.set_key("instance-id", "i-spotsafefake")

    @property
    def environ(self) -> dict[str, str]:
        """The variable that makes spotsafe ask here. Alibaba's own libraries have none."""
        return {"SPOTSAFE_ALIBABA_METADATA": self.url}

    def notice(
        self, action: str = "terminate", *, in_seconds: float = 300.0, after_seconds: float = 0.0
    ) -> None:
        """Announce the release of the instance.

        Args:
            action: ``terminate``; there is nothing else.
            in_seconds: from now to the release; negative gives the stale time of one that failed.
            after_seconds: from now until it can be seen.
        """
        assert action in self.actions
        at = datetime.fromtimestamp(self.clock.wall() + in_seconds, tz=timezone.utc)
        self.set_key(TERMINATION, at.strftime("%Y-%m-%dT%H:%M:%SZ"), after_seconds=after_seconds)

    def cancel(self) -> None:
        """Take it back."""
        self.set_key(TERMINATION, None)
