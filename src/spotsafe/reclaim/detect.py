"""Which sources this machine has, found out without asking the network.

A variable that names a source turns it on; else the firmware's strings tell the cloud. So a start is never
slowed down by an address that does not answer, and a laptop polls nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from spotsafe.clock import Clock, SystemClock
from spotsafe.reclaim import alibaba, aws, azure, file, gcp, tencent
from spotsafe.reclaim.watcher import Watcher

_DMI_FOLDER = "/sys/class/dmi/id"
_CHOICES = 'write "auto", a list of watchers, or None to poll nothing'


def detect(
    watch: str | Sequence[Watcher] | None = "auto",
    *,
    environ: Mapping[str, str] | None = None,
    dmi: Callable[[str], str] | None = None,
    clock: Clock | None = None,
) -> list[Watcher]:
    """The watchers to poll. Signals are not among them: they need no asking.

    Args:
        watch: "auto" looks around; a list of watchers is taken as it is; None polls nothing.
        environ: variables that turn sources on or off; None is the process's.
        dmi: reads a field of the firmware's description by name, "" where there is none; None is the
            kernel's.
        clock: handed to the watchers.

    Raises:
        TypeError: `watch` is none of these.
        ValueError: a variable has no usable value.
    """
    if watch is None:
        return []
    if watch != "auto":
        return _checked(watch)
    return _look_around(
        os.environ if environ is None else environ,
        dmi=read_dmi if dmi is None else dmi,
        clock=SystemClock() if clock is None else clock,
    )


def read_dmi(field: str) -> str:
    """One field of the firmware's description of the machine, like ``sys_vendor``; "" where there is none."""
    try:
        with open(f"{_DMI_FOLDER}/{field}", encoding="utf-8", errors="replace") as stream:
            return stream.read(256).strip()
    except OSError:
        return ""


def _look_around(environ: Mapping[str, str], *, dmi: Callable[[str], str], clock: Clock) -> list[Watcher]:
    found = [file.from_environment(environ, clock=clock)]
    found += [
        cloud.from_environment(environ, dmi=dmi, clock=clock) for cloud in (aws, gcp, azure, alibaba, tencent)
    ]
    return [each for each in found if each is not None]


def _checked(watch: object) -> list[Watcher]:
    """A list of the user's own. What is no watcher is found out here rather than in a thread."""
    if isinstance(watch, str) or not isinstance(watch, Sequence):
        raise TypeError(f"watch={watch!r}: {_CHOICES}")
    for each in watch:
        if not isinstance(each, Watcher):
            raise TypeError(f"{each!r} is not a watcher: it needs name, interval_s, poll() and close()")
    return list(watch)
