"""Azure: the Scheduled Events of the instance metadata service.

Facts are from Microsoft's "Azure Metadata Service: Scheduled Events for Linux VMs" and "Azure Instance Metadata Service
for virtual machines"; what events mean for a training run is in `reclaim.azure_events`.

- Requests carry ``Metadata: true``, no ``X-Forwarded-For``, and the version of the interface; else 400.
- The first request for events turns them on and may take two minutes. Who gives up sooner may never see one.
- A document holds the events of all VMs of an availability set or placement group. ``Resources`` names them as
  ``compute.name`` does (``trainer_6`` in a scale set), which is not the name of the host (``trainer000006``).
- ``DocumentIncarnation`` rises with every change. What is over, and what is cancelled, is gone from the document.
- ``NotBefore`` is a date of HTTP; the mock server of Microsoft's samples writes ISO 8601.
- A VM may ask five times a second, all its processes together; more is 429. During an update of the service 410
  comes, for 70 seconds at most.
- There is no variable of Azure's own that moves the service: ``AZURE_POD_IDENTITY_AUTHORITY_HOST`` is for tokens only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from spotsafe.clock import Clock, SystemClock
from spotsafe.errors import WatcherUnavailable
from spotsafe.reclaim.azure_events import Document, ScheduledEvent, Sighting, read_document, verdict
from spotsafe.reclaim.http import LocalHttp, Reply
from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice, most_urgent
from spotsafe.reclaim.times import server_time, wall_seconds

ENDPOINT = "http://169.254.169.254"
EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
ENDPOINT_VARIABLE = "SPOTSAFE_AZURE_METADATA"

FIRST_TIMEOUT_S = 130.0
"""Seconds for the first answer: the two minutes of the documentation, and some."""
NEAR_S = 120.0
"""Seconds before a restart of the VM from which on it counts as certain."""

_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
_HEADERS = {"Metadata": "true"}
_REASONS = {
    400: "it takes the request for malformed: another service, or one that does not know this version",
    403: "it forbids to ask; a firewall or the VM's settings may keep it from containers",
    404: "it knows of no such thing; is this a VM of Azure Resource Manager",
    405: "it does not offer this; another service than Azure's answers here",
    410: "it is being updated, for 70 seconds at most",
    429: "more than five requests a second come from this VM; let one process watch",
}


def from_environment(
    environ: Mapping[str, str], *, dmi: Callable[[str], str], clock: Clock
) -> AzureWatcher | None:
    """A watcher where a variable or the machine's firmware speaks of Azure. Touches no network.

    Args:
        environ: ``SPOTSAFE_AZURE_METADATA``, the URL of the service, forces it on.
        dmi: reads a DMI field by name; "" where there is none.
        clock: for the watcher.

    Raises:
        ValueError: the variable is not a URL.
    """
    if not environ.get(ENDPOINT_VARIABLE, "").strip() and not is_azure(dmi):
        return None
    return AzureWatcher(environ=environ, clock=clock)


def is_azure(dmi: Callable[[str], str]) -> bool:
    """Whether the firmware says so: Microsoft's virtual machines elsewhere (Hyper-V) lack Azure's asset tag."""
    return dmi("sys_vendor") == "Microsoft Corporation" and dmi("chassis_asset_tag") == _ASSET_TAG


class AzureWatcher:
    """Asks for the events of this VM."""

    name = "azure"

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        clock: Clock | None = None,
        environ: Mapping[str, str] | None = None,
        interval_s: float = 1.0,
        near_s: float = NEAR_S,
        acknowledges: bool = False,
        connect_timeout_s: float = 1.0,
        first_timeout_s: float = FIRST_TIMEOUT_S,
        read_timeout_s: float = 5.0,
    ) -> None:
        """Nothing is sent before the first poll.

        Args:
            endpoint: URL of the service; None takes ``SPOTSAFE_AZURE_METADATA``, then the link-local address.
            clock: for deadlines.
            environ: read for this variable; None is the process's.
            interval_s: seconds between two polls; the documentation advises one.
            near_s: seconds before a reboot or redeployment from which on it is a RECLAIM. Before that it is a RISK.
            acknowledges: whether `acknowledge` does anything.
            connect_timeout_s: seconds.
            first_timeout_s: seconds for the first answer about events, which turns them on.
            read_timeout_s: seconds for every other answer.

        Raises:
            ValueError: the endpoint is not a URL, or `near_s` is negative.
        """
        if near_s < 0:
            raise ValueError("near_s is seconds, 0 or more")
        env = os.environ if environ is None else environ
        self.interval_s = interval_s
        self._clock: Clock = SystemClock() if clock is None else clock
        self._connect_timeout_s = connect_timeout_s
        self._http = LocalHttp(endpoint or endpoint_of(env), connect_timeout_s=connect_timeout_s)
        self._near_s, self._acknowledges = near_s, acknowledges
        self._events_timeout_s, self._read_timeout_s = first_timeout_s, read_timeout_s
        self._vm: str | None = None
        self._incarnation: int | None = None
        # Replaced as a whole: `acknowledge` reads it in another thread.
        self._mine: Mapping[str, Sighting] = {}

    @property
    def endpoint(self) -> str:
        """The service's URL."""
        return self._http.endpoint

    def poll(self) -> ReclaimNotice | None:
        """Ask for events, and judge those of this VM. The one that ends first is returned, and a RECLAIM before a RISK.

        Raises:
            WatcherUnavailable: no answer, one that makes no sense, or nobody says which VM this is.
        """
        reply = self._get(EVENTS_PATH, timeout_s=self._events_timeout_s)
        document = self._read(reply)
        self._events_timeout_s = self._read_timeout_s
        if self._vm is None:
            self._vm = self._ask_name()
        now = self._clock.monotonic()
        self._look_at(document, self._vm, reply=reply, now=now)
        verdicts = [
            verdict(each, now=now, near_s=self._near_s, source=self.name) for each in self._mine.values()
        ]
        notices = [each for each in verdicts if each is not None]
        reclaim = most_urgent(notices, NoticeKind.RECLAIM)
        if reclaim is None and document.unreadable:  # which may be this VM's
            raise self._unavailable(f"{document.unreadable} of its events make no sense")
        return most_urgent(notices, NoticeKind.RISK) if reclaim is None else reclaim

    def acknowledge(self) -> tuple[str, ...]:
        """Tell Azure that it need not wait until the time of an event: the state is saved, the VM may go.

        Only what deletes this VM and no other is approved, for an approval counts for all VMs of an event. Does
        nothing unless the watcher was made with ``acknowledges=True``. Any thread may call it.

        Returns:
            The ids of the events that were approved.

        Raises:
            WatcherUnavailable: the service did not take it.
        """
        vm = self._vm
        if not self._acknowledges or vm is None:
            return ()
        ids = tuple(key for key, seen in self._mine.items() if seen.event.may_be_approved_by(vm))
        if ids:
            body = json.dumps({"StartRequests": [{"EventId": each} for each in ids]}).encode()
            # A client of its own: the other one may be in the middle of a poll.
            http = LocalHttp(self.endpoint, connect_timeout_s=self._connect_timeout_s)
            self._ask(http, "POST", EVENTS_PATH, body=body, timeout_s=self._read_timeout_s)
        return ids

    def close(self) -> None:
        """End a request in progress."""
        self._http.close()

    def _look_at(self, document: Document, vm: str, *, reply: Reply, now: float) -> None:
        """Keep what is this VM's. What says the same as before stays as it was seen first, and so does its deadline."""
        same = document.incarnation == self._incarnation
        mine = {}
        for event in document.events:
            if event.concerns(vm):
                before = self._mine.get(event.id)
                if before is not None and before.is_of(event, same_document=same):
                    mine[event.id] = replace(before, event=event)
                else:
                    mine[event.id] = self._sighting(event, before, reply=reply, now=now)
        self._mine, self._incarnation = mine, document.incarnation

    def _sighting(
        self, event: ScheduledEvent, before: Sighting | None, *, reply: Reply, now: float
    ) -> Sighting:
        starts_at = wall_seconds(event.not_before)
        said_at = server_time(reply, else_=self._clock.wall())
        return Sighting(
            event=event,
            since=now if before is None else before.since,
            at=now,
            left_s=None if starts_at is None else starts_at - said_at,
            at_first_look=self._incarnation is None,
        )

    def _ask_name(self) -> str:
        text = self._get(NAME_PATH, timeout_s=self._read_timeout_s).body.decode("utf-8", "replace").strip()
        if not re.fullmatch(r"[^\s<>{}/]{1,200}", text):
            raise self._unavailable(f"{NAME_PATH} is no name: {text[:40]!r}")
        return text

    def _read(self, reply: Reply) -> Document:
        try:
            return read_document(reply.body.decode("utf-8", "replace"))
        except ValueError as error:
            raise self._unavailable(f"{EVENTS_PATH} is not a document of events: {error}") from error

    def _get(self, path: str, *, timeout_s: float) -> Reply:
        return self._ask(self._http, "GET", path, timeout_s=timeout_s)

    def _ask(
        self, http: LocalHttp, method: str, path: str, *, timeout_s: float, body: bytes | None = None
    ) -> Reply:
        try:
            reply = http.request(method, path, headers=_HEADERS, body=body, read_timeout_s=timeout_s)
        except OSError as error:
            raise self._unavailable(f"{method} {path}: {str(error) or type(error).__name__}") from error
        if reply.status != 200:
            why = _REASONS.get(reply.status)
            raise self._unavailable(f"{path} answered {reply.status}" + (f": {why}" if why else ""))
        return reply

    def _unavailable(self, what: str) -> WatcherUnavailable:
        return WatcherUnavailable(f"{self.endpoint}: {what}", source=self.name)


def endpoint_of(environ: Mapping[str, str]) -> str:
    """The service's URL by our variable; else the link-local address."""
    return environ.get(ENDPOINT_VARIABLE, "").strip() or ENDPOINT
