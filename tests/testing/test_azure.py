"""The fake answers as Microsoft documents the service, moves events as Azure does, and fails only on demand."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from spotsafe.testing.azure import (
    EVENT_VERSIONS,
    EVENTS,
    INSTANCE,
    INSTANCE_VERSIONS,
    MINIMUM_NOTICE_S,
    MOST_PER_S,
    VERSIONS,
    FakeAzureMetadata,
)
from spotsafe.testing.clock import ManualClock
from tests.testing import asking

WALL = 1_700_000_000.0  # 2023-11-14T22:13:20Z
METADATA = {"Metadata": "true"}
NOW = f"{EVENTS}?api-version=2020-07-01"
THIS_VM = "?api-version=2021-02-01"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall=WALL)


@pytest.fixture
def azure(clock: ManualClock) -> Iterator[FakeAzureMetadata]:
    with FakeAzureMetadata(clock=clock) as fake:
        yield fake


def ask(
    fake: FakeAzureMetadata,
    path: str,
    *,
    method: str = "GET",
    body: str | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, str, dict[str, str]]:
    return asking.ask(fake, method, path, METADATA if headers is None else headers, body=body)


def document(fake: FakeAzureMetadata, path: str = NOW) -> tuple[int, list[dict[str, Any]]]:
    status, body, _ = ask(fake, path)
    assert status == 200
    said = json.loads(body)
    return said["DocumentIncarnation"], said["Events"]


def approve(fake: FakeAzureMetadata, *ids: object) -> int:
    body = json.dumps({"StartRequests": [{"EventId": each} for each in ids]})
    return ask(fake, NOW, method="POST", body=body)[0]


def test_a_vm_without_events(azure: FakeAzureMetadata):
    """An empty list in the first incarnation, with the headers of the service and the fake's time."""
    status, body, headers = ask(azure, NOW)
    assert (status, json.loads(body)) == (200, {"DocumentIncarnation": 1, "Events": []})
    assert headers["content-type"] == "application/json; charset=utf-8"
    assert headers["server"].strip().startswith("IMDS/")
    assert len(headers["x-ms-request-id"]) == 36
    assert parsedate_to_datetime(headers["date"]).timestamp() == WALL


def test_an_event_has_all_its_members(azure: FakeAzureMetadata):
    """As documented; a time in the form of HTTP's."""
    event_id = azure.schedule("Preempt", description="The VM is evicted.", duration_s=9)
    incarnation, [event] = document(azure)
    assert incarnation == 2
    assert event == {
        "EventId": event_id,
        "EventStatus": "Scheduled",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["trainer_6"],
        "NotBefore": "Tue, 14 Nov 2023 22:13:50 GMT",
        "Description": "The VM is evicted.",
        "EventSource": "Platform",
        "DurationInSeconds": 9,
    }


def test_older_versions_know_less(azure: FakeAzureMetadata):
    """Members and kinds of events came one by one."""
    azure.schedule("Preempt")
    azure.schedule("Reboot")
    seen = {
        version: {
            each["EventType"]: len(each) for each in document(azure, f"{EVENTS}?api-version={version}")[1]
        }
        for version in EVENT_VERSIONS
    }
    assert seen == {
        "2017-08-01": {"Reboot": 6},
        "2017-11-01": {"Preempt": 6, "Reboot": 6},
        "2019-01-01": {"Preempt": 6, "Reboot": 6},
        "2019-04-01": {"Preempt": 7, "Reboot": 7},
        "2019-08-01": {"Preempt": 8, "Reboot": 8},
        "2020-07-01": {"Preempt": 9, "Reboot": 9},
    }


