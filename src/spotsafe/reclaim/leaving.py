"""How a process ends after a reclaim: what its launcher makes of the exit code. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from spotsafe.errors import EXIT_RECLAIMED

_WAYS = ("exit", "return")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """What to do once all that the remaining time allows is saved."""

    raises: bool
    """Whether `Reclaimed` ends the program; else the loop just ends and the program goes on after it."""
    code: int
    """The exit code that `Reclaimed` carries."""


def how_to_leave(*, on_reclaim: str = "exit", exit_code: int = EXIT_RECLAIMED) -> Leaving:
    """Check the two options of the session and say what they mean.

    143 is what a shell reports of a process that SIGTERM ended. Bare Python and Kubernetes take it as
    stopped, not as finished (0) and not as broken (1).

    Args:
        on_reclaim: ``"exit"`` or ``"return"``.
        exit_code: 0 to 255; 0 tells a launcher that the job is complete.

    Raises:
        ValueError: neither of these ways, or no exit code of a process.
        TypeError: the exit code is no int.
    """
    if on_reclaim not in _WAYS:
        raise ValueError(f'on_reclaim={on_reclaim!r}: write "exit" or "return"')
    if isinstance(exit_code, bool) or not isinstance(exit_code, int):
        raise TypeError(f"exit_code={exit_code!r}: write an int from 0 to 255")
    if not 0 <= exit_code <= 255:
        raise ValueError(f"exit_code={exit_code}: a process can only end with 0 to 255")
    return Leaving(raises=on_reclaim == "exit", code=exit_code)
