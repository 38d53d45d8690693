"""EC2's notices are seen through every failure of its metadata service that has been reported."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator

import pytest

from spotsafe.clock import Clock
from spotsafe.errors import WatcherUnavailable
from spotsafe.events import NoticeReceived, WatcherBlind, WatcherRecovered
from spotsafe.reclaim.aws import (
    ACTION_PATH,
    IPV4_ENDPOINT,
    IPV6_ENDPOINT,
    REBALANCE_PATH,
    TOKEN_PATH,
    AwsWatcher,
    endpoint_of,
    from_environment,
    is_ec2,
)
from spotsafe.reclaim.notice import NoticeKind
from spotsafe.reclaim.watcher import Watch
from spotsafe.testing.aws import INSTANCE_ACTION, REBALANCE, FakeAwsMetadata
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.sinks import RecordingSink
from tests.reclaim.clouds import CloudConformance, ServerErrors, send_through_a_proxy

WALL = 1_700_000_000.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall=WALL)


@pytest.fixture
def aws(clock: ManualClock) -> Iterator[FakeAwsMetadata]:
    with FakeAwsMetadata(clock=clock) as fake:
        yield fake


def watcher_of(fake: FakeAwsMetadata, clock: Clock | None = None, **environ: str) -> AwsWatcher:
    return AwsWatcher(environ={**fake.environ, **environ}, clock=clock, read_timeout_s=5.0)


@pytest.fixture
def watcher(aws: FakeAwsMetadata, clock: ManualClock) -> AwsWatcher:
    return watcher_of(aws, clock)


def asked(fake: FakeAwsMetadata) -> list[tuple[str, int | None]]:
    return [(f"{request.method} {request.path}", request.status) for request in fake.requests]


PUT, ACTION, RISK = f"PUT {TOKEN_PATH}", f"GET {ACTION_PATH}", f"GET {REBALANCE_PATH}"


class TestConformance(CloudConformance):
    make_fake = FakeAwsMetadata
    fake: FakeAwsMetadata

    def make_watcher(self) -> AwsWatcher:
        return watcher_of(self.fake)


class TestConformanceWithServerErrors(ServerErrors, TestConformance):
    """The same for a service that answers, but with errors."""


class TestNotice:
    def test_an_unmarked_instance_has_no_notice(self, aws: FakeAwsMetadata, watcher: AwsWatcher):
        """404 for both keys is the normal state, asked for with one token for many polls."""
        assert [watcher.poll(), watcher.poll()] == [None, None]
        assert asked(aws) == [(PUT, 200), (ACTION, 404), (RISK, 404), (ACTION, 404), (RISK, 404)]

    @pytest.mark.parametrize("action", ["terminate", "stop"])
    def test_a_marked_instance_has_its_deadline(self, action: str, aws: FakeAwsMetadata, watcher: AwsWatcher):
        """The action is a RECLAIM with the time that is left by the service's clock."""
        aws.notice(action, in_seconds=90)
        notice = watcher.poll()
        assert notice is not None
        assert (notice.source, notice.kind, notice.action) == ("aws", NoticeKind.RECLAIM, action)
        assert (notice.received, notice.deadline) == (1000.0, 1090.0)

    def test_hibernation_begins_at_once(self, aws: FakeAwsMetadata, watcher: AwsWatcher):
        """Whatever time it names, there are no two minutes."""
        aws.notice("hibernate", in_seconds=120)
        notice = watcher.poll()
        assert notice is not None
        assert notice.deadline == notice.received

    def test_a_rebalance_recommendation_is_a_risk(self, aws: FakeAwsMetadata, watcher: AwsWatcher):
        """Most instances outlive it, so it must not stop anything."""
        aws.rebalance()
        notice = watcher.poll()
        assert notice is not None
        assert (notice.kind, notice.action, notice.deadline) == (NoticeKind.RISK, "rebalance", None)

    def test_an_interruption_goes_before_a_recommendation(self, aws: FakeAwsMetadata, watcher: AwsWatcher):
        """With both present the RECLAIM is reported, and the RISK again once it is withdrawn."""
        aws.rebalance()
        aws.notice()
        first = watcher.poll()
        aws.set_key(INSTANCE_ACTION, None)
        second = watcher.poll()
        assert first is not None
        assert second is not None
        assert (first.kind, second.kind) == (NoticeKind.RECLAIM, NoticeKind.RISK)

    def test_the_deadline_does_not_move_while_time_passes(
        self, aws: FakeAwsMetadata, watcher: AwsWatcher, clock: ManualClock
    ):
        """The same announcement a minute later is the same notice, past its deadline too."""
        aws.notice(in_seconds=60)
        first = watcher.poll()
        clock.advance(59)
        assert watcher.poll() == first
        clock.advance(600)
        assert watcher.poll() == first

    def test_a_time_that_is_moved_is_a_new_notice(
        self, aws: FakeAwsMetadata, watcher: AwsWatcher, clock: ManualClock
    ):
        """EC2's time is approximate; what it says last counts."""
        aws.notice(in_seconds=120)
        watcher.poll()
        clock.advance(1)
        aws.notice(in_seconds=30)
        notice = watcher.poll()
        assert notice is not None
        assert notice.deadline == 1031.0


