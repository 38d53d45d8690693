"""Every error that spotsafe raises, in one tree.

::

    SpotsafeError
    |-- StorageError (OSError)                 the store could not do what was asked
    |   |-- StorageNotFound (FileNotFoundError)    the store answered: there is no such object
    |   |-- StorageExists (FileExistsError)        there is an object already where a new one was to be written
    |   |-- StorageLinked                          a symbolic link inside the run, which is not followed
    |   |-- StorageNotFolder (NotADirectoryError)  the run's place is a file, or lies below one
    |   |-- StorageShort (EOFError)                the object ends before the bytes that were asked for
    |   |-- StorageUnavailable (ConnectionError)   no answer, or "later": trying again may help
    |   |-- StorageRefused (PermissionError)       the store answered: you may not
    |   |   `-- StorageExpired                         ... or no longer: the credentials have expired
    |   `-- StorageFull                            no space or quota is left
    |-- CheckpointError
    |   |-- CheckpointNotFound (FileNotFoundError) the checkpoint that was asked for is not there
    |   |-- NoUsableCheckpoint (FileNotFoundError) there are checkpoints, none can be used
    |   |-- DamagedCheckpoint (ValueError)         bytes differ from what was published
    |   `-- UnsupportedFormat (ValueError)         written by a newer spotsafe
    |-- StateError
    |   |-- UnsupportedState (TypeError)           an object that is no state, or holds what cannot be encoded
    |   |-- StateMismatch (ValueError)             names or shapes of checkpoint and program differ
    |   `-- UntrackedParameters (ValueError)       an optimizer owns parameters that nothing tracked holds
    |-- RunError
    |   |-- RunInUse (RuntimeError)                another job, or this process, runs on this folder
    |   |-- LookAhead (RuntimeError)               a step was asked for before the body of the last one ran
    |   `-- LoaderNotResumable (TypeError)         a loader whose position cannot be kept
    |-- NotEnoughMemory (MemoryError)            the machine is too small for what is to be read
    |-- WriterDied (ChildProcessError)             the process that writes saves has ended over one
    |-- WatcherUnavailable (ConnectionError)       a source of reclaim notices could not be asked
    `-- SaveFailed (RuntimeError)                  saves in the background failed

    SystemExit
    |-- Reclaimed      the machine is being taken away; what could be saved is saved (code 143)
    |-- Superseded     a newer attempt of this run lives; do not restart this one (code 94)
    `-- RestartLoop    this run restarts without getting anywhere; do not restart it (code 93)

The last three derive from `SystemExit` alone, so that ``except Exception`` around a training loop does not
swallow them. A storage error is never read as "there is no checkpoint".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from spotsafe.human import printable

EXIT_RECLAIMED = 143
"""Exit code after a reclaim: 128 + SIGTERM, what launchers expect of a stopped process."""
EXIT_SUPERSEDED = 94
"""Exit code of an attempt that found a newer one. Never restart on it."""
EXIT_RESTART_LOOP = 93
"""Exit code of a run that keeps dying without progress. Never restart on it."""


class SpotsafeError(Exception):
    """Base of every error that spotsafe raises on purpose.

    Its text may quote a checkpoint, which is untrusted: characters that steer a terminal are spelled out in it.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(one) if isinstance(one, str) else one for one in args))


