"""What the trainer and its writer process say to each other, as values and as bytes. No pickle anywhere.

What is the same in save after save, tens of thousands of tensors and the trees of their state, is sent once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import is_
from typing import Any

import msgspec

from spotsafe import events
from spotsafe.checkpoint import strict_json
from spotsafe.checkpoint.branch import Branch
from spotsafe.checkpoint.index import FileEntry, KeptTree, TensorEntry
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.events import Event
from spotsafe.policy.retention import AnyOf, Best, Every, Keep, Latest
from spotsafe.writer.error_wire import SentError, error_of, sent_error, text_of
from spotsafe.writer.job import FrozenFile, HealthSpan, SaveJob, SaveResult, StagedFile


class Hello(msgspec.Struct, tag=True, kw_only=True):
    """The first message to the writer: what to write to, and for whom. With it come two descriptors.

    They are the memory of the `Staging` words, and the lock that says that this process lives.
    """

    url: str
    settings: dict[str, Any]
    """Of fsspec, as the program has set them."""
    trainer: int
    """Its process number."""
    single_writer: bool
    """As `Claimed.single_writer`."""
    unfinished: tuple[CheckpointName, ...]
    """Saves of this attempt that a writer died over: whether they were published is not known."""
    remains: tuple[str, ...]
    """Files to remove when it ends well."""


class Memory(msgspec.Struct, kw_only=True):
    """Shared memory that a job lies in."""

    number: int
    size: int


class Copy(msgspec.Struct, kw_only=True):
    """A copy that goes on, or has just ended: which `Staging` tells how far it is."""

    place: int
    """Of its words, in the memory that both share."""
    serial: int


class Tree(msgspec.Struct, kw_only=True):
    """A tree of the state."""

    data: bytes | None
    """Its JSON; None if it is the one of the save before."""
    kept: bool
    """Whether it is a `KeptTree`."""


class Policy(msgspec.Struct, kw_only=True):
    """One of the policies of retention that are joined."""

    kind: str
    values: dict[str, int | float | str]


class Job(msgspec.Struct, tag=True, kw_only=True):
    """One save. With it come the descriptors of those memories that the writer has not seen yet."""

    number: int
    """Of the saves that this writer got, from 1."""
    copy: Copy | None
    """None if everything is there."""
    arena: Memory
    lent: Memory | None
    """Where the frozen files lie that are staged."""
    new: tuple[Memory, ...]
    gone: tuple[int, ...]
    """Numbers of memories that the trainer has given back: no save will lie in them any more."""
    name: CheckpointName
    run: str
    parent: str | None
    reason: str
    created: float
    world_size: int
    rank: int
    metrics: dict[str, float]
    files: tuple[StagedFile, ...]
    tensors: tuple[TensorEntry, ...] | None
    """None if they are those of the save before; so with `health`."""
    state: dict[str, Tree]
    session: Tree
    health: tuple[HealthSpan, ...] | None
    nonfinite_before: frozenset[str]
    keep: tuple[Policy, ...]
    resumed_from: str | None
    passed_over: frozenset[str]
    rollbacks: Branch
    frozen: tuple[FrozenFile, ...]
    streamed: bool


class Ready(msgspec.Struct, tag=True):
    """The writer waits for work."""


class Said(msgspec.Struct, tag=True, kw_only=True):
    """An event of the writer."""

    kind: str
    data: msgspec.Raw


class Logged(msgspec.Struct, tag=True, kw_only=True):
    """A line for the log."""

    logger: str
    level: int
    text: str


class Finished(msgspec.Struct, tag=True, kw_only=True):
    """How a save ended."""

    name: CheckpointName
    published: bool
    healthy: bool
    total_bytes: int
    write_s: float
    superseded_by: int | None
    error: SentError | None
    abandoned: bool
    frozen: tuple[FileEntry, ...]
    undecided: bool
    """As `Uploader.undecided`."""


# -- bytes ---

ToWriter = Hello | Job
ToTrainer = Ready | Said | Logged | Finished

_encoder = msgspec.msgpack.Encoder()
_to_writer: msgspec.msgpack.Decoder[ToWriter] = msgspec.msgpack.Decoder(ToWriter)
_to_trainer: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)


def encode(message: ToWriter | ToTrainer) -> bytes:
    """The bytes of a message.

    Raises:
        ValueError: text with lone surrogates.
        TypeError: a value that cannot be sent.
    """
    return _encoder.encode(message)


def for_writer(data: bytes) -> ToWriter:
    """What the trainer said."""
    return _to_writer.decode(data)


def for_trainer(data: bytes) -> ToTrainer:
    """What the writer said."""
    return _to_trainer.decode(data)


# -- retention ---

_POLICIES: Mapping[str, type[Keep]] = {kind.__name__: kind for kind in (Latest, Best, Every)}


def policies_of(keep: Keep) -> tuple[Policy, ...] | None:
    """What is joined in a policy; None if somebody else made one, whose code the writer process does not have."""
    parts = keep.parts if type(keep) is AnyOf else (keep,)
    if any(_POLICIES.get(type(one).__name__) is not type(one) for one in parts):
        return None
    return tuple(
        Policy(kind=type(one).__name__, values={name: getattr(one, name) for name in _slots(type(one))})
        for one in parts
    )


def keep_of(policies: Sequence[Policy]) -> Keep:
    """The policy again."""
    parts = tuple(_POLICIES[one.kind](**one.values) for one in policies)
    return parts[0] if len(parts) == 1 else AnyOf(parts)


def _slots(kind: type[Keep]) -> Sequence[str]:
    return [one.name for one in fields(kind)]  # type: ignore[arg-type] # the three of `_POLICIES` are dataclasses


# -- events ---


def said(event: Event) -> Said:
    """An event as a message. Names of files in it may hold bytes that are no text: these are spelled out."""
    data = {one.name: getattr(event, one.name) for one in fields(event)}
    try:
        encoded = _encoder.encode(data)
    except UnicodeEncodeError:
        encoded = _encoder.encode(
            {name: text_of(value) if isinstance(value, str) else value for name, value in data.items()}
        )
    return Said(kind=type(event).__name__, data=msgspec.Raw(encoded))


def event_of(message: Said) -> Event:
    """The event again."""
    kind: type[Event] = getattr(events, message.kind)
    return msgspec.msgpack.decode(message.data, type=kind)


# -- saves ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """What one writer process has been sent already."""

    saves: int = 0
    tensors: tuple[TensorEntry, ...] = ()
    health: tuple[HealthSpan, ...] | None = None
    state: Mapping[str, KeptTree | bytes] = field(default_factory=dict)
    """Of each name the tree, if it never changes, or its JSON."""
    session: bytes = b""
    memory: frozenset[int] = frozenset()

    def job(
        self,
        job: SaveJob,
        *,
        copy: Copy | None,
        arena: Memory,
        lent: Memory | None,
        there: Collection[int],
    ) -> tuple[Job, Sender]:
        """The message for a save, and what the writer has when that is sent.

        Args:
            job: the save.
            copy: of what lies in `arena`, if it goes on.
            arena: where the save lies.
            lent: where its frozen files lie, if they are staged. The writer keeps that for this save only.
            there: numbers of the memories that are not given back.

        Raises:
            ValueError: state that is no typed JSON.
            TypeError: as above, or a policy that cannot be sent.
        """
        keep = policies_of(job.keep)
        if keep is None:
            raise TypeError(f'{job.keep!r} cannot be sent to the writer process; writer="thread" takes it')
        state: dict[str, KeptTree | bytes] = {}
        trees: dict[str, Tree] = {}
        for name, tree in job.state.items():
            known = self.state.get(name)
            state[name] = _form(tree, known)
            trees[name] = _tree(state[name], known)
        session = strict_json.dump(job.session)
        after = Sender(
            saves=self.saves + 1,
            tensors=job.tensors,
            health=job.health,
            state=state,
            session=session,
            memory=self.memory.intersection(there) | {arena.number},
        )
        message = Job(
            number=after.saves,
            copy=copy,
            arena=arena,
            lent=lent,
            new=tuple(one for one in (arena, lent) if one is not None and one.number not in self.memory),
            gone=tuple(sorted(self.memory.difference(there))),
            name=job.name,
            run=job.run,
            parent=job.parent,
            reason=job.reason,
            created=job.created,
            world_size=job.world_size,
            rank=job.rank,
            metrics=dict(job.metrics),
            files=job.files,
            tensors=None if _same(job.tensors, self.tensors) else job.tensors,
            state=trees,
            session=Tree(data=None if session == self.session else session, kept=False),
            health=None if job.health is self.health else job.health,
            nonfinite_before=job.nonfinite_before,
            keep=keep,
            resumed_from=job.resumed_from,
            passed_over=job.passed_over,
            rollbacks=job.rollbacks,
            frozen=job.frozen,
            streamed=job.streamed,
        )
        return message, after


def _form(tree: Any, known: KeptTree | bytes | None) -> KeptTree | bytes:
    if isinstance(tree, KeptTree):
        return tree
    return strict_json.dump(tree, known=known if isinstance(known, bytes) else b"", around=1)


def _tree(form: KeptTree | bytes, known: KeptTree | bytes | None) -> Tree:
    if isinstance(form, KeptTree):
        return Tree(data=None if form is known else msgspec.json.encode(form), kept=True)
    return Tree(data=None if form == known else form, kept=False)


@dataclass(slots=True)
class Receiver:
    """Makes saves of the messages of one trainer."""

    _saves: int = 0
    _tensors: tuple[TensorEntry, ...] = ()
    _health: tuple[HealthSpan, ...] = ()
    _state: Mapping[str, Any] = field(default_factory=dict)
    _session: Any = None

    def job(self, message: Job) -> SaveJob:
        """The save that a message is for; each message is taken once, in order.

        Raises:
            ValueError: one is missing: what this one leaves out would be that of another save.
        """
        self._saves += 1
        if message.number != self._saves:
            raise ValueError(f"save {message.number} of this trainer came in place of {self._saves}")
        if message.tensors is not None:
            self._tensors = message.tensors
        if message.health is not None:
            self._health = message.health
        self._state = {
            name: self._state[name] if tree.data is None else _value(tree.data, kept=tree.kept)
            for name, tree in message.state.items()
        }
        if message.session.data is not None:
            self._session = json.loads(message.session.data)
        return SaveJob(
            name=message.name,
            run=message.run,
            parent=message.parent,
            reason=message.reason,
            created=message.created,
            world_size=message.world_size,
            rank=message.rank,
            metrics=message.metrics,
            files=message.files,
            tensors=self._tensors,
            state=self._state,
            session=self._session,
            health=self._health,
            nonfinite_before=message.nonfinite_before,
            keep=keep_of(message.keep),
            resumed_from=message.resumed_from,
            passed_over=message.passed_over,
            rollbacks=message.rollbacks,
            frozen=message.frozen,
            streamed=message.streamed,
        )


def _value(data: bytes, *, kept: bool) -> Any:
    value = json.loads(data)
    return KeptTree(value) if kept else value


def _same(now: Sequence[TensorEntry], before: Sequence[TensorEntry]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def finished(result: SaveResult, *, undecided: bool) -> Finished:
    """How a save ended, as a message."""
    return Finished(
        name=result.name,
        published=result.published,
        healthy=result.healthy,
        total_bytes=result.total_bytes,
        write_s=result.write_s,
        superseded_by=result.superseded_by,
        error=None if result.error is None else sent_error(result.error),
        abandoned=result.abandoned,
        frozen=result.frozen,
        undecided=undecided,
    )


def result_of(message: Finished) -> SaveResult:
    """The result again."""
    return SaveResult(
        name=message.name,
        published=message.published,
        healthy=message.healthy,
        total_bytes=message.total_bytes,
        write_s=message.write_s,
        superseded_by=message.superseded_by,
        error=None if message.error is None else error_of(message.error),
        abandoned=message.abandoned,
        frozen=message.frozen,
    )
