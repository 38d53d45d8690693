"""What the stand-ins for metadata services with session tokens share: those of AWS and of Alibaba."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from spotsafe.clock import Clock
from spotsafe.testing.metadata import Answer, FakeMetadata, Faults, Request

TOKEN_PATH = "/latest/api/token"  # noqa: S105 - a path, not a secret
LONGEST_TTL_S = 21600


@dataclass(slots=True, kw_only=True)
class TokenFaults(Faults):
    """What goes wrong, until it is set otherwise. The defaults are a service in good health."""

    drop_put: bool = False
    """Token requests are never answered, as beyond the hop limit of a container's network."""
    refuse_put: int | None = None
    """Token requests are answered with this status: 403 where the service is off, 404 or 405 elsewhere."""
    refuse_tokens: bool = False
    """Every token is refused with 401, fresh ones too."""
    token: str | None = None
    """Given out in place of a real token."""


@dataclass(slots=True)
class _Value:
    body: str
    visible_from: float


class FakeTokenMetadata(FakeMetadata):
    """Keys, and the tokens that they are read with.

    Attributes:
        faults: what goes wrong; set its members at any time.
    """

    faults: TokenFaults
    token_header: str
    """Of requests, with the token."""
    ttl_header: str
    """Of the request for one and of its answer, with its lifetime in seconds."""
    keys_below = re.compile(r"/latest/meta-data/(.+)")
    """A path of a key, and the key in it."""

    def __init__(self, *, clock: Clock | None = None, tokens_required: bool, port: int = 0) -> None:
        """Nothing listens yet.

        Args:
            clock: for times in answers, for token lifetimes and for what becomes visible later.
            tokens_required: False answers without a token, too.
            port: to listen on; 0 takes a free one.
        """
        super().__init__(clock=clock, port=port)
        self.faults = TokenFaults()
        self._values: dict[str, _Value] = {}
        self._tokens: dict[str, float] = {}
        self._uses_left: int | None = None
        self._tokens_required = tokens_required

    def set_key(self, key: str, body: str | None, *, after_seconds: float = 0.0) -> None:
        """Set any key below ``meta-data/``; None removes it, so that it answers 404."""
        with self.lock:
            if body is None:
                self._values.pop(key, None)
            else:
                self._values[key] = _Value(body, self.clock.monotonic() + after_seconds)

    def expire_tokens(self, *, after_uses: int = 0) -> None:
        """Refuse all tokens given out so far with 401, after `after_uses` more uses."""
        with self.lock:
            self._uses_left = after_uses or None
            if after_uses == 0:
                self._tokens.clear()

    def answer(self, request: Request) -> Answer | None:
        """What the service in good health says; None: nothing, ever."""
        if request.method == "PUT":
            return None if self.faults.drop_put else self._give_token(request.path, request.headers)
        if request.method in {"GET", "HEAD"}:
            return self._read_key(request.path, request.headers)
        return Answer(405)

    def _give_token(self, path: str, headers: Mapping[str, str]) -> Answer:
        if self.faults.refuse_put is not None:
            return Answer(self.faults.refuse_put)
        if path != TOKEN_PATH or "x-forwarded-for" in headers:
            return Answer(403)
        ttl = headers.get(self.ttl_header.lower(), "")
        if not re.fullmatch("[0-9]{1,5}", ttl) or not 1 <= int(ttl) <= LONGEST_TTL_S:
            return Answer(400)
        token = secrets.token_urlsafe(40) + "==" if self.faults.token is None else self.faults.token
        self._tokens[token] = self.clock.monotonic() + int(ttl)
        return Answer(200, token, {self.ttl_header: ttl})

    def _read_key(self, path: str, headers: Mapping[str, str]) -> Answer:
        token = headers.get(self.token_header.lower())
        if (token is not None or self._tokens_required) and not self._accepts(token):
            return Answer(401)
        found = self.keys_below.fullmatch(path)
        value = self._values.get(found.group(1)) if found else None
        if value is None or self.clock.monotonic() < value.visible_from:
            return Answer(404)
        return Answer(200, value.body)

    def _accepts(self, token: str | None) -> bool:
        expires = None if token is None else self._tokens.get(token)
        if expires is None or self.clock.monotonic() >= expires or self.faults.refuse_tokens:
            return False
        if self._uses_left is not None:
            if self._uses_left == 0:
                self._tokens.clear()
                self._uses_left = None
                return False
            self._uses_left -= 1
        return True
