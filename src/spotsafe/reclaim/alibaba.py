"""Alibaba Cloud: the release of a preemptible instance, in the metadata of ECS.

Facts are from Alibaba's "View instance metadata" and "Query the interruption events of preemptible instances": the key
``instance/spot/termination-time`` is 404, and holds the time of the release, in UTC, from about five minutes before it
on. The hardened mode of the service answers only requests with a token, the normal one the others too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from spotsafe.clock import Clock, SystemClock
from spotsafe.reclaim.http import LocalHttp
from spotsafe.reclaim.notice import ReclaimNotice
from spotsafe.reclaim.termination import TerminationTime
from spotsafe.reclaim.times import wall_seconds
from spotsafe.reclaim.token_client import TokenClient, TokenRules
from spotsafe.reclaim.variables import is_true

ENDPOINT = "http://100.100.100.200"
ENDPOINT_VARIABLE = "SPOTSAFE_ALIBABA_METADATA"
TERMINATION_PATH = "/latest/meta-data/instance/spot/termination-time"
LONGEST_NOTICE_S = 300.0
"""Seconds between the announcement and the release, about."""
_DISABLED, _WITHOUT_TOKEN_DISABLED = (
    "ALIBABA_CLOUD_ECS_METADATA_DISABLED",
    "ALIBABA_CLOUD_IMDSV1_DISABLED",
)
_RULES = TokenRules(
    path="/latest/api/token",
    header="X-aliyun-ecs-metadata-token",
    ttl_header="X-aliyun-ecs-metadata-token-ttl-seconds",
    locked_out="no token can be had, and requests without one are not allowed: the instance's metadata is in its "
    "hardened mode, and the answer with the token is lost on the way, as in a container behind a bridge",
)


def from_environment(
    environ: Mapping[str, str], *, dmi: Callable[[str], str], clock: Clock
) -> AlibabaWatcher | None:
    """A watcher where a variable or the machine's firmware speaks of Alibaba Cloud. Touches no network.

    Args:
        environ: ``SPOTSAFE_ALIBABA_METADATA``, the URL of the service, forces it on;
            ``ALIBABA_CLOUD_ECS_METADATA_DISABLED=true`` leaves the firmware unasked, as for Alibaba's libraries.
        dmi: reads a DMI field by name; "" where there is none.
        clock: for the watcher.

    Raises:
        ValueError: the variable is not a URL.
    """
    told = environ.get(ENDPOINT_VARIABLE, "").strip()
    if not told and (is_true(environ, _DISABLED) or dmi("sys_vendor") != "Alibaba Cloud"):
        return None
    return AlibabaWatcher(environ=environ, clock=clock)


class AlibabaWatcher:
    """Asks for the time at which this instance is released."""

    name = "alibaba"

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        clock: Clock | None = None,
        environ: Mapping[str, str] | None = None,
        interval_s: float = 2.0,
        token_ttl_s: int = 21600,
        connect_timeout_s: float = 1.0,
        read_timeout_s: float = 2.0,
    ) -> None:
        """Nothing is sent before the first poll.

        Args:
            endpoint: URL of the service; None takes ``SPOTSAFE_ALIBABA_METADATA``, then the link-local address.
            clock: for token lifetimes and deadlines.
            environ: read for that variable, and for ``ALIBABA_CLOUD_IMDSV1_DISABLED``, which asks for a token always;
                None is the process's.
            interval_s: seconds between two polls; of five minutes two seconds are little.
            token_ttl_s: lifetime to ask for, 1 to 21600 seconds.
            connect_timeout_s: seconds.
            read_timeout_s: seconds.

        Raises:
            ValueError: the endpoint is not a URL.
        """
        env = os.environ if environ is None else environ
        clock = SystemClock() if clock is None else clock
        url = endpoint or env.get(ENDPOINT_VARIABLE, "").strip() or ENDPOINT
        self.interval_s = interval_s
        self._service = TokenClient(
            LocalHttp(url, connect_timeout_s=connect_timeout_s),
            source=self.name,
            rules=_RULES,
            clock=clock,
            ttl_s=token_ttl_s,
            read_timeout_s=read_timeout_s,
            without=not is_true(env, _WITHOUT_TOKEN_DISABLED),
        )
        self._end = TerminationTime(self.name, clock=clock, longest_s=LONGEST_NOTICE_S)

    @property
    def endpoint(self) -> str:
        """The service's URL."""
        return self._service.endpoint

    def poll(self) -> ReclaimNotice | None:
        """Ask for the time.

        Raises:
            WatcherUnavailable: no answer, one that makes no sense, or one that forbids asking.
        """
        reply = self._service.get(TERMINATION_PATH)
        if reply is None:
            self._end.nothing()
            return None
        text = reply.body.decode("utf-8", "replace").strip()
        at = wall_seconds(text)
        if at is None:
            raise self._service.unavailable(f"{TERMINATION_PATH} is no time: {text[:40]!r}")
        return self._end.at(at, reply)

    def close(self) -> None:
        """End a request in progress."""
        self._service.close()
