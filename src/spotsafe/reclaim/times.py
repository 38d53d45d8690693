"""The times that metadata services write."""

from __future__ import annotations

import contextlib
import re
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from spotsafe.reclaim.http import Reply


def wall_seconds(text: object) -> float | None:
    """Seconds since 1970 of a time as services write it; None if it is none. UTC where it names no zone.

    Args:
        text: ISO 8601 like ``2017-09-18T08:22:00Z``, or a date of HTTP like ``Mon, 18 Sep 2017 08:22:00 GMT``. Parts
            of a second are left out: Python 3.10 does not read all of their forms.
    """
    if not isinstance(text, str):
        return None
    plain = re.sub(r"\.\d+", "", text.strip())
    with contextlib.suppress(ValueError, OverflowError):
        return _utc(datetime.fromisoformat(plain.replace("Z", "+00:00"))).timestamp()
    with contextlib.suppress(ValueError, OverflowError, IndexError):
        return _utc(parsedate_to_datetime(plain)).timestamp()
    return None


def server_time(reply: Reply, *, else_: float) -> float:
    """The service's own clock, which its times are by; this machine's may be wrong by minutes.

    Args:
        reply: any answer of the service.
        else_: Unix seconds, for an answer without a date.
    """
    said = wall_seconds(reply.headers.get("date"))
    return else_ if said is None else said


def _utc(at: datetime) -> datetime:
    return at if at.tzinfo else at.replace(tzinfo=timezone.utc)
