"""A stand-in for the EC2 instance metadata service, on 127.0.0.1, that a test or a person can script.

::

    with FakeAwsMetadata() as aws:
        process = subprocess.Popen([sys.executable, "train.py"], env={**os.environ, **aws.environ})
        aws.notice("terminate", in_seconds=120)

It answers as the Amazon EC2 User Guide says the real one does ("Use the Instance Metadata Service to access
instance metadata", "Spot Instance interruption notices"), and fails on demand in the ways it has been seen to
fail. Standard library only.
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone

from spotsafe.clock import Clock
from spotsafe.testing.tokens import FakeTokenMetadata

TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105 - a header's name

INSTANCE_ACTION = "spot/instance-action"
TERMINATION_TIME = "spot/termination-time"
REBALANCE = "events/recommendations/rebalance"
LIFE_CYCLE = "instance-life-cycle"


class FakeAwsMetadata(FakeTokenMetadata):
    """The service of one instance. Use it as a context manager, or `start` and `stop` it.

    Attributes:
        faults: what goes wrong; set its members at any time.
    """

    server = "EC2ws"
    actions = ("terminate", "stop", "hibernate")
    token_header, ttl_header = TOKEN_HEADER, TTL_HEADER
    keys_below = re.compile(r"/(?:latest|\d{4}-\d\d-\d\d)/meta-data/(.+)")

    def __init__(self, *, clock: Clock | None = None, tokens_required: bool = True, port: int = 0) -> None:
        """Nothing listens yet.

        Args:
            clock: for times in answers, for token lifetimes and for what becomes visible later.
            tokens_required: ``HttpTokens=required``, IMDSv2 only; False answers without a token, too.
            port: to listen on; 0 takes a free one.
        """
        super().__init__(clock=clock, tokens_required=tokens_required, port=port)
        self.set_key(LIFE_CYCLE, "spot")

    @property
    def environ(self) -> dict[str, str]:
        """The variable that makes spotsafe, and every AWS SDK, ask here."""
        return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": self.url}

    def notice(
        self, action: str = "terminate", *, in_seconds: float = 120.0, after_seconds: float = 0.0
    ) -> None:
        """Mark the instance for an interruption.

        Args:
            action: ``terminate``, ``stop`` or ``hibernate``.
            in_seconds: from now to the interruption; negative gives the stale notice of one that failed.
            after_seconds: from now until the notice can be seen.
        """
        text = json.dumps({"action": action, "time": self._time(in_seconds)}, separators=(",", ":"))
        self.set_key(INSTANCE_ACTION, text, after_seconds=after_seconds)
        self.set_key(TERMINATION_TIME, self._time(in_seconds), after_seconds=after_seconds)

    def rebalance(self, *, after_seconds: float = 0.0) -> None:
        """Recommend to rebalance."""
        text = json.dumps({"noticeTime": self._time(after_seconds)}, separators=(",", ":"))
        self.set_key(REBALANCE, text, after_seconds=after_seconds)

    def cancel(self) -> None:
        """Take back the interruption and the recommendation."""
        for key in (INSTANCE_ACTION, TERMINATION_TIME, REBALANCE):
            self.set_key(key, None)

    def _time(self, in_seconds: float) -> str:
        at = datetime.fromtimestamp(self.clock.wall() + in_seconds, tz=timezone.utc)
        return at.strftime("%Y-%m-%dT%H:%M:%SZ")