class TestRefusals:
    @pytest.mark.parametrize("path", [NOW, INSTANCE + THIS_VM, VERSIONS])
    @pytest.mark.parametrize(
        "headers", [{}, {"Metadata": "yes"}, {**METADATA, "X-Forwarded-For": "10.0.0.1"}]
    )
    def test_requests_that_may_be_redirected(
        self, path: str, headers: dict[str, str], azure: FakeAzureMetadata
    ):
        """Without the header, and through a proxy."""
        status, body, _ = ask(azure, path, headers=headers)
        assert status == 400
        assert json.loads(body)["error"].startswith("Bad request")

    def test_the_header_has_no_case(self, azure: FakeAzureMetadata):
        """True will do."""
        assert ask(azure, NOW, headers={"metadata": "True"})[0] == 200

    @pytest.mark.parametrize("query", ["", "?api-version=", "?api-version=latest", "?api-version=2021-02-01"])
    @pytest.mark.parametrize("method", ["GET", "POST"])
    def test_a_version_that_is_not_known(self, query: str, method: str, azure: FakeAzureMetadata):
        """The newest ones are named."""
        status, body, _ = ask(azure, EVENTS + query, method=method)
        assert status == 400
        assert json.loads(body)["newest-versions"] == ["2020-07-01", "2019-08-01", "2019-04-01"]

    def test_a_parameter_that_comes_twice(self, azure: FakeAzureMetadata):
        """Is refused."""
        assert ask(azure, NOW + "&api-version=2020-07-01")[0] == 400

    def test_what_is_not_there_or_not_offered(self, azure: FakeAzureMetadata):
        """404 and 405."""
        assert ask(azure, "/metadata/nothing")[0] == 404
        assert ask(azure, "/latest/meta-data/")[0] == 404
        assert ask(azure, NOW, method="DELETE")[0] == 405
        assert ask(azure, INSTANCE + THIS_VM, method="POST")[0] == 405


class TestLifeOfAnEvent:
    def test_every_change_is_a_new_incarnation(self, azure: FakeAzureMetadata, clock: ManualClock):
        """Scheduled, Started without a time, gone."""
        event_id = azure.schedule("Freeze", in_seconds=900)
        assert document(azure)[0] == document(azure)[0] == 2
        azure.start_event(event_id)
        incarnation, [event] = document(azure)
        assert (incarnation, event["EventStatus"], event["NotBefore"]) == (3, "Started", "")
        azure.start_event(event_id)
        assert document(azure)[0] == 3
        azure.finish(event_id)
        azure.finish(event_id)
        assert document(azure) == (4, [])

    @pytest.mark.parametrize("kind", sorted(MINIMUM_NOTICE_S))
    def test_it_starts_by_itself_when_its_time_has_come(
        self, kind: str, azure: FakeAzureMetadata, clock: ManualClock
    ):
        """The documented minimum, if nothing else is said."""
        azure.schedule(kind)
        clock.advance(MINIMUM_NOTICE_S[kind] - 0.1)
        assert [event["EventStatus"] for event in document(azure)[1]] == ["Scheduled"]
        clock.advance(0.1)
        assert [event["EventStatus"] for event in document(azure)[1]] == ["Started"]

    def test_it_can_be_stuck(self, azure: FakeAzureMetadata, clock: ManualClock):
        """Its time comes, and nothing happens."""
        azure.faults.stuck = True
        azure.schedule("Preempt")
        clock.advance(3600)
        incarnation, [event] = document(azure)
        assert (incarnation, event["EventStatus"]) == (2, "Scheduled")
        assert event["NotBefore"] == "Tue, 14 Nov 2023 22:13:50 GMT"

    def test_straight_to_started(self, azure: FakeAzureMetadata):
        """As with a failure of the hardware: one change, and no time."""
        azure.schedule("Reboot", started=True)
        incarnation, [event] = document(azure)
        assert (incarnation, event["EventStatus"], event["NotBefore"]) == (2, "Started", "")

    def test_what_is_due_later_is_seen_later(self, azure: FakeAzureMetadata, clock: ManualClock):
        """after_seconds counts from now, for the event and for its start; in_seconds does too."""
        event_id = azure.schedule("Terminate", after_seconds=10)
        azure.start_event(event_id, after_seconds=20)
        assert document(azure) == (1, [])
        clock.advance(10)
        incarnation, [event] = document(azure)
        assert (incarnation, event["NotBefore"]) == (2, "Tue, 14 Nov 2023 22:18:30 GMT")
        clock.advance(10)
        assert document(azure)[1][0]["EventStatus"] == "Started"

    def test_changes_come_in_the_order_of_their_times(self, azure: FakeAzureMetadata, clock: ManualClock):
        """However long nobody asked."""
        event_id = azure.schedule("Preempt", after_seconds=1, in_seconds=31)
        clock.advance(100)
        incarnation, [event] = document(azure)
        assert (incarnation, event["EventId"], event["EventStatus"]) == (3, event_id, "Started")

    def test_cancelling(self, azure: FakeAzureMetadata, clock: ManualClock):
        """One event, or all of them; what was to come later does not come."""
        first, second = azure.schedule("Preempt"), azure.schedule("Reboot", after_seconds=5)
        azure.cancel(second)
        clock.advance(10)
        assert [event["EventId"] for event in document(azure)[1]] == [first]
        azure.schedule("Freeze")
        azure.cancel()
        incarnation, events = document(azure)
        assert events == []
        assert incarnation == 5
        clock.advance(1000)
        assert document(azure) == (5, [])

    def test_other_vms_events_are_shown_too(self, azure: FakeAzureMetadata):
        """All of the placement group's."""
        azure.schedule("Preempt", resources=["trainer_5", "trainer_7"], source="User")
        _, [event] = document(azure)
        assert (event["Resources"], event["EventSource"]) == (["trainer_5", "trainer_7"], "User")

    def test_notice_is_the_short_form(self, azure: FakeAzureMetadata):
        """What `serve` and the command use, for each action."""
        for action in azure.actions:
            azure.notice(action, in_seconds=60)
        _, events = document(azure)
        assert [event["EventType"] for event in events] == list(azure.actions)
        assert {event["NotBefore"] for event in events} == {"Tue, 14 Nov 2023 22:14:20 GMT"}


