"""Times of services are read in each form in which they come, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from spotsafe.reclaim.http import Reply
from spotsafe.reclaim.times import server_time, wall_seconds


@pytest.mark.parametrize(
    "text",
    [
        "2023-11-14T22:13:20Z",
        "2023-11-14T22:13:20",
        "2023-11-14 22:13:20",
        "2023-11-14T23:13:20+01:00",
        "2023-11-14T22:13:20.1234567Z",
        " 2023-11-14T22:13:20Z\n",
        "Tue, 14 Nov 2023 22:13:20 GMT",
        "Tue, 14 Nov 2023 22:13:20 -0000",
        "Tue, 14 Nov 2023 23:13:20 +0100",
    ],
)
def test_the_forms_of_a_time(text: str):
    """UTC where no zone is named; parts of a second do not matter."""
    assert wall_seconds(text) == 1_700_000_000.0


@pytest.mark.parametrize(
    "text", [None, 12, [], "", " ", "soon", "2023-99-99T00:00:00Z", "Tue, 99 Nov 2023 22:13:20 GMT"]
)
def test_what_is_no_time(text: object):
    """None, whatever it is."""
    assert wall_seconds(text) is None


def test_the_services_clock():
    """The date of an answer; without one the other clock."""
    dated = Reply(200, {"date": "Tue, 14 Nov 2023 22:13:20 GMT"}, b"")
    assert server_time(dated, else_=5.0) == 1_700_000_000.0
    assert server_time(Reply(200, {}, b""), else_=5.0) == 5.0
    assert server_time(Reply(200, {"date": "now"}, b""), else_=5.0) == 5.0
