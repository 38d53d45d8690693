"""A run that is started, killed and judged.

`Bench` is one run folder with everything that its attempts wrote, and the judgement about them: what must hold after a
kill, and what at the end.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotsafe.checkpoint.candidates import by_folder, candidates, look
from spotsafe.checkpoint.layout import CHECKPOINTS, CheckpointName
from spotsafe.checkpoint.verify import verify
from spotsafe.clock import SystemClock
from spotsafe.identity import Identity
from spotsafe.storage.local import LocalStore
from spotsafe.storage.open import same_place
from spotsafe.storage.wrapping import READS, WRITES
from spotsafe.testing.killing import kill_machine
from spotsafe.writer.presence import await_writers
from tests.e2e.processes import PATIENCE_S, Launcher, Process

SCRIPTS = Path(__file__).with_name("scripts")
TRAIN = SCRIPTS / "train.py"
OPERATIONS = READS | WRITES
"""Everything that a store can be asked for."""


# -- what an attempt wrote ---


@dataclass(frozen=True)
class Step:
    """A line of the trace."""

    number: int
    loss: str
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one process wrote before it ended."""

    status: int
    seconds: float
    """How long it lived."""
    steps: tuple[Step, ...]
    events: tuple[dict[str, Any], ...]
    result: dict[str, Any] | None
    log: str

    def of(self, event: str) -> list[dict[str, Any]]:
        """The events of one type."""
        return [one for one in self.events if one["event"] == event]

    def saves(self, reason: str) -> list[int]:
        """Steps of the saves that were begun for this reason."""
        return [one["step"] for one in self.of("SaveStarted") if one["reason"] == reason]

    @property
    def started(self) -> dict[str, Any] | None:
        """`RunStarted`, if the process came so far."""
        return next(iter(self.of("RunStarted")), None)

    @property
    def in_restore(self) -> bool:
        """It ended between `RestoreStarted` and `RestoreFinished`."""
        return len(self.of("RestoreStarted")) > len(self.of("RestoreFinished"))

    @property
    def in_save(self) -> bool:
        """It ended between `SaveStarted` and `CheckpointPublished`."""
        done = {one["checkpoint"] for one in self.of("CheckpointPublished") + self.of("SaveFailed")}
        return any(one["checkpoint"] not in done for one in self.of("SaveStarted"))

    @property
    def before_first_save(self) -> bool:
        """It had resumed, and ended before it saved anything."""
        started = self.started
        return started is not None and started["resumed_from"] is not None and not self.of("SaveStarted")

    @property
    def in_start(self) -> bool:
        """It ended before training began: in imports, look, claim or restore."""
        return self.started is None


def read_lines(path: Path) -> list[Any]:
    """The complete lines of a file that may not be there yet."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@dataclass
class Attempt:
    """A process on a bench."""

    bench: Bench
    process: Process
    out: Path
    began: float = field(default_factory=time.monotonic)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of a type so far."""
        return [one for one in read_lines(self.out.with_suffix(".events")) if one["event"] == name]

    def steps(self) -> list[Step]:
        """The steps so far."""
        lines = read_lines(self.out.with_suffix(".trace"))
        return [Step(number, loss, tuple(ids)) for number, loss, ids in lines]

    def go(self) -> None:
        """Let it leave the step that it was told to hold at."""
        self.out.with_suffix(".go").touch()

    def kill_after(self, seconds: float, *, machine: bool = False) -> Record:
        """Let it live so long, and then no longer; its writer neither if the machine goes."""
        if self.process.wait(seconds) is None and machine:
            kill_machine(self.process.pid)
        return self.record(self.process.kill())

    def end(self) -> Record:
        """Let it come to its own end."""
        return self.record(self.process.end())

    def record(self, status: int) -> Record:
        """What it left, and what its writer still made of it, on the bench's books from now on."""
        assert await_writers(
            same_place(str(self.bench.run)),
            identity=Identity.of_this_process(),
            clock=SystemClock(),
            limit_s=PATIENCE_S,
            emit=lambda _: None,
        )
        results = read_lines(self.out.with_suffix(".result"))
        record = Record(
            status=status,
            seconds=time.monotonic() - self.began,
            steps=tuple(self.steps()),
            events=tuple(read_lines(self.out.with_suffix(".events"))),
            result=results[0] if results else None,
            log=self.out.with_suffix(".log").read_text(encoding="utf-8", errors="replace"),
        )
        self.bench.judge(record)
        return record


