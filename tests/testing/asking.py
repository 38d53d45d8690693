"""One request to a fake, by a client that is not ours."""

from __future__ import annotations

import http.client
from collections.abc import Mapping

from spotsafe.testing.metadata import FakeMetadata


def ask(
    fake: FakeMetadata,
    method: str,
    path: str,
    headers: Mapping[str, str],
    *,
    body: str | None = None,
    timeout: float = 30.0,
) -> tuple[int, str, dict[str, str]]:
    """Status, body, and headers by their names in lower case."""
    connection = http.client.HTTPConnection(fake.url.removeprefix("http://"), timeout=timeout)
    try:
        connection.request(method, path, body, headers=dict(headers))
        reply = connection.getresponse()
        return reply.status, reply.read().decode(), {k.lower(): v for k, v in reply.getheaders()}
    finally:
        connection.close()