class TestClocks:
    @pytest.mark.parametrize("skew_s", [-100_000.0, -600.0, 600.0, 100_000.0])
    def test_a_wrong_wall_clock_of_this_machine_changes_nothing(self, skew_s: float, aws: FakeAwsMetadata):
        """The time left is counted by the service's own clock, which its answers carry."""
        aws.notice(in_seconds=90)
        notice = watcher_of(aws, ManualClock(wall=WALL + skew_s)).poll()
        assert notice is not None
        assert notice.deadline == 1090.0

    def test_more_than_two_minutes_are_not_believed(self, aws: FakeAwsMetadata, watcher: AwsWatcher):
        """No interruption is announced earlier than that, whatever the time says."""
        aws.notice(in_seconds=4000)
        notice = watcher.poll()
        assert notice is not None
        assert notice.deadline == 1120.0

    def test_a_time_just_past_is_now(self, aws: FakeAwsMetadata, watcher: AwsWatcher):
        """EC2 is late by seconds often; that is a notice without time left."""
        aws.notice(in_seconds=-20)
        notice = watcher.poll()
        assert notice is not None
        assert notice.deadline == 1000.0

    def test_a_time_long_past_is_stale(self, aws: FakeAwsMetadata, watcher: AwsWatcher):
        """An interruption that failed leaves its key behind; it must not end every start from then on."""
        aws.notice(in_seconds=-3600)
        assert [watcher.poll(), watcher.poll()] == [None, None]

    def test_a_stale_interruption_does_not_hide_a_recommendation(
        self, aws: FakeAwsMetadata, watcher: AwsWatcher, clock: ManualClock
    ):
        """Ignoring the one, the other is still looked at."""
        aws.notice(in_seconds=-3600)
        aws.rebalance()
        first = watcher.poll()
        assert first is not None
        assert first.kind is NoticeKind.RISK
        clock.advance(1.0)
        assert watcher.poll() == first

    @pytest.mark.parametrize("time_", [None, "", "soon", 12, "2017-99-99T00:00:00Z"])
    def test_a_notice_without_a_usable_time_is_still_a_notice(
        self, time_: object, aws: FakeAwsMetadata, watcher: AwsWatcher
    ):
        """The action is certain; the deadline is then unknown."""
        aws.set_key(INSTANCE_ACTION, json.dumps({"action": "terminate", "time": time_}))
        notice = watcher.poll()
        assert notice is not None
        assert notice.deadline is None


