"""Google Cloud: preemption and maintenance of the host, by the metadata server of Compute Engine.

Facts are from Google's "About VM metadata", "View and query VM metadata", "Spot VMs", "Query metadata server for
maintenance event notices" and "GKE metadata server", and from the `google-auth` package for the variables:

- Requests carry ``Metadata-Flavor: Google``, and so do answers: whatever answers without is not Google's, but the
  portal of a network, or a proxy.
- ``instance/preempted`` is FALSE, and TRUE from the moment on at which the VM is being preempted. A Spot VM then has 30
  seconds, or the 120 of a ``preemptionNoticeDuration``, which cannot be seen from inside.
- A GET with ``wait_for_change=true`` hangs until the value is another one. What changes while nobody hangs is missed,
  unless the last ETag is given: then the answer comes at once. After ``timeout_sec`` it comes with the old value.
- 503 comes during maintenance of the server, also in the middle of a GET that hangs, and for too many requests.
- ``instance/maintenance-event`` is NONE, ``MIGRATE_ON_HOST_MAINTENANCE`` or ``TERMINATE_ON_HOST_MAINTENANCE``; it
  changes 60 seconds ahead at least, an hour for most VMs with GPUs, and only for who has asked before.
- On GKE with Workload Identity another server answers, which has no ``preempted``: 404 there says nothing about the VM.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from urllib.parse import quote

from spotsafe.clock import Clock, SystemClock
from spotsafe.errors import WatcherUnavailable
from spotsafe.reclaim.http import LocalHttp, Reply
from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice

ENDPOINT = "http://169.254.169.254"
"""The address, not the name: to resolve a name that is nobody's can take half a minute."""
PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
MAINTENANCE_PATH = "/computeMetadata/v1/instance/maintenance-event"
FLAVOR = "Metadata-Flavor"

NOTICE_VARIABLE = "SPOTSAFE_GCP_NOTICE_S"
SPOT_NOTICE_S = 30.0
"""Seconds from a preemption to the end of a Spot VM, unless more was asked for when it was made."""
MAINTENANCE_NOTICE_S = 60.0
"""Seconds between the word of maintenance and its beginning, at least."""
_SLACK_S = 10.0
_MIGRATE, _TERMINATE, _NONE = "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE", "NONE"


def from_environment(
    environ: Mapping[str, str], *, dmi: Callable[[str], str], clock: Clock
) -> GcpWatcher | None:
    """A watcher where the variables of Google's libraries or the machine's firmware speak of it. Touches no network.

    Args:
        environ: ``GCE_METADATA_HOST`` forces it on; ``NO_GCE_CHECK=true`` leaves the firmware unasked;
            ``SPOTSAFE_GCP_NOTICE_S`` is `notice_s` of the watcher.
        dmi: reads a DMI field by name; "" where there is none.
        clock: for the watcher.

    Raises:
        ValueError: a variable has no usable value.
    """
    told = bool(host_of(environ))
    if not told and (environ.get("NO_GCE_CHECK") == "true" or not is_gce(dmi)):
        return None
    return GcpWatcher(environ=environ, clock=clock, notice_s=_notice_s(environ))


def is_gce(dmi: Callable[[str], str]) -> bool:
    """Whether the firmware says so: "Google Compute Engine", or "Google"."""
    return dmi("product_name").startswith("Google")


