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
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from spotsafe.clock import Clock
from spotsafe.testing.metadata import Answer, FakeMetadata, Faults, Request

TOKEN_PATH = "/latest/api/token"  # noqa: S105 - a path, not a secret
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105 - a header's name
LONGEST_TTL_S = 21600

INSTANCE_ACTION = "spot/instance-action"
TERMINATION_TIME = "spot/termination-time"
REBALANCE = "events/recommendations/rebalance"
LIFE_CYCLE = "instance-life-cycle"

_KEY_PATH = re.compile(r"/(?:latest|\d{4}-\d\d-\d\d)/meta-data/(.+)")


@dataclass(slots=True, kw_only=True)
class AwsFaults(Faults):
    """What goes wrong, until it is set otherwise. The defaults are a service in good health."""

    drop_put: bool = False
    """Token requests are never answered, as beyond the hop limit of a container's network."""
    refuse_put: int | None = None
    """Token requests are answered with this status: 403 where the service is off, 404 or 405 elsewhere."""
    refuse_tokens: bool = False
    """Every token is refused with 401, fresh ones too."""
    token: str | None = None
    """Given out in place of a real token."""


@dataclass(slots=True)
class _Value:
    body: str
    visible_from: float


class FakeAwsMetadata(FakeMetadata):
    """The service of one instance. Use it as a context manager, or `start` and `stop` it.

    Attributes:
        faults: what goes wrong; set its members at any time.
    """

    server = "EC2ws"
    actions = ("terminate", "stop", "hibernate")
    faults: AwsFaults

    def __init__(self, *, clock: Clock | None = None, tokens_required: bool = True, port: int = 0) -> None:
        """Nothing listens yet.

        Args:
            clock: for times in answers, for token lifetimes and for what becomes visible later.
            tokens_required: ``HttpTokens=required``, IMDSv2 only; False answers without a token, too.
            port: to listen on; 0 takes a free one.
        """
        super().__init__(clock=clock, port=port)
        self.faults = AwsFaults()
        self._values = {LIFE_CYCLE: _Value("spot", float("-inf"))}
        self._tokens: dict[str, float] = {}
        self._uses_left: int | None = None
        self._tokens_required = tokens_required

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

    def set_key(self, key: str, body: str | None, *, after_seconds: float = 0.0) -> None:
        """Set any key below ``meta-data/``; None removes it, so that it answers 404."""
        with self.lock:
            if body is None:
                self._values.pop(key, None)
            else:
                self._values[key] = _Value(body, self.clock.monotonic() + after_seconds)

    def expire_tokens(self, *, after_uses: int = 0) -> None:
        """Refuse all tokens given out so far with 401, after `after_uses` more uses."""
        with self.lock:
            self._uses_left = after_uses or None
            if after_uses == 0:
                self._tokens.clear()

    def _time(self, in_seconds: float) -> str:
        at = datetime.fromtimestamp(self.clock.wall() + in_seconds, tz=timezone.utc)
        return at.strftime("%Y-%m-%dT%H:%M:%SZ")

    def answer(self, request: Request) -> Answer | None:
        """What the service in good health says; None: nothing, ever."""
        if request.method == "PUT":
            return None if self.faults.drop_put else self._give_token(request.path, request.headers)
        if request.method in {"GET", "HEAD"}:
            return self._read_key(request.path, request.headers)
        return Answer(405)

    def _give_token(self, path: str, headers: Mapping[str, str]) -> Answer:
        if self.faults.refuse_put is not None:
            return Answer(self.faults.refuse_put)
        if path != TOKEN_PATH or "x-forwarded-for" in headers:
            return Answer(403)
        ttl = headers.get(TTL_HEADER.lower(), "")
        if not re.fullmatch("[0-9]{1,5}", ttl) or not 1 <= int(ttl) <= LONGEST_TTL_S:
            return Answer(400)
        token = secrets.token_urlsafe(40) + "==" if self.faults.token is None else self.faults.token
        self._tokens[token] = self.clock.monotonic() + int(ttl)
        return Answer(200, token, {TTL_HEADER: ttl})

    def _read_key(self, path: str, headers: Mapping[str, str]) -> Answer:
        token = headers.get(TOKEN_HEADER.lower())
        if (token is not None or self._tokens_required) and not self._accepts(token):
            return Answer(401)
        found = _KEY_PATH.fullmatch(path)
        value = self._values.get(found.group(1)) if found else None
        if value is None or self.clock.monotonic() < value.visible_from:
            return Answer(404)
        return Answer(200, value.body)

    def _accepts(self, token: str | None) -> bool:
        expires = None if token is None else self._tokens.get(token)
        if expires is None or self.clock.monotonic() >= expires or self.faults.refuse_tokens:
            return False
        if self._uses_left is not None:
            if self._uses_left == 0:
                self._tokens.clear()
                self._uses_left = None
                return False
            self._uses_left -= 1
        return True