class StorageError(SpotsafeError, OSError):
    """The store could not do what was asked.

    Attributes:
        path: the object's path inside the run, or the url.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class StorageNotFound(StorageError, FileNotFoundError):
    """The store answered that the object does not exist. Never raised when it could not look."""


class StorageExists(StorageError, FileExistsError):
    """There is an object already under a name that was to be new. It was left as it is."""


class StorageLinked(StorageError):
    """There is a symbolic link inside the run, which is not followed: it may lead anywhere. Remove it."""


class StorageNotFolder(StorageError, NotADirectoryError):
    """The place given for a run is a file, or lies below one. Give the path of a folder."""


class StorageShort(StorageError, EOFError):
    """The object ends before the bytes that were asked for."""


class StorageUnavailable(StorageError, ConnectionError):
    """The store did not answer, or asked to come back later. Trying again may help."""


class StorageRefused(StorageError, PermissionError):
    """The store answered that this may not be done with these credentials or permissions."""


class StorageExpired(StorageRefused):
    """The store no longer takes these credentials, and looking for newer ones has not helped."""


class StorageFull(StorageError):
    """No space or quota is left (ENOSPC, EDQUOT, or the like)."""


class CheckpointError(SpotsafeError):
    """Base of what can be wrong with checkpoints themselves."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """The checkpoint that was asked for by name, step or metric is not in the run."""


class NoUsableCheckpoint(CheckpointError, FileNotFoundError):
    """The run has checkpoints, but none can be used. Never answered by starting afresh.

    Attributes:
        url: the run.
        reasons: for each checkpoint that was looked at, why it cannot be used.
    """

    def __init__(self, message: str, *, url: str = "", reasons: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.url = url
        self.reasons = dict(reasons or {})


class DamagedCheckpoint(CheckpointError, ValueError):
    """The bytes of a checkpoint are not those that were published.

    Attributes:
        checkpoint: the checkpoint's folder name.
        file: the file inside it.
        reason: what differs.
    """

    def __init__(self, *, checkpoint: str, file: str, reason: str) -> None:
        super().__init__(f"{checkpoint}/{file}: {reason}")
        self.checkpoint = checkpoint
        self.file = file
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        again = partial(type(self), checkpoint=self.checkpoint, file=self.file, reason=self.reason)
        return again, ()


class UnsupportedFormat(CheckpointError, ValueError):
    """Written in a format that this version does not know. Upgrade spotsafe; nothing was changed or deleted.

    Attributes:
        checkpoint: the checkpoint's folder name, or the file.
        found: what the file says it needs.
    """

    def __init__(self, message: str, *, checkpoint: str = "", found: str = "") -> None:
        super().__init__(message)
        self.checkpoint = checkpoint
        self.found = found


class StateError(SpotsafeError):
    """Base of what can be wrong with the state of the running program."""


class UnsupportedState(StateError, TypeError):
    """An object cannot be saved.

    Attributes:
        path: where it is inside the tracked state, like ``scheduler.lr_lambdas[0]``.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class StateMismatch(StateError, ValueError):
    """What the checkpoint holds does not fit what the program tracks.

    Attributes:
        problems: every mismatch, one line each.
    """

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class UntrackedParameters(StateError, ValueError):
    """An optimizer holds parameters that no tracked object owns; they would be lost at a resume."""


class RunError(SpotsafeError):
    """Base of what can be wrong with how a run is used."""


class RunInUse(RunError, RuntimeError):
    """Another live job, or another session of this process, runs on the same folder."""


class LookAhead(RunError, RuntimeError):
    """A step was asked for before the body of the last one ran, so no commit would be true."""


class LoaderNotResumable(RunError, TypeError):
    """A data loader whose position in the data cannot be kept over a restart."""


class NotEnoughMemory(SpotsafeError, MemoryError):
    """A checkpoint, or a part of it, does not fit into memory. Never taken for damage: a larger machine may read it."""


class WriterDied(SpotsafeError, ChildProcessError):
    """The process that writes saves has ended over one. Another takes its place, and the save is made again."""


class WatcherUnavailable(SpotsafeError, ConnectionError):
    """A source of reclaim notices could not be asked, or its answer makes no sense. Never "there is no notice".

    Attributes:
        source: the watcher's name.
    """

    def __init__(self, message: str, *, source: str = "") -> None:
        super().__init__(message)
        self.source = source


class SaveFailed(SpotsafeError, RuntimeError):
    """Saves in the background failed; training itself went on.

    Attributes:
        failures: one line for each failed save.
    """

    def __init__(self, message: str, *, failures: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


class _Leaving(SystemExit):
    """A way to end the process with a code, and words for people in `message`."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(code)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _leaving_again, (type(self), self.message, self.code)


def _leaving_again(kind: Callable[[str], _Leaving], message: str, code: int) -> _Leaving:
    error = kind(message)
    error.code = code
    return error


class Reclaimed(_Leaving):
    """The machine is being taken away. What the remaining time allowed is saved."""

    def __init__(self, message: str = "reclaimed", *, code: int = EXIT_RECLAIMED) -> None:
        super().__init__(message, code=code)


class Superseded(_Leaving):
    """A newer attempt of this run has been started. This one must not be restarted."""

    def __init__(self, message: str = "superseded by a newer attempt") -> None:
        super().__init__(message, code=EXIT_SUPERSEDED)


class RestartLoop(_Leaving):
    """The run keeps restarting without getting anywhere. A person has to look."""

    def __init__(self, message: str = "restart loop") -> None:
        super().__init__(message, code=EXIT_RESTART_LOOP)
