"""The options of `spotsafe.session`, checked once, as one value."""

from __future__ import annotations

import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal, cast, get_args

from spotsafe.clock import Clock, SystemClock
from spotsafe.errors import EXIT_RECLAIMED
from spotsafe.events import EventSink
from spotsafe.policy.interval import SavePolicy, parse_save_every
from spotsafe.policy.restarts import Limits
from spotsafe.policy.retention import DEFAULT_KEEP, Keep, parse_keep
from spotsafe.policy.staging_memory import LEAST_BYTES
from spotsafe.reclaim.watcher import Watcher

Resume = Literal["auto", "must", "never"]
OnReclaim = Literal["exit", "return"]
What = Literal["weights", "all"]
Writer = Literal["auto", "process", "thread"]
StagingMemory = Literal["auto"] | int

WRITER = "SPOTSAFE_WRITER"
"""Environment variable: ``process`` or ``thread``, where the program says ``writer="auto"``."""


@dataclass(frozen=True, slots=True)
class InitFrom:
    """Where a run that has no checkpoint yet takes its first values from.

    Attributes:
        url: a run, optionally with ``@latest``, ``@best`` or ``@<step>``.
        what: ``"weights"``: tracked modules and tensors; ``"all"``: every tracked object that is found there.
            Loop positions and random number generators always start afresh.
    """

    url: str
    what: What = "weights"

    def __post_init__(self) -> None:
        if self.what not in get_args(What):
            raise ValueError(f'InitFrom(what=) is "weights" or "all", got {self.what!r}')


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """See `spotsafe.session`, which documents each."""

    resume: Resume = "auto"
    init_from: InitFrom | None = None
    policy: SavePolicy = field(default_factory=lambda: parse_save_every("auto"))
    keep: Keep = DEFAULT_KEEP
    grace: timedelta | None = None
    watch: Literal["auto"] | tuple[Watcher, ...] | None = "auto"
    on_reclaim: OnReclaim = "exit"
    exit_code: int = EXIT_RECLAIMED
    strict: bool = True
    drain_timeout: timedelta = timedelta(minutes=10)
    events: tuple[EventSink, ...] = ()
    clock: Clock = field(default_factory=SystemClock)
    overlap: bool = True
    takeover: bool = False
    writer: Writer = "auto"
    staging_memory: StagingMemory = "auto"
    restart_limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        _one_of("resume", self.resume, get_args(Resume))
        _one_of("writer", self.writer, get_args(Writer))
        _check_staging_memory(self.staging_memory)
        _one_of("on_reclaim", self.on_reclaim, get_args(OnReclaim))
        _is_a("init_from", self.init_from, InitFrom | None, "a url or an InitFrom")
        _is_a("exit_code", self.exit_code, int, "a number from 0 to 255")
        if isinstance(self.exit_code, bool) or not 0 <= self.exit_code <= 255:
            raise ValueError(f"exit_code= is a number from 0 to 255, got {self.exit_code!r}")
        _is_a("grace", self.grace, timedelta | None, "a timedelta")
        if self.grace is not None and self.grace < timedelta(0):
            raise ValueError(f"grace= cannot be negative, got {self.grace}")
        _is_a("drain_timeout", self.drain_timeout, timedelta, "a timedelta")
        if self.drain_timeout < timedelta(0):
            raise ValueError(f"drain_timeout= cannot be negative, got {self.drain_timeout}")
        _is_a("restart_limits", self.restart_limits, Limits, "a spotsafe.Limits")
        for option in ("strict", "overlap", "takeover"):
            _is_a(option, getattr(self, option), bool, "True or False")
        for sink in self.events:
            if not callable(getattr(sink, "emit", None)):
                raise TypeError(f"events= holds {sink!r}, which is no EventSink (it needs emit)")


OPTION_NAMES = frozenset(
    {"url", "state", "save_every", *(option.name for option in fields(Options))} - {"policy"}
)
"""Names that no state can have as a keyword; such a state goes into ``state={...}``."""


def make_options(
    *,
    save_every: Any,
    keep: Any,
    init_from: str | InitFrom | None,
    watch: Any,
    events: EventSink | Sequence[EventSink],
    clock: Clock | None,
    restart_limits: Limits | None,
    **rest: Any,
) -> Options:
    """Options from what the user wrote.

    Raises:
        ValueError: an option has a value that it cannot have.
        TypeError: an option has a value of a wrong type.
    """
    return Options(
        policy=parse_save_every(save_every),
        keep=parse_keep(keep),
        init_from=InitFrom(init_from) if isinstance(init_from, str) else init_from,
        watch=_watch(watch),
        events=tuple(events) if isinstance(events, Sequence) else (events,),
        clock=SystemClock() if clock is None else clock,
        restart_limits=restart_limits or Limits(),
        **rest,
    )


def merge_state(tracked: Mapping[str, Any], state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Everything to track by name, from keywords and from ``state={...}``.

    Raises:
        ValueError: a name stands in both.
    """
    both = sorted(tracked.keys() & (state or {}).keys())
    if both:
        raise ValueError(f"{both[0]!r} is given both as a keyword and in state=; give it once")
    return {**tracked, **(state or {})}


def _watch(value: Any) -> Literal["auto"] | tuple[Watcher, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        if value != "auto":
            raise ValueError(f'watch= is "auto", None or a list of watchers, got {value!r}')
        return "auto"
    watchers = tuple(value) if isinstance(value, Sequence) else (value,)
    for watcher in watchers:
        if not isinstance(watcher, Watcher):
            raise TypeError(
                f"watch= holds {watcher!r}, which is no Watcher (it needs name, interval_s, poll, close)"
            )
    return watchers


def _check_staging_memory(value: object) -> None:
    words = f'staging_memory= is "auto" or a number of bytes of at least {LEAST_BYTES}, got {value!r}'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(words)
    if value != "auto" and (isinstance(value, str) or value < LEAST_BYTES):
        raise ValueError(words)


def _is_a(option: str, value: object, kind: type | types.UnionType, words: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{option}= is {words}, got {value!r}")


def asked_writer(writer: Writer) -> Writer:
    """What the program asks for, or the environment where the program leaves it open.

    Raises:
        ValueError: `WRITER` names no writer.
    """
    told = os.environ.get(WRITER, "")
    if writer != "auto" or not told:
        return writer
    _one_of(WRITER, told, get_args(Writer))
    return cast("Writer", told)


def _one_of(option: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        words = ", ".join(repr(one) for one in allowed)
        raise ValueError(f"{option}= is one of {words}, got {value!r}")