class TestApproving:
    def test_an_approved_event_starts(self, azure: FakeAzureMetadata):
        """And may be approved again, by another VM, or when it is over."""
        event_id = azure.schedule("Terminate")
        assert approve(azure, event_id) == 200
        incarnation, [event] = document(azure)
        assert (incarnation, event["EventStatus"]) == (3, "Started")
        assert approve(azure, event_id) == 200
        azure.finish(event_id)
        assert approve(azure, event_id) == 200
        assert azure.approved == [event_id] * 3
        assert document(azure) == (4, [])

    def test_several_at_once(self, azure: FakeAzureMetadata):
        """The list of a request."""
        ids = [azure.schedule("Freeze"), azure.schedule("Reboot")]
        assert approve(azure, *ids) == 200
        assert {event["EventStatus"] for event in document(azure)[1]} == {"Started"}

    @pytest.mark.parametrize(
        "body",
        [
            "",
            "StartRequests",
            "[]",
            "{}",
            '{"StartRequests": 5}',
            '{"StartRequests": []}',
            '{"StartRequests": ["x"]}',
        ],
    )
    def test_a_malformed_approval(self, body: str, azure: FakeAzureMetadata):
        """Is refused, and starts nothing."""
        azure.schedule("Preempt")
        assert ask(azure, NOW, method="POST", body=body)[0] == 400
        assert document(azure)[1][0]["EventStatus"] == "Scheduled"

    @pytest.mark.parametrize("unknown", ["602d9444-d2cd-49c7-8624-8643e7171297", 5, None, []])
    def test_an_event_that_never_was(self, unknown: object, azure: FakeAzureMetadata):
        """One wrong id refuses the request."""
        event_id = azure.schedule("Preempt")
        assert approve(azure, event_id, unknown) == 400
        assert azure.approved == []


