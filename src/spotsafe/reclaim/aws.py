"""AWS: the Spot interruption notice in the EC2 instance metadata service.

Facts are from the Amazon EC2 User Guide, "Spot Instance interruption notices", "EC2 instance rebalance
recommendations" and "Use the Instance Metadata Service to access instance metadata", and botocore's
`IMDSFetcher` for the rules that the SDKs agree on:

- ``PUT /latest/api/token`` gives a session token (IMDSv2). Where its answer may not travel far enough (the
  hop limit of a container's network) it never comes; the SDKs then fall back to requests without one
  (IMDSv1), unless ``AWS_EC2_METADATA_V1_DISABLED``. 401 means that a token is missing, expired or foreign.
- ``meta-data/spot/instance-action`` is 404 until the instance is marked, two minutes ahead at best;
  hibernation begins at once.
- ``meta-data/events/recommendations/rebalance`` is 404 or says that the risk has grown. Most instances that
  get it live on for hours, so it is a RISK and stops nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping

from spotsafe.clock import Clock, SystemClock
from spotsafe.reclaim.http import LocalHttp, Reply
from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice, deadline_after
from spotsafe.reclaim.times import server_time, wall_seconds
from spotsafe.reclaim.token_client import TokenClient, TokenRules
from spotsafe.reclaim.variables import is_true

IPV4_ENDPOINT = "http://169.254.169.254"
IPV6_ENDPOINT = "http://[fd00:ec2::254]"

TOKEN_PATH = "/latest/api/token"  # noqa: S105 - a path, not a secret
ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105 - a header's name

LONGEST_NOTICE_S = 120.0
"""Seconds between a notice and the interruption at most."""
STALE_AFTER_S = 120.0
"""A notice whose time is longer past than this, when first seen, was not carried out."""
_ACTIONS = frozenset({"terminate", "stop", "hibernate"})
_RULES = TokenRules(
    path=TOKEN_PATH,
    header=TOKEN_HEADER,
    ttl_header=TTL_HEADER,
    locked_out="no token can be had, and requests without one are not allowed. From a container the token is lost on "
    "the way when the hop limit is too low: "
    "aws ec2 modify-instance-metadata-options --http-put-response-hop-limit 2",
)


def from_environment(
    environ: Mapping[str, str], *, dmi: Callable[[str], str], clock: Clock
) -> AwsWatcher | None:
    """A watcher where the SDKs' variables or the machine's firmware speak of EC2. Touches no network.

    Args:
        environ: ``AWS_EC2_METADATA_SERVICE_ENDPOINT`` forces it on, ``AWS_EC2_METADATA_DISABLED`` off.
        dmi: reads a DMI field by name; "" where there is none.
        clock: for the watcher.

    Raises:
        ValueError: a variable has no usable value.
    """
    if is_true(environ, "AWS_EC2_METADATA_DISABLED"):
        return None
    if not environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") and not is_ec2(dmi):
        return None
    return AwsWatcher(environ=environ, clock=clock)


def is_ec2(dmi: Callable[[str], str]) -> bool:
    """Whether the firmware says so: "Amazon EC2" on Nitro and metal, a version like 4.11.amazon on Xen."""
    return "amazon" in " ".join(dmi(field) for field in ("sys_vendor", "bios_vendor", "bios_version")).lower()


class AwsWatcher:
    """Asks the instance metadata service for the interruption notice and the rebalance recommendation."""

    name = "aws"

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        clock: Clock | None = None,
        environ: Mapping[str, str] | None = None,
        interval_s: float = 1.0,
        token_ttl_s: int = 21600,
        connect_timeout_s: float = 1.0,
        read_timeout_s: float = 2.0,
    ) -> None:
        """Nothing is sent before the first poll.

        Args:
            endpoint: URL of the service; None takes the SDKs' variables, then the link-local address.
            clock: for token lifetimes and deadlines.
            environ: read for the SDKs' variables; None is the process's.
            interval_s: seconds between two polls. AWS advises 5; one second gains four of the two minutes,
                and two small requests a second are far below what the service allows an instance.
            token_ttl_s: lifetime to ask for, 1 to 21600 seconds.
            connect_timeout_s: seconds.
            read_timeout_s: seconds.

        Raises:
            ValueError: the endpoint is not a URL.
        """
        env = os.environ if environ is None else environ
        self.interval_s = interval_s
        self._clock: Clock = SystemClock() if clock is None else clock
        self._service = TokenClient(
            LocalHttp(endpoint or endpoint_of(env), connect_timeout_s=connect_timeout_s),
            source=self.name,
            rules=_RULES,
            clock=self._clock,
            ttl_s=token_ttl_s,
            read_timeout_s=read_timeout_s,
            without=not is_true(env, "AWS_EC2_METADATA_V1_DISABLED"),
        )
        # What each key said last, and what was made of it then: a deadline counts from the first time.
        self._known: dict[str, tuple[str, ReclaimNotice | None]] = {}

    @property
    def endpoint(self) -> str:
        """The service's URL."""
        return self._service.endpoint

    def poll(self) -> ReclaimNotice | None:
        """Ask for both. The interruption comes first: while it stands, the recommendation adds nothing.

        Raises:
            WatcherUnavailable: no answer, one that makes no sense, or one that forbids asking.
        """
        for path, read in ((ACTION_PATH, self._interruption), (REBALANCE_PATH, self._recommendation)):
            reply = self._service.get(path)
            if reply is None:
                self._known.pop(path, None)
                continue
            text = reply.body.decode("utf-8", "replace")
            if path not in self._known or self._known[path][0] != text:
                self._known[path] = (text, read(self._parse(path, text), reply))
            notice = self._known[path][1]
            if notice is not None:
                return notice
        return None

    def close(self) -> None:
        """End a request in progress."""
        self._service.close()

    def _interruption(self, said: Mapping[str, object], reply: Reply) -> ReclaimNotice | None:
        action = said.get("action")
        if not isinstance(action, str) or action not in _ACTIONS:
            raise self._service.unavailable(f"{ACTION_PATH} names an unknown action: {action!r}")
        now = self._clock.monotonic()
        deadline = None
        if action == "hibernate":
            deadline = now
        elif (at := wall_seconds(said.get("time"))) is not None:
            left = at - server_time(reply, else_=self._clock.wall())
            if left < -STALE_AFTER_S:
                return None
            deadline = deadline_after(left, now=now, at_most=LONGEST_NOTICE_S)
        return ReclaimNotice(
            source=self.name, kind=NoticeKind.RECLAIM, action=action, deadline=deadline, received=now
        )

    def _recommendation(self, said: Mapping[str, object], _reply: Reply) -> ReclaimNotice:
        if "noticeTime" not in said:
            raise self._service.unavailable(f"{REBALANCE_PATH} has no noticeTime")
        now = self._clock.monotonic()
        return ReclaimNotice(
            source=self.name, kind=NoticeKind.RISK, action="rebalance", deadline=None, received=now
        )

    def _parse(self, path: str, text: str) -> Mapping[str, object]:
        try:
            said = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._service.unavailable(f"{path} is not JSON: {error}") from error
        if not isinstance(said, dict):
            raise self._service.unavailable(f"{path} is not a JSON object")
        return said


def endpoint_of(environ: Mapping[str, str]) -> str:
    """The service's URL by the SDKs' variables; a custom endpoint wins over the mode.

    Raises:
        ValueError: the mode is neither ipv4 nor ipv6.
    """
    custom = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").strip()
    if custom:
        return custom
    mode = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "ipv4").strip().lower() or "ipv4"
    if mode not in {"ipv4", "ipv6"}:
        raise ValueError(f"AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE is {mode!r}; write ipv4 or ipv6")
    return IPV6_ENDPOINT if mode == "ipv6" else IPV4_ENDPOINT