class TestTokens:
    def test_a_token_is_renewed_before_it_ends(
        self, aws: FakeAwsMetadata, watcher: AwsWatcher, clock: ManualClock
    ):
        """After six hours there is a new token, and no request was refused for it."""
        watcher.poll()
        clock.advance(21600 - 61)
        watcher.poll()
        clock.advance(2)
        watcher.poll()
        assert [status for what, status in asked(aws) if what == PUT] == [200, 200]
        assert 401 not in [status for _, status in asked(aws)]

    def test_an_expired_token_is_replaced_once_and_the_poll_goes_on(
        self, aws: FakeAwsMetadata, watcher: AwsWatcher
    ):
        """401 (instance restored, clock jumped): drop the token, ask for one more, and see the notice."""
        watcher.poll()
        aws.expire_tokens()
        aws.notice()
        assert watcher.poll() is not None
        assert asked(aws)[3:] == [(ACTION, 401), (PUT, 200), (ACTION, 200)]

    def test_a_service_that_refuses_every_token_is_unavailable_and_not_asked_in_a_loop(
        self, aws: FakeAwsMetadata, watcher: AwsWatcher
    ):
        """401 for ever: two tries a poll and an error, and all is well when it ends."""
        aws.faults.refuse_tokens = True
        aws.notice()
        for count in (1, 2):
            with pytest.raises(WatcherUnavailable, match="401"):
                watcher.poll()
            assert len(aws.requests) == 4 * count
        aws.faults.refuse_tokens = False
        assert watcher.poll() is not None

    def test_tokens_that_die_in_the_middle_of_a_poll_are_replaced(
        self, aws: FakeAwsMetadata, watcher: AwsWatcher
    ):
        """The second key's 401 is treated like the first's."""
        watcher.poll()
        aws.expire_tokens(after_uses=1)
        aws.rebalance()
        assert watcher.poll() is not None
        assert asked(aws)[3:] == [(ACTION, 404), (RISK, 401), (PUT, 200), (RISK, 200)]

    @pytest.mark.parametrize("token", ["", "line\r\nbreak", "\u00e9"])
    def test_what_is_no_token_is_not_sent_on(self, token: str, aws: FakeAwsMetadata, watcher: AwsWatcher):
        """A body that cannot stand in a header is an error of the service."""
        aws.faults.token = token
        with pytest.raises(WatcherUnavailable, match="no token"):
            watcher.poll()

    def test_another_lifetime_than_asked_for_is_respected(self, aws: FakeAwsMetadata, clock: ManualClock):
        """A short-lived token is renewed in its own time."""
        watcher = AwsWatcher(aws.url, clock=clock, environ={}, token_ttl_s=10)
        watcher.poll()
        clock.advance(9.5)
        watcher.poll()
        assert [status for what, status in asked(aws) if what == PUT] == [200, 200]


class TestWithoutTokens:
    """IMDSv1, where a token cannot be had."""

    @pytest.mark.parametrize("status", [403, 404, 405])
    def test_where_tokens_are_not_offered_it_asks_without(self, status: int, clock: ManualClock):
        """An old or imitated service: requests go without a token, and the PUT is not repeated at each poll."""
        with FakeAwsMetadata(clock=clock, tokens_required=False) as aws:
            aws.faults.refuse_put = status
            aws.notice()
            watcher = watcher_of(aws, clock)
            assert watcher.poll() is not None
            assert watcher.poll() is not None
            assert asked(aws) == [(PUT, status), (ACTION, 200), (ACTION, 200)]

    def test_beyond_the_hop_limit_it_asks_without(self, clock: ManualClock):
        """From a container the PUT's answer never comes, a GET's does: it costs one timeout."""
        with FakeAwsMetadata(clock=clock, tokens_required=False) as aws:
            aws.faults.drop_put = True
            aws.notice()
            watcher = AwsWatcher(aws.url, environ={}, clock=clock, read_timeout_s=0.2)
            assert watcher.poll() is not None
            assert watcher.poll() is not None
            assert asked(aws) == [(PUT, None), (ACTION, 200), (ACTION, 200)]

    def test_a_token_is_tried_again_after_a_while(self, clock: ManualClock):
        """A token that could not be had for a moment is had later."""
        with FakeAwsMetadata(clock=clock, tokens_required=False) as aws:
            aws.faults.refuse_put = 404
            watcher = watcher_of(aws, clock)
            watcher.poll()
            aws.faults.refuse_put = None
            clock.advance(301)
            watcher.poll()
            assert asked(aws)[3:5] == [(PUT, 200), (ACTION, 404)]

    def test_where_both_are_closed_it_says_what_to_do(self, aws: FakeAwsMetadata, clock: ManualClock):
        """No token and none-less requests refused: the hop limit is named, with the command."""
        aws.faults.drop_put = True
        watcher = AwsWatcher(aws.url, environ={}, clock=clock, read_timeout_s=0.2)
        with pytest.raises(WatcherUnavailable, match="--http-put-response-hop-limit 2"):
            watcher.poll()

    def test_the_sdk_variable_forbids_it(self, clock: ManualClock):
        """AWS_EC2_METADATA_V1_DISABLED: no request without a token, however open the service is."""
        with FakeAwsMetadata(clock=clock, tokens_required=False) as aws:
            aws.faults.refuse_put = 403
            watcher = watcher_of(aws, clock, AWS_EC2_METADATA_V1_DISABLED="True")
            with pytest.raises(WatcherUnavailable, match="hop limit"):
                watcher.poll()
            assert asked(aws) == [(PUT, 403)]


