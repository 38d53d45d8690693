"""Every name on storage, in one place. Names are only ever parsed here, by strict patterns.

::

    attempts/000012.json                           the claim of attempt 12; created if absent; never deleted
    attempts/000012.published                      created at the attempt's first publish
    checkpoints/a000012-s000000300-0041-7f3a9c21/  attempt, step, number of the save, the attempt's nonce
        data-00000-000.safetensors                 rank, number of the file
        frozen-00000-000.safetensors               the same, of tensors that later checkpoints may refer to
        index-00000.json                           rank
        manifest.json                              published last
    ledger/000012/events-000001.json               what happened: new objects, never appended
    ledger/000012/heartbeat.json                   replaced while the attempt lives
    pins/a000012-s000000300-0041-7f3a9c21.0b1c2d3e.json    a reader keeps that checkpoint; deleted when it has done
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CHECKPOINTS = "checkpoints"
ATTEMPTS = "attempts"
LEDGER = "ledger"
PINS = "pins"
MANIFEST = "manifest.json"

_CHECKPOINT = re.compile(r"a(\d{6,19})-s(\d{9,19})-(\d{4,19})-([0-9a-f]{8})")
_ATTEMPT = re.compile(r"(\d{6,19})\.json")
_NUMBER = re.compile(r"([0-9]{6,19})")
_PUBLISHED = re.compile(r"(\d{6,19})\.published")
_EVENTS = re.compile(r"events-(\d{6,19})\.json")
_PIN = re.compile(r"(a.+)\.([0-9a-f]{8})\.json")
_DATA = re.compile(r"(?:data|frozen)-([0-9]{5,19})-[0-9]{3,19}\.safetensors")
_INDEX = re.compile(r"index-[0-9]{5,19}\.json")

MAX_NUMBER = (1 << 53) - 1
"""The highest attempt that a name can have: a file of any name in the folder must not use up the numbers."""


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """A checkpoint's identity. The order of these values is the order of checkpoints; nothing else is."""

    attempt: int
    step: int
    save: int
    nonce: str

    def __str__(self) -> str:
        return f"a{self.attempt:06d}-s{self.step:09d}-{self.save:04d}-{self.nonce}"

    @staticmethod
    def parse(text: str) -> CheckpointName | None:
        """The name that `text` spells exactly, or None."""
        match = _CHECKPOINT.fullmatch(text)
        if match is None:
            return None
        name = CheckpointName(int(match[1]), int(match[2]), int(match[3]), match[4])
        return name if str(name) == text and name.attempt <= MAX_NUMBER else None

    @property
    def folder(self) -> str:
        """Path of the folder inside the run."""
        return f"{CHECKPOINTS}/{self}"

    @property
    def manifest(self) -> str:
        """Path of the manifest inside the run."""
        return f"{self.folder}/{MANIFEST}"

    def file(self, name: str) -> str:
        """Path of one of its files; `name` must be a data or index name.

        Raises:
            ValueError: the name is not one of the format's, such as a path.
        """
        if not is_file_name(name):
            raise ValueError(f"not a file name of a checkpoint: {name!r}")
        return f"{self.folder}/{name}"


def is_file_name(name: str) -> bool:
    """Whether `name` is a data or index file's name of the format."""
    return is_data_file(name) or _INDEX.fullmatch(name) is not None


def is_data_file(name: str) -> bool:
    """Whether `name` is a data file's name of the format, of frozen tensors or not."""
    return _DATA.fullmatch(name) is not None


def is_frozen_file(name: str) -> bool:
    """Whether `name` is a data file's name that checkpoints other than its own may refer to."""
    return is_data_file(name) and name.startswith("frozen-")


def rank_of(name: str) -> int:
    """The rank in a data file's name.

    Raises:
        ValueError: it is no data file's name.
    """
    match = _DATA.fullmatch(name)
    if match is None:
        raise ValueError(f"not a data file's name: {name!r}")
    return int(match[1])


def data_file(rank: int, number: int) -> str:
    """Name of the `number`-th data file of a rank."""
    return f"data-{rank:05d}-{number:03d}.safetensors"


def frozen_file(rank: int, number: int) -> str:
    """Name of the `number`-th data file of a rank with tensors that do not change from save to save."""
    return f"frozen-{rank:05d}-{number:03d}.safetensors"


def index_file(rank: int) -> str:
    """Name of a rank's index."""
    return f"index-{rank:05d}.json"


def attempt_record(attempt: int) -> str:
    """Path of the claim of an attempt."""
    return f"{ATTEMPTS}/{attempt:06d}.json"


def attempt_published(attempt: int) -> str:
    """Path of the mark that an attempt has published."""
    return f"{ATTEMPTS}/{attempt:06d}.published"


def ledger_folder(attempt: int) -> str:
    """Path of the folder in which an attempt writes what happened."""
    return f"{LEDGER}/{attempt:06d}"


def ledger_events(attempt: int, number: int) -> str:
    """Path of the `number`-th piece of an attempt's ledger, from 1."""
    return f"{ledger_folder(attempt)}/events-{number:06d}.json"


def ledger_heartbeat(attempt: int) -> str:
    """Path of what a living attempt replaces again and again."""
    return f"{ledger_folder(attempt)}/heartbeat.json"


def parse_ledger_events(name: str) -> int | None:
    """The number of the piece of a ledger whose base name is `name`, or None."""
    match = _EVENTS.fullmatch(name)
    return int(match[1]) if match and int(match[1]) > 0 else None


def parse_ledger_folder(name: str) -> int | None:
    """The attempt whose ledger's folder has this base name, or None."""
    return _attempt_number(_NUMBER.fullmatch(name))


def parse_attempt(name: str) -> int | None:
    """The attempt whose record's base name is `name`, or None."""
    return _attempt_number(_ATTEMPT.fullmatch(name))


def parse_published(name: str) -> int | None:
    """The attempt whose published-mark's base name is `name`, or None."""
    return _attempt_number(_PUBLISHED.fullmatch(name))


def pin(checkpoint: CheckpointName, nonce: str) -> str:
    """Path of a reader's pin."""
    return f"{PINS}/{checkpoint}.{nonce}.json"


def parse_pin(name: str) -> CheckpointName | None:
    """The checkpoint that the pin of this base name keeps, or None."""
    match = _PIN.fullmatch(name)
    return CheckpointName.parse(match[1]) if match else None


def _attempt_number(match: re.Match[str] | None) -> int | None:
    """The number, if it is spelled as we spell it: there are no two names of one attempt."""
    if match is None:
        return None
    number = int(match[1])
    return number if 0 < number <= MAX_NUMBER and match[1] == f"{number:06d}" else None
