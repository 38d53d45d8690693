"""Errors as values that can be sent: the class of our tree, the words and the attributes stay; nothing runs."""

from __future__ import annotations

import builtins
from typing import Any

import msgspec

from spotsafe import errors

_CAUSES = 5
_PLAIN = (str, int, float, type(None))


class SentError(msgspec.Struct, kw_only=True):
    """An error, by the name of its class."""

    kind: str
    text: str
    args: tuple[str | int | float | None, ...] | None
    """None if they are more than plain values."""
    attributes: dict[str, Any]
    cause: SentError | None


def sent_error(error: BaseException, *, depth: int = _CAUSES) -> SentError:
    """An error, and what caused it, as plain values."""
    cause, args = error.__cause__, error.args
    if isinstance(error, OSError) and error.errno is not None:
        args = (error.errno, error.strerror, error.filename)
    plain = all(isinstance(one, _PLAIN) for one in args)
    return SentError(
        kind=type(error).__name__,
        text=text_of(str(error)),
        args=tuple(text_of(one) if isinstance(one, str) else one for one in args) if plain else None,
        attributes={name: value for name, value in vars(error).items() if _is_plain(value)},
        cause=None if cause is None or not depth else sent_error(cause, depth=depth - 1),
    )


def error_of(sent: SentError) -> BaseException:
    """The error again: of the same class, if that is one of ours or of Python's, else a RuntimeError that names it."""
    error = _rebuilt(sent)
    if sent.cause is not None:
        error.__cause__ = error_of(sent.cause)
    return error


def _rebuilt(sent: SentError) -> BaseException:
    ours = getattr(errors, sent.kind, None)
    if isinstance(ours, type) and issubclass(ours, errors.SpotsafeError):
        try:
            error = ours(sent.text)
        except TypeError:  # one that makes its words of its attributes
            error = ours(**sent.attributes)
        vars(error).update(
            {name: tuple(one) if isinstance(one, list) else one for name, one in sent.attributes.items()}
        )
        return error
    kind = getattr(builtins, sent.kind, None)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        try:
            return kind(*((sent.text,) if sent.args is None else sent.args))
        except TypeError:  # a class that asks for what is no plain value
            pass
    return RuntimeError(f"{sent.kind}: {sent.text}")


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    return value == text_of(value) if isinstance(value, str) else isinstance(value, _PLAIN)


def text_of(text: str) -> str:
    """The text, with what cannot be sent, lone surrogates, spelled out."""
    return text.encode(errors="backslashreplace").decode()