class TestFailures:
    @pytest.mark.parametrize("status", [400, 429, 500, 503])
    def test_an_error_status_is_unavailable_and_then_forgotten(
        self, status: int, aws: FakeAwsMetadata, watcher: AwsWatcher
    ):
        """A burst of errors, for the token and for a key, hides nothing once it is over."""
        aws.notice()
        for _ in range(3):
            aws.fail_next(status)
            with pytest.raises(WatcherUnavailable, match=str(status)):
                watcher.poll()
        assert watcher.poll() is not None
        aws.fail_next(status)
        with pytest.raises(WatcherUnavailable, match=str(status)):
            watcher.poll()
        assert watcher.poll() is not None

    @pytest.mark.parametrize("fault", ["truncate_json", "cut_connection"])
    def test_half_a_notice_is_not_a_notice(self, fault: str, aws: FakeAwsMetadata, watcher: AwsWatcher):
        """What is cut is asked for again, and believed when it is whole."""
        watcher.poll()
        aws.notice()
        setattr(aws.faults, fault, True)
        with pytest.raises(WatcherUnavailable, match=r"."):
            watcher.poll()
        setattr(aws.faults, fault, False)
        assert watcher.poll() is not None

    @pytest.mark.parametrize(
        "body", ["", "none", "[]", "3", '"terminate"', "{}", '{"action": 1}', '{"action": "nap"}']
    )
    @pytest.mark.parametrize("key", [INSTANCE_ACTION, REBALANCE])
    def test_a_body_of_another_kind_is_unavailable(
        self, body: str, key: str, aws: FakeAwsMetadata, watcher: AwsWatcher
    ):
        """200 with something else than the documented JSON: a captive portal, an imitation, a change."""
        aws.set_key(key, body)
        for _ in range(2):
            with pytest.raises(WatcherUnavailable, match=r"."):
                watcher.poll()

    def test_a_failing_second_key_does_not_hide_the_first(self, aws: FakeAwsMetadata, watcher: AwsWatcher):
        """The interruption is asked for first, so trouble with recommendations never costs it."""
        aws.set_key(REBALANCE, "nonsense")
        with pytest.raises(WatcherUnavailable):
            watcher.poll()
        aws.notice()
        assert watcher.poll() is not None

    def test_it_bypasses_proxies_that_would_answer_for_it(
        self, aws: FakeAwsMetadata, watcher: AwsWatcher, monkeypatch: pytest.MonkeyPatch
    ):
        """A proxy with another machine's metadata, which would announce this one's end, is never asked."""
        with FakeAwsMetadata(tokens_required=False) as proxy:
            proxy.notice()
            send_through_a_proxy(monkeypatch, proxy.url)
            assert watcher.poll() is None
            assert proxy.requests == []

    def test_it_sends_no_forwarding_header(self, aws: FakeAwsMetadata, watcher: AwsWatcher):
        """The service refuses requests that look forwarded."""
        watcher.poll()
        assert all("x-forwarded-for" not in request.headers for request in aws.requests)

    def test_a_watch_lives_through_all_of_it(self, aws: FakeAwsMetadata, clock: ManualClock):
        """Errors, a dead service, expired tokens: blind twice, recovered twice, and the notice is seen."""
        sink = RecordingSink()
        watch = Watch([watcher_of(aws, clock)], emit=sink.emit, clock=clock)
        aws.fail_next(503, times=5)
        watch.start()
        pump(clock, until=lambda: len(sink.of(WatcherRecovered)) == 1)
        aws.stop()
        pump(clock, until=lambda: len(sink.of(WatcherBlind)) == 2)
        aws.expire_tokens()
        aws.notice()
        aws.start()
        pump(clock, until=lambda: len(sink.of(NoticeReceived)) == 1)
        assert watch.notice is not None
        pump(clock, until=lambda: len(sink.of(WatcherRecovered)) == 2)
        watch.stop()
        assert len(sink.of(WatcherBlind)) == 2


