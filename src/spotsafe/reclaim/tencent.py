"""Tencent Cloud: the repossession of a spot instance, in the metadata of CVM.

Facts are from Tencent's "Querying Spot Instance Repossession Status" and "Querying Instance Metadata": the key
``spot/termination-time`` is 404 for an instance that is none or is not to go, and else holds a time like
``2018-08-18 12:05:33``, which is in UTC+8 and does not say so. There are about two minutes. The service's name,
``metadata.tencentyun.com``, is 169.254.0.23; it is asked by its address, for a name may take long to be resolved.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone

from spotsafe.clock import Clock, SystemClock
from spotsafe.errors import WatcherUnavailable
from spotsafe.reclaim.http import LocalHttp, Reply
from spotsafe.reclaim.notice import ReclaimNotice
from spotsafe.reclaim.termination import TerminationTime

ENDPOINT = "http://169.254.0.23"
ENDPOINT_VARIABLE = "SPOTSAFE_TENCENT_METADATA"
TERMINATION_PATH = "/latest/meta-data/spot/termination-time"
LONGEST_NOTICE_S = 120.0
"""Seconds between the announcement and the end, about."""
ZONE = timezone(timedelta(hours=8))
"""Of the times that the service writes."""


def from_environment(
    environ: Mapping[str, str], *, dmi: Callable[[str], str], clock: Clock
) -> TencentWatcher | None:
    """A watcher where a variable or the machine's firmware speaks of Tencent Cloud. Touches no network.

    Args:
        environ: ``SPOTSAFE_TENCENT_METADATA``, the URL of the service, forces it on.
        dmi: reads a DMI field by name; "" where there is none.
        clock: for the watcher.

    Raises:
        ValueError: the variable is not a URL.
    """
    if not environ.get(ENDPOINT_VARIABLE, "").strip() and dmi("sys_vendor") != "Tencent Cloud":
        return None
    return TencentWatcher(environ=environ, clock=clock)


class TencentWatcher:
    """Asks for the time at which this instance is taken back."""

    name = "tencent"

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        clock: Clock | None = None,
        environ: Mapping[str, str] | None = None,
        interval_s: float = 1.0,
        connect_timeout_s: float = 1.0,
        read_timeout_s: float = 2.0,
    ) -> None:
        """Nothing is sent before the first poll.

        Args:
            endpoint: URL of the service; None takes ``SPOTSAFE_TENCENT_METADATA``, then the link-local address.
            clock: for deadlines.
            environ: read for that variable; None is the process's.
            interval_s: seconds between two polls.
            connect_timeout_s: seconds.
            read_timeout_s: seconds.

        Raises:
            ValueError: the endpoint is not a URL.
        """
        env = os.environ if environ is None else environ
        clock = SystemClock() if clock is None else clock
        url = endpoint or env.get(ENDPOINT_VARIABLE, "").strip() or ENDPOINT
        self.interval_s = interval_s
        self._http = LocalHttp(url, connect_timeout_s=connect_timeout_s)
        self._read_timeout_s = read_timeout_s
        self._end = TerminationTime(self.name, clock=clock, longest_s=LONGEST_NOTICE_S)

    @property
    def endpoint(self) -> str:
        """The service's URL."""
        return self._http.endpoint

    def poll(self) -> ReclaimNotice | None:
        """Ask for the time.

        Raises:
            WatcherUnavailable: no answer, or one that makes no sense.
        """
        reply = self._ask()
        if reply.status == 404:
            self._end.nothing()
            return None
        if reply.status != 200:
            raise self._unavailable(f"answered {reply.status}")
        text = reply.body.decode("utf-8", "replace").strip()
        at = None
        with contextlib.suppress(ValueError, OverflowError):
            at = datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=ZONE).timestamp()
        if at is None:
            raise self._unavailable(f"is no time: {text[:40]!r}")
        return self._end.at(at, reply)

    def close(self) -> None:
        """End a request in progress."""
        self._http.close()

    def _ask(self) -> Reply:
        try:
            return self._http.request("GET", TERMINATION_PATH, read_timeout_s=self._read_timeout_s)
        except OSError as error:
            raise self._unavailable(str(error) or type(error).__name__) from error

    def _unavailable(self, what: str) -> WatcherUnavailable:
        return WatcherUnavailable(f"{self.endpoint}: {TERMINATION_PATH} {what}", source=self.name)
