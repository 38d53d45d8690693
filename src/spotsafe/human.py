"""Numbers and texts as people read them: bytes, durations, ages, counts. For the console and the command line."""

from __future__ import annotations

import re

_SIZES = ("kB", "MB", "GB", "TB", "PB", "EB")
_DAY, _HOUR, _MINUTE = 86_400, 3_600, 60
_STEERING = re.compile("[\\x00-\\x09\\x0b-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
"""Control characters but the line feed, what turns the direction of text around, and half characters."""


def printable(text: str) -> str:
    r"""Text that may be somebody else's, with what steers a terminal or cannot be written spelled out: ``\x1b``."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The same on one line, whatever is in it."""
    return printable(" ".join(text.split()))


def size(nbytes: float) -> str:
    """Bytes in decimal units, as stores and disks count them: ``812 bytes``, ``1.5 GB``."""
    if nbytes < 1000:
        return count(int(nbytes), "byte")
    value, step = nbytes / 1000, 0
    while value >= 999.5 and step < len(_SIZES) - 1:
        value, step = value / 1000, step + 1
    return f"{_short(value)} {_SIZES[step]}"


def duration(seconds: float) -> str:
    """Seconds in the two largest units that matter: ``0.3 s``, ``12 s``, ``5 min``, ``1 h 20 min``."""
    if seconds < 0.0005:
        return "0 s"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.1f}".removesuffix(".0") + " s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds >= 2 * _DAY:
        return _pair(seconds, _DAY, "d", _HOUR, "h")
    if seconds >= _HOUR - _MINUTE / 2:
        return _pair(seconds, _HOUR, "h", _MINUTE, "min")
    return _pair(seconds, _MINUTE, "min", 1 if seconds < 10 * _MINUTE else _MINUTE, "s")


def age(seconds: float) -> str:
    """How long ago: ``5 min ago``. Less than a second, or a clock that disagrees, is ``just now``."""
    return "just now" if seconds < 1 else f"{duration(seconds)} ago"


def count(number: int, noun: str) -> str:
    """A number with its noun: ``1 step``, ``10,000 steps``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _pair(seconds: float, large: int, large_unit: str, small: int, small_unit: str) -> str:
    """Rounded to the smaller unit, which is left out where it is zero."""
    first, rest = divmod(round(seconds / small) * small, large)
    second = rest // small
    return f"{first} {large_unit} {second} {small_unit}" if second else f"{first} {large_unit}"


def _short(value: float) -> str:
    """Three digits at most, without a useless ``.0``."""
    return f"{value:.1f}".removesuffix(".0") if value < 99.95 else f"{value:.0f}"