def pump(clock: ManualClock, *, until: Callable[[], bool]) -> None:
    """Let the clock run until something has happened."""
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline
        clock.await_waiters(1)
        clock.advance(5.0)
        time.sleep(0.001)


class TestEnvironment:
    def test_the_endpoint_follows_the_sdks_variables(self):
        """A custom endpoint wins over the mode; the default is the IPv4 address."""
        name, mode = "AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE"
        assert endpoint_of({}) == IPV4_ENDPOINT
        assert endpoint_of({mode: "IPv6"}) == IPV6_ENDPOINT
        assert endpoint_of({mode: "ipv4"}) == endpoint_of({mode: ""}) == IPV4_ENDPOINT
        assert endpoint_of({name: "http://127.0.0.1:1/", mode: "ipv6"}) == "http://127.0.0.1:1/"
        with pytest.raises(ValueError, match="ENDPOINT_MODE is 'ipv5'"):
            endpoint_of({mode: "ipv5"})

    def test_firmware_or_endpoint_turn_it_on_and_the_switch_off(self, clock: ManualClock):
        """No network is needed to know; DISABLED wins over everything."""
        endpoint = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"}
        off = {"AWS_EC2_METADATA_DISABLED": "TRUE"}
        on_ec2 = {"sys_vendor": "Amazon EC2"}.get

        def nowhere(field: str) -> str:
            return ""

        def ec2(field: str) -> str:
            return on_ec2(field, "")

        assert from_environment({}, dmi=nowhere, clock=clock) is None
        assert from_environment(endpoint, dmi=nowhere, clock=clock).endpoint == "http://127.0.0.1:1"
        assert from_environment({}, dmi=ec2, clock=clock).endpoint == IPV4_ENDPOINT
        assert from_environment({**endpoint, **off}, dmi=ec2, clock=clock) is None

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"sys_vendor": "Amazon EC2", "bios_vendor": "Amazon EC2"}, True),
            ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, True),
            ({"sys_vendor": "Xen", "bios_version": "4.14"}, False),
            ({"sys_vendor": "Google"}, False),
            ({"sys_vendor": "Microsoft Corporation"}, False),
            ({}, False),
        ],
    )
    def test_ec2_is_told_by_its_firmware(self, fields: dict[str, str], expected: bool):
        """Nitro, metal and Xen instances say Amazon somewhere; others do not."""
        assert is_ec2(lambda field: fields.get(field, "")) is expected

    def test_the_process_environment_is_the_default(
        self, aws: FakeAwsMetadata, monkeypatch: pytest.MonkeyPatch
    ):
        """What `FakeAwsMetadata.environ` says is enough for a program to find the fake."""
        for name, value in aws.environ.items():
            monkeypatch.setenv(name, value)
        assert AwsWatcher().endpoint == os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"]
