"""Whatever an event of Azure says and whenever it is seen, the verdict keeps what a notice promises."""

from __future__ import annotations

import json
import random

import pytest

from spotsafe.reclaim.azure_events import (
    FARTHEST_S,
    LONGEST_NOTICE_S,
    ScheduledEvent,
    Sighting,
    read_document,
    verdict,
)
from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice

KINDS = ("Preempt", "Terminate", "Reboot", "Redeploy", "Freeze", "Evaporate")
NEAR_S = 120.0
SEEDS = range(500)


def sighting(random: random.Random) -> Sighting:
    """Any that a watcher can make."""
    since = random.uniform(0.0, 1e6)
    return Sighting(
        event=ScheduledEvent(
            id="1",
            kind=random.choice(KINDS),
            resources=("trainer_6",),
            started=random.random() < 0.3,
            not_before="",
            duration_s=random.choice([None, -1, 0, 9]),
        ),
        since=since,
        at=since + random.choice([0.0, 3.0, 4000.0]),
        left_s=random.choice([None, -1e5, -601.0, -1.0, 0.0, 20.0, 119.0, 121.0, 1e4, 1e7]),
        at_first_look=random.random() < 0.3,
    )


def verdicts(seen: Sighting) -> list[ReclaimNotice | None]:
    """As polls get them, one after the other, until long after everything."""
    moments = [0.0, 1.0, 100.0, 1000.0, 1e4, 1e5, 1e8]
    return [verdict(seen, now=seen.at + each, near_s=NEAR_S, source="azure") for each in moments]


@pytest.mark.parametrize("seeds", [pytest.param(range(at, at + 50), id=str(at)) for at in SEEDS[::50]])
def test_a_verdict_is_a_notice_that_keeps_its_word(seeds: range):
    """It ends after it was learned and within what is promised; a risk may become certain, and then stays as it is."""
    for each in seeds:
        seen = sighting(random.Random(each))
        found = verdicts(seen)
        if None in found:
            assert seen.event.kind == "Freeze"
            assert set(found) == {None}
            continue
        certain = [notice for notice in found if notice.kind is NoticeKind.RECLAIM]
        risks = [notice for notice in found if notice.kind is NoticeKind.RISK]
        assert found == risks + certain
        assert len(set(certain)) <= 1
        assert len(set(risks)) <= 1
        for notice in set(found):
            assert notice.action == seen.event.kind
            assert notice.received >= seen.since
            longest = FARTHEST_S if notice in risks else LONGEST_NOTICE_S[seen.event.kind]
            start = seen.at if notice in risks else notice.received
            assert notice.deadline is None or start <= notice.deadline <= start + longest


@pytest.mark.parametrize("kind", ["Freeze", "Evaporate"])
def test_only_what_ends_the_process_is_ever_certain(kind: str):
    """Of the other kinds none stops anything."""
    for seed in SEEDS:
        seen = sighting(random.Random(seed))
        if seen.event.kind == kind:
            assert all(notice is None or notice.kind is NoticeKind.RISK for notice in verdicts(seen))


def test_a_document_is_read_whole_or_not_at_all():
    """Cut anywhere it is a ValueError, never fewer events."""
    event = {
        "EventId": "1",
        "EventType": "Preempt",
        "EventStatus": "Started",
        "Resources": ["trainer_6"],
        "NotBefore": "",
    }
    text = json.dumps({"Events": [event, event], "DocumentIncarnation": 12})
    assert len(read_document(text).events) == 2
    for end in range(len(text)):
        with pytest.raises(ValueError, match=r"."):
            read_document(text[:end])