class GcpWatcher:
    """Hangs in a request until the VM is preempted, and asks for maintenance of its host in between."""

    name = "gcp"

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        clock: Clock | None = None,
        environ: Mapping[str, str] | None = None,
        notice_s: float = SPOT_NOTICE_S,
        hang_s: int = 5,
        interval_s: float = 1.0,
        connect_timeout_s: float = 1.0,
        read_timeout_s: float = 2.0,
    ) -> None:
        """Nothing is sent before the first poll.

        Args:
            endpoint: URL of the server; None takes the variables of Google's libraries, then the address.
            clock: for deadlines.
            environ: read for these variables; None is the process's.
            notice_s: seconds that a preemption leaves: 120 for a VM made with a ``preemptionNoticeDuration`` of 120 s.
            hang_s: seconds for which a request hangs at most: so late is maintenance seen. 0 never hangs.
            interval_s: seconds between two polls where requests do not hang.
            connect_timeout_s: seconds.
            read_timeout_s: seconds, on top of those that a request hangs.

        Raises:
            ValueError: the endpoint is not a URL, or seconds are negative.
        """
        if notice_s < 0 or hang_s < 0:
            raise ValueError("notice_s and hang_s are seconds, 0 or more")
        env = os.environ if environ is None else environ
        self.interval_s = interval_s
        self._between_s = interval_s
        self._clock: Clock = SystemClock() if clock is None else clock
        self._http = LocalHttp(endpoint or endpoint_of(env), connect_timeout_s=connect_timeout_s)
        self._notice_s, self._hang_s, self._read_timeout_s = notice_s, hang_s, read_timeout_s
        self._etag: str | None = None
        # What was made of an answer when it came first: a deadline counts from then.
        self._known: dict[str, ReclaimNotice] = {}

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return self._http.endpoint

    def poll(self) -> ReclaimNotice | None:
        """Ask for maintenance, then for a preemption, which waits for news once its state is known.

        Raises:
            WatcherUnavailable: no answer, one that makes no sense or is not Google's, or a server that hides it.
        """
        maintenance: ReclaimNotice | None = None
        problem: WatcherUnavailable | None = None
        try:
            maintenance = self._maintenance()
        except WatcherUnavailable as error:  # which must not hide a preemption
            problem = error
        preempted = self._preempted()
        if preempted is None and problem is not None:
            self._etag = None  # so that the next try does not hang before it has an answer
            raise problem
        return preempted if preempted is not None else maintenance

    def close(self) -> None:
        """End a request in progress."""
        self._http.close()

    def _preempted(self) -> ReclaimNotice | None:
        waits = self._etag is not None and self._hang_s > 0
        query = f"?wait_for_change=true&timeout_sec={self._hang_s}&last_etag={self._etag}" if waits else ""
        before, began = self._etag, time.monotonic()
        self._etag = None  # whatever goes wrong, the next request does not hang: it learns the state anew
        reply = self._get(PREEMPTED_PATH, query, waits_s=self._hang_s if waits else 0)
        if reply is None:
            raise self._unavailable(_HIDDEN)
        said = _text(reply)
        if said not in {"TRUE", "FALSE"}:
            raise self._unavailable(f"{PREEMPTED_PATH} is neither TRUE nor FALSE: {said[:40]!r}")
        self._etag = quote(reply.headers.get("etag", ""), safe="") or None
        hung = not waits or self._etag != before or time.monotonic() - began > self._hang_s / 2
        if self._hang_s:
            self.interval_s = 0.0 if self._etag is not None and hung else self._between_s
        return self._notice("preempted" if said == "TRUE" else None, NoticeKind.RECLAIM, self._notice_s)

    def _maintenance(self) -> ReclaimNotice | None:
        reply = self._get(MAINTENANCE_PATH)
        said = _NONE if reply is None else _text(reply)
        if said == _TERMINATE:
            return self._notice(said, NoticeKind.RECLAIM, MAINTENANCE_NOTICE_S)
        if said == _MIGRATE:  # it goes on elsewhere, most probably
            return self._notice(said, NoticeKind.RISK, None)
        if said != _NONE:
            raise self._unavailable(f"{MAINTENANCE_PATH} says {said[:40]!r}")
        for action in (_TERMINATE, _MIGRATE):
            self._known.pop(action, None)
        return None

    def _notice(self, action: str | None, kind: NoticeKind, left_s: float | None) -> ReclaimNotice | None:
        if action is None:
            self._known.pop("preempted", None)
            return None
        if action not in self._known:
            now = self._clock.monotonic()
            deadline = None if left_s is None else now + left_s
            self._known[action] = ReclaimNotice(
                source=self.name, kind=kind, action=action, deadline=deadline, received=now
            )
        return self._known[action]

    def _get(self, path: str, query: str = "", *, waits_s: float = 0) -> Reply | None:
        """One key; None where the server says that there is none."""
        limit_s = self._read_timeout_s + (waits_s + _SLACK_S if waits_s else 0.0)
        try:
            reply = self._http.request(
                "GET", path + query, headers={FLAVOR: "Google"}, read_timeout_s=limit_s
            )
        except OSError as error:
            raise self._unavailable(f"{path}: {str(error) or type(error).__name__}") from error
        if reply.headers.get(FLAVOR.lower()) != "Google":
            raise self._unavailable(f"{path} was answered ({reply.status}), but not by Google's server")
        if reply.status == 404:
            return None
        if reply.status != 200:
            raise self._unavailable(f"{path} answered {reply.status}")
        return reply

    def _unavailable(self, what: str) -> WatcherUnavailable:
        return WatcherUnavailable(f"{self.endpoint}: {what}", source=self.name)


_HIDDEN = (
    "this server hides whether the VM is preempted, as that of GKE's Workload Identity does. What is left is the "
    "SIGTERM that a pod gets; or let the pod use the host's network (hostNetwork: true)"
)


def host_of(environ: Mapping[str, str]) -> str:
    """The server by the variables of Google's libraries, the newer first; "" if none is set."""
    return (environ.get("GCE_METADATA_HOST") or environ.get("GCE_METADATA_ROOT") or "").strip()


def endpoint_of(environ: Mapping[str, str]) -> str:
    """The server's URL by these variables, which hold a host and perhaps a port."""
    host = host_of(environ)
    return f"http://{host}" if host else ENDPOINT


def _notice_s(environ: Mapping[str, str]) -> float:
    text = environ.get(NOTICE_VARIABLE, "").strip()
    try:
        seconds = float(text) if text else SPOT_NOTICE_S
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{NOTICE_VARIABLE} is {text!r}; write seconds, like 120")
    return seconds


def _text(reply: Reply) -> str:
    return reply.body.decode("utf-8", "replace").strip()
