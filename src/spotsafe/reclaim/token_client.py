"""Reading keys of a metadata service that gives out session tokens, as those of AWS and Alibaba do.

``PUT`` gives a token that lives for a while, and requests carry it. Where its answer may not travel far enough (the hop
limit of a container's network) it never comes; one then falls back to requests without one, where they are allowed. 401
means that a token is missing, expired or foreign.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from spotsafe.clock import Clock
from spotsafe.errors import WatcherUnavailable
from spotsafe.reclaim.http import LocalHttp, Reply

_WITHOUT_FOR_S = 300.0
_NO_TOKEN_STATUSES = frozenset({403, 404, 405})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """How one cloud gives out its tokens."""

    path: str
    header: str
    """Of requests, with the token."""
    ttl_header: str
    """Of the request for one and of its answer, with its lifetime in seconds."""
    locked_out: str
    """What is wrong, and what to do, where no token can be had and none is not allowed."""


class TokenClient:
    """Asks one service. One thread asks; any thread may `close`.

    Args:
        http: the way to the service.
        source: the watcher's name, for errors.
        rules: the cloud's.
        clock: for token lifetimes.
        ttl_s: lifetime to ask for, in seconds.
        read_timeout_s: seconds.
        without: whether requests without a token are allowed.
    """

    def __init__(
        self,
        http: LocalHttp,
        *,
        source: str,
        rules: TokenRules,
        clock: Clock,
        ttl_s: int,
        read_timeout_s: float,
        without: bool = True,
    ) -> None:
        self._http, self._source, self._rules, self._clock = http, source, rules, clock
        self._ttl_s, self._read_timeout_s, self._without = ttl_s, read_timeout_s, without
        self._token: str | None = None
        self._refresh_at = float("-inf")

    @property
    def endpoint(self) -> str:
        """The service's URL."""
        return self._http.endpoint

    def close(self) -> None:
        """End a request in progress."""
        self._http.close()

    def get(self, path: str) -> Reply | None:
        """One key; None where the service says that there is none. A refused token is replaced once.

        Raises:
            WatcherUnavailable: no answer, or one that forbids asking.
        """
        reply = self._ask("GET", path, self._token_header())
        if reply.status == 401:
            self._refresh_at = float("-inf")
            reply = self._ask("GET", path, self._token_header())
        if reply.status == 404:
            return None
        if reply.status == 200:
            return reply
        if reply.status == 401 and self._token is None:
            raise self.unavailable(self._rules.locked_out)
        self._refresh_at = float("-inf")
        raise self.unavailable(f"{path} answered {reply.status}")

    def unavailable(self, what: str) -> WatcherUnavailable:
        """The error that says what is wrong, and of whom."""
        return WatcherUnavailable(f"{self.endpoint}: {what}", source=self._source)

    def _token_header(self) -> dict[str, str]:
        """The header with a token that is still good for a while; without one where that has to do."""
        if self._clock.monotonic() >= self._refresh_at:
            self._token = self._new_token()
        return {} if self._token is None else {self._rules.header: self._token}

    def _new_token(self) -> str | None:
        path, headers = self._rules.path, {self._rules.ttl_header: str(self._ttl_s), "Content-Length": "0"}
        try:
            reply = self._ask("PUT", path, headers)
        except WatcherUnavailable as error:
            if not isinstance(error.__cause__, TimeoutError):
                raise
            self._do_without()
            return None
        if reply.status in _NO_TOKEN_STATUSES:
            self._do_without()
            return None
        token = reply.body.decode("latin-1")
        if reply.status != 200 or not token or not (token.isascii() and token.isprintable()):
            raise self.unavailable(f"{path} answered {reply.status} and no token")
        ttl_s = self._lifetime(reply)
        self._refresh_at = self._clock.monotonic() + ttl_s - min(60.0, ttl_s / 10)
        return token

    def _do_without(self) -> None:
        """For a while: each try for a token may cost a whole time-out."""
        if not self._without:
            raise self.unavailable(self._rules.locked_out)
        self._refresh_at = self._clock.monotonic() + _WITHOUT_FOR_S

    def _lifetime(self, reply: Reply) -> float:
        with contextlib.suppress(ValueError):
            return max(1.0, float(int(reply.headers.get(self._rules.ttl_header.lower(), ""))))
        return float(self._ttl_s)

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> Reply:
        try:
            return self._http.request(method, path, headers=headers, read_timeout_s=self._read_timeout_s)
        except OSError as error:
            raise self.unavailable(f"{method} {path}: {str(error) or type(error).__name__}") from error
