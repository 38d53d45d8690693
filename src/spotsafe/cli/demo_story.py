"""What the demo does to a training run, and what it sees happen.

The reference is trained without interruption. Then the same is trained again and interrupted three times: by
a notice of the cloud, by SIGKILL in the middle of a step, and by SIGKILL in the middle of a save.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spotsafe.checkpoint.candidates import look, read_candidate, read_index
from spotsafe.checkpoint.catalog import resolve
from spotsafe.checkpoint.verify import verify
from spotsafe.cli.demo_compare import Snapshot, Step, TensorFact
from spotsafe.cli.demo_process import Training, plain_environment
from spotsafe.errors import EXIT_RECLAIMED
from spotsafe.storage.open import open_store
from spotsafe.storage.store import Store

KILLED = -9
"""Exit status, as `subprocess` reports it, of a process that SIGKILL ended."""


class Audience(Protocol):
    """Is told how far the demo is."""

    def begin(self, text: str) -> None:
        """A process is started."""
        ...

    def step(self, step: int) -> None:
        """It has done this step."""
        ...

    def end(self, text: str) -> None:
        """It has ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is trained, and when it is interrupted."""

    script: Path
    folder: Path
    """Checkpoints, traces and logs of both runs."""
    steps: int
    save_every: int
    """Steps between two checkpoints."""
    arguments: tuple[str, ...] = ()
    """More arguments of the script."""

    @property
    def notice_step(self) -> int:
        """The notice comes after this step: a quarter of the way."""
        return self.steps // 4

    @property
    def kill_step(self) -> int:
        """SIGKILL comes in the step after this one: half the way, and half a save interval off a save."""
        return self.steps // 2 + self.save_every // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One process of the interrupted run."""

    what: str
    event: str
    """What the storage and the trace show to have happened."""
    status: int
    problem: str
    """In what it did not go as planned; empty if it did."""
    steps: tuple[Step, ...]
    first_step_s: float | None
    """Seconds from the start of the process to the end of its first step."""


def train_reference(plan: Plan, audience: Audience) -> tuple[Step, ...]:
    """Train without interruption."""
    with _started(plan, audience, name="reference", text="reference, never interrupted") as training:
        status = training.wait_for_end()
        if status != 0:
            raise training.failed(f"the reference ended with status {status}")
    audience.end(f"{len(training.steps)} steps")
    return tuple(training.steps)


def train_interrupted(plan: Plan, audience: Audience) -> list[Attempt]:
    """Train once more, through a notice and two kills, to the end."""
    store = open_store(run_folder(plan, "interrupted"))
    return [
        _told_by_the_cloud(plan, audience, store),
        _killed_in_a_step(plan, audience),
        _killed_in_a_save(plan, audience, store),
        _to_the_end(plan, audience, store),
    ]


def run_folder(plan: Plan, name: str) -> str:
    """Where a run of the demo keeps its checkpoints."""
    return str(plan.folder / name)


def read_snapshot(url: str) -> tuple[Snapshot, list[str]]:
    """The last checkpoint of a run, without torch; and what `spotsafe verify` has to say against it."""
    store = open_store(url)
    candidate = resolve(store)
    assert candidate.manifest is not None, "`resolve` answers only published checkpoints"
    faults = [f"{fault.file}: {fault.reason}" for fault in verify(store, candidate.name)]
    if faults or len(candidate.manifest.parts) != 1:
        return Snapshot(step=candidate.name.step, tensors={}), faults or ["was not written by one process"]
    index = read_index(store, candidate, candidate.manifest.parts[0])
    tensors = {}
    for tensor in index.tensors:
        digest = hashlib.sha256()
        nbytes = 0
        for piece in sorted(tensor.slices, key=lambda piece: piece.offsets):
            buffer = bytearray(piece.nbytes)
            store.read_into(candidate.name.file(piece.file), piece.start, memoryview(buffer))
            digest.update(buffer)
            nbytes += piece.nbytes
        tensors[tensor.name] = TensorFact(
            dtype=tensor.dtype, shape=tensor.shape, nbytes=nbytes, sha256=digest.hexdigest()
        )
    session = index.session if isinstance(index.session, Mapping) else {}
    return Snapshot(step=candidate.name.step, tensors=tensors, state=index.state, session=session), []