# -- a run ---


@dataclass
class Bench:
    """One run folder, and everything about it."""

    launcher: Launcher
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    """Options of each attempt, see the script."""
    reference: Record | None = None
    """The uninterrupted run, where there is one: every attempt is compared with it."""
    script: Path = TRAIN
    fresh: bool = False
    records: list[Record] = field(default_factory=list)
    alone: bool = True
    """No two attempts at the same time: then it is known from where each must resume."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._starts = 0
        self._newest = self.newest

    @property
    def run(self) -> Path:
        """The run's folder itself."""
        return self.folder / "run"

    @property
    def store(self) -> LocalStore:
        """The run's store."""
        return LocalStore(str(self.run))

    @property
    def published(self) -> list[CheckpointName]:
        """What is published now, newest first."""
        return [one.name for one in candidates(self.store, look(self.store)) if one.manifest is not None]

    @property
    def newest(self) -> CheckpointName | None:
        """The newest that is published now."""
        return next(iter(self.published), None)

    def start(self, **options: Any) -> Attempt:
        """The same command as ever."""
        self._starts += 1
        out = self.folder / f"start{self._starts}"
        out.with_suffix(".log").touch()  # it may be killed before it can
        told = {"url": str(self.run), "out": str(out), **self.options, **options}
        launch = self.launcher.fresh if self.fresh else self.launcher.fork
        process = launch(
            self.script, log=out.with_suffix(".log"), environment={"TRAIN_OPTIONS": json.dumps(told)}
        )
        return Attempt(self, process, out)

    def finish(self, **options: Any) -> Record:
        """Start once more, to the end, which must be that of the reference."""
        record = self.start(**options).end()
        self.judge_end(record)
        return record

    def judge(self, record: Record) -> None:
        """What must hold after each end of a process, however it came about."""
        now = self.published
        for name in now:
            assert verify(self.store, name) == [], f"{name} is whole"
        ever = [CheckpointName.parse(one["checkpoint"]) for one in record.of("CheckpointPublished")]
        assert not ever or (now and now[0] >= max(one for one in ever if one is not None)), (
            "what was said to be is"
        )
        assert self._newest is None or (now and now[0] >= self._newest), "nothing published is lost"
        if self.alone:
            self._judge_start(record)
        for step in record.steps:
            assert self.reference is None or step == self.reference.steps[step.number], (
                "redone steps are the same"
            )
        self._newest = now[0] if now else None
        self.records.append(record)

    def _judge_start(self, record: Record) -> None:
        """It goes on from the newest checkpoint that was there, and from no other place."""
        expected = None if self._newest is None else str(self._newest)
        if record.started is not None:
            assert record.started["resumed_from"] == expected, record.log
        first = 0 if self._newest is None else self._newest.step
        numbers = [step.number for step in record.steps]
        assert numbers == list(range(first, first + len(numbers))), "steps follow each other"

    def judge_end(self, record: Record) -> None:
        """The run is finished and is, to the last bit, as if nothing had ever happened."""
        assert self.reference is not None
        assert record.status == 0, record.log
        assert record.result is not None, record.log
        for part in ("weights", "optimizer", "scheduler", "rng"):
            assert record.result[part] == (self.reference.result or {})[part], part
        made = {step.number for one in self.records for step in one.steps}
        assert made == {step.number for step in self.reference.steps}, "every step was made"
        if record.of("CheckpointPublished"):
            self._judge_folder()

    def _judge_folder(self) -> None:
        """An attempt that published has swept: of what is not published, nothing but markers is left.

        In the folder of a published checkpoint a temporary name of one of its files may stay as long as it does.
        """
        published = set(self.published)
        for name, sizes in by_folder(self.store.list(CHECKPOINTS)).items():
            assert name in published or set(sizes) == {name.manifest}, f"no garbage is left in {name}"
        for path in (self.run / CHECKPOINTS).rglob(".tmp*"):
            assert CheckpointName.parse(path.parent.name) in published, f"{path} is garbage"
            assert path.stat().st_nlink == 2, f"{path} takes room of its own"


def uninterrupted(launcher: Launcher, folder: Path, **options: Any) -> Record:
    """The reference: from the first step to the last in one process."""
    bench = Bench(launcher, folder, options)
    record = bench.start().end()
    assert record.status == 0, record.log
    assert record.result is not None
    return record