class TestInstance:
    def test_the_vm(self, azure: FakeAzureMetadata):
        """JSON without being asked; the name in a scale set is not the host's."""
        status, body, headers = ask(azure, INSTANCE + THIS_VM)
        compute = json.loads(body)["compute"]
        assert (status, headers["content-type"]) == (200, "application/json; charset=utf-8")
        assert (compute["name"], compute["priority"]) == ("trainer_6", "Spot")
        assert compute["osProfile"]["computerName"] == "trainer000006"

    def test_a_leaf(self, azure: FakeAzureMetadata):
        """As text only."""
        leaf = f"{INSTANCE}/compute/name{THIS_VM}"
        status, body, headers = ask(azure, leaf + "&format=text")
        assert (status, body, headers["content-type"]) == (200, "trainer_6", "text/plain; charset=utf-8")
        assert ask(azure, leaf)[0] == 400
        assert ask(azure, leaf + "&format=json")[0] == 400
        assert ask(azure, leaf + "&format=yaml")[0] == 400

    @pytest.mark.parametrize(
        ("place", "text"),
        [
            ("", "compute/\nnetwork/"),
            ("/network/interface", "0/"),
            ("/network/interface/0/macAddress", "0022480A0B0C"),
        ],
    )
    def test_text(self, place: str, text: str, azure: FakeAzureMetadata):
        """Names of folders have a slash, and members of lists are numbers."""
        assert ask(azure, f"{INSTANCE}{place}{THIS_VM}&format=text")[1] == text

    @pytest.mark.parametrize("place", ["/compute/nothing", "/network/interface/1", "/compute/name/first"])
    def test_what_is_not_there(self, place: str, azure: FakeAzureMetadata):
        """404."""
        assert ask(azure, f"{INSTANCE}{place}{THIS_VM}&format=text")[0] == 404

    def test_a_part_as_json(self, azure: FakeAzureMetadata):
        """Whatever is no leaf."""
        status, body, _ = ask(azure, f"{INSTANCE}/compute/osProfile{THIS_VM}&format=json")
        assert (status, json.loads(body)["adminUsername"]) == (200, "trainer")

    def test_a_version_is_needed(self, azure: FakeAzureMetadata):
        """Of those that the list of versions names, which needs none itself."""
        assert ask(azure, INSTANCE)[0] == 400
        assert ask(azure, f"{INSTANCE}?api-version=2020-07-01")[0] == 400
        listed = json.loads(ask(azure, VERSIONS)[1])["apiVersions"]
        assert listed == sorted({*EVENT_VERSIONS, *INSTANCE_VERSIONS})

    def test_another_name(self, clock: ManualClock):
        """For several VMs in one test."""
        with FakeAzureMetadata(clock=clock, name="solo") as fake:
            fake.schedule("Preempt")
            assert document(fake)[1][0]["Resources"] == ["solo"]
            assert ask(fake, f"{INSTANCE}/compute/name{THIS_VM}&format=text")[1] == "solo"


class TestFaults:
    def test_the_first_call_is_slow(self, azure: FakeAzureMetadata, clock: ManualClock):
        """By the fake's clock, and the first one only; questions about the VM are not concerned."""
        azure.faults.first_call_s = 120
        assert ask(azure, INSTANCE + THIS_VM)[0] == 200
        answers = list[int]()
        thread = threading.Thread(target=lambda: answers.append(ask(azure, NOW)[0]))
        thread.start()
        clock.await_waiters()
        clock.advance(119)
        assert answers == []
        clock.advance(1)
        thread.join(30)
        assert answers == [200]
        assert ask(azure, NOW)[0] == 200

    def test_stopping_lets_go_of_a_slow_call(self, clock: ManualClock):
        """The client sees the connection break."""
        fake, errors = FakeAzureMetadata(clock=clock), list[BaseException]()
        fake.faults.first_call_s = 120
        fake.start()

        def ask_once() -> None:
            try:
                ask(fake, NOW)
            except (OSError, http.client.HTTPException) as error:
                errors.append(error)

        thread = threading.Thread(target=ask_once)
        thread.start()
        clock.await_waiters()
        fake.stop()
        thread.join(30)
        assert len(errors) == 1

    def test_dates_in_the_other_form(self, azure: FakeAzureMetadata):
        """ISO 8601."""
        azure.faults.iso_dates = True
        azure.schedule("Preempt")
        assert document(azure)[1][0]["NotBefore"] == "2023-11-14T22:13:50Z"

    def test_the_real_rate(self, azure: FakeAzureMetadata, clock: ManualClock):
        """Five requests a second are answered."""
        azure.faults.most_per_s = MOST_PER_S
        assert [ask(azure, NOW)[0] for _ in range(6)] == [200] * 5 + [429]
        clock.advance(1)
        assert ask(azure, NOW)[0] == 200

    def test_what_is_said_instead(self, azure: FakeAzureMetadata):
        """Any document, or a status for questions about the VM."""
        azure.faults.document = "{}"
        assert ask(azure, NOW)[1] == "{}"
        azure.faults.refuse_instance = 410
        assert ask(azure, INSTANCE + THIS_VM)[0] == 410


def test_its_environment_points_a_program_at_it(azure: FakeAzureMetadata):
    """A subprocess with `environ` asks here, without a word of configuration."""
    azure.notice("Terminate", in_seconds=300)
    program = "from spotsafe.reclaim.detect import detect; print(detect()[0].poll().action)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **azure.environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "Terminate\n"