def _told_by_the_cloud(plan: Plan, audience: Audience, store: Store) -> Attempt:
    """The metadata service announces the end; the run saves and leaves by itself."""
    from spotsafe.testing.aws import FakeAwsMetadata

    what = "notice from AWS"
    with FakeAwsMetadata() as cloud:
        text = f"start, then a {what}"
        with _started(plan, audience, name="attempt-1", text=text, extra=cloud.environ) as training:
            training.wait_for_step(plan.notice_step)
            cloud.notice("terminate", in_seconds=120)
            status = training.wait_for_end()
    newest = resolve(store).manifest
    assert newest is not None, "`resolve` answers only published checkpoints"
    event = f"saved after {newest.step} steps, reason: {newest.reason}"
    problem = "" if newest.reason == "notice" else "the notice led to no save"
    return _told(audience, training, what, event=event, status=status, wanted=EXIT_RECLAIMED, problem=problem)


def _killed_in_a_step(plan: Plan, audience: Audience) -> Attempt:
    """The machine is gone in the middle of a step. Nobody is told."""
    what = "SIGKILL in a step"
    with _started(plan, audience, name="attempt-2", text=f"resume, then {what}") as training:
        training.wait_for_step(plan.kill_step)
        half = training.kill_in_step()
        status = training.wait_for_end()
    event = f"{half * 1000:.0f} ms after step {training.steps[-1].step} ended"
    return _told(audience, training, what, event=event, status=status, wanted=KILLED)


def _killed_in_a_save(plan: Plan, audience: Audience, store: Store) -> Attempt:
    """The machine is gone when the tensors of a checkpoint are written and nothing else of it is."""
    what = "SIGKILL in a save"
    before = set(look(store).names)
    runner = ("-m", "spotsafe.testing.killing", "--at", "FileWritten:2", "--")
    with _started(plan, audience, name="attempt-3", text=f"resume, then {what}", runner=runner) as training:
        status = training.wait_for_end()
    begun = [name for name in look(store).names if name not in before and read_candidate(store, name).absent]
    problem = "" if begun else "no save was cut short"
    event = problem or f"the checkpoint of step {begun[0].step} has data, no manifest"
    return _told(audience, training, what, event=event, status=status, wanted=KILLED, problem=problem)


def _to_the_end(plan: Plan, audience: Audience, store: Store) -> Attempt:
    """Nothing happens any more."""
    with _started(plan, audience, name="attempt-4", text="resume, to the end") as training:
        status = training.wait_for_end()
    event = f"{resolve(store).name.step} steps saved"
    return _told(audience, training, "end", event=event, status=status, wanted=0)


@contextmanager
def _started(
    plan: Plan,
    audience: Audience,
    *,
    name: str,
    text: str,
    extra: Mapping[str, str] | None = None,
    runner: tuple[str, ...] = (),
) -> Iterator[Training]:
    """A process of the plan's script; the run's folder follows from the name."""
    run = "reference" if name == "reference" else "interrupted"
    command = (
        *runner,
        str(plan.script),
        *("--url", run_folder(plan, run)),
        *("--steps", str(plan.steps)),
        *("--save-every", str(plan.save_every)),
        *plan.arguments,
    )
    audience.begin(text)
    on_step: Callable[[int], None] = audience.step
    environ = plain_environment(extra or {})
    with Training(command, folder=plan.folder, name=name, environ=environ, on_step=on_step) as training:
        yield training


def _told(
    audience: Audience,
    training: Training,
    what: str,
    *,
    event: str,
    status: int,
    wanted: int,
    problem: str = "",
) -> Attempt:
    audience.end(f"exit status {status}; {event}")
    if not training.steps:
        raise training.failed(f"training ended with status {status} before its first step")
    return Attempt(
        what=what,
        event=event,
        status=status,
        problem=problem if status == wanted else f"exit status {wanted} was expected",
        steps=tuple(training.steps),
        first_step_s=training.first_step_s,
    )
