"""How soon a reclaim is seen, how soon after that everything is on the disk, and what watching costs meanwhile.

    python benchmarks/reaction.py [--notices 20] [--idle 20] [--width 1800]

The first table has, for each cloud, the time from the change of its metadata service (a stand-in on this machine) to
the flag that a training loop reads, at instants that have nothing to do with when it is polled; and the processor time
of a process that only watches. The second follows one notice through a session: from the flag to the published
checkpoint, beside writing as many bytes with O_DIRECT and an fsync. Last, what a look at `run.notice` costs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from save_cost import GIB, Training
from store import ROOT, write_raw

sys.path.insert(0, str(ROOT / "src"))

import spotsafe
from spotsafe import events
from spotsafe.reclaim.aws import AwsWatcher
from spotsafe.reclaim.azure import AzureWatcher
from spotsafe.reclaim.gcp import GcpWatcher
from spotsafe.reclaim.watcher import Watch, Watcher
from spotsafe.testing.aws import FakeAwsMetadata
from spotsafe.testing.azure import FakeAzureMetadata
from spotsafe.testing.gcp import FakeGcpMetadata
from spotsafe.testing.metadata import FakeMetadata

CLOUDS: dict[str, tuple[type[FakeMetadata], Callable[[dict[str, str]], Watcher]]] = {
    "aws": (FakeAwsMetadata, lambda environ: AwsWatcher(environ=environ)),
    "gcp": (FakeGcpMetadata, lambda environ: GcpWatcher(environ=environ)),
    "azure": (FakeAzureMetadata, lambda environ: AzureWatcher(environ=environ)),
}
_LOOK_S = 0.001


def reactions(cloud: str, count: int) -> list[float]:
    """Seconds from the change to the flag."""
    make_fake, make_watcher = CLOUDS[cloud]
    found = []
    with make_fake() as fake:
        for _ in range(count):
            watch = Watch([make_watcher(fake.environ)], emit=lambda _: None)
            watch.start()
            fake.wait_for_requests(len(fake.requests) + 3)
            time.sleep(random.random())
            began = time.perf_counter()
            fake.notice(fake.actions[0])
            while watch.notice is None:
                time.sleep(_LOOK_S)
            found.append(time.perf_counter() - began)
            fake.cancel()
            watch.stop()
    return found


def idle_cost(cloud: str, seconds: float) -> float:
    """Processor time of watching, as a part of one core; the stand-in is another process."""
    command = [sys.executable, "-m", "spotsafe", "fake-metadata", cloud, "--notice-in", "100000"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as fake:
        assert fake.stdout is not None
        environ = {}
        while (line := fake.stdout.readline()).startswith("export "):
            name, _, value = line.removeprefix("export ").strip().partition("=")
            environ[name] = value
        watch = Watch([CLOUDS[cloud][1](environ)], emit=lambda _: None)
        watch.start()
        time.sleep(2)  # the first requests are over
        began, cpu = time.monotonic(), time.process_time()
        time.sleep(seconds)
        used = (time.process_time() - cpu) / (time.monotonic() - began)
        watch.stop()
        fake.terminate()
    return used


class Times:
    """When the notice came, and when its checkpoint was there."""

    def __init__(self) -> None:
        self.noticed, self.published = 0.0, 0.0
        self.staged = threading.Event()

    def emit(self, event: events.Event) -> None:
        if isinstance(event, events.NoticeReceived):
            self.noticed = time.perf_counter()
        if isinstance(event, events.CheckpointPublished):
            self.published = time.perf_counter()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def to_the_disk(folder: Path, width: int) -> tuple[int, float, float]:
    """Bytes of the state; seconds from the flag to the checkpoint, of which one step; and of a raw write."""
    training, times = Training(width, 64), Times()
    steps: list[float] = []
    with FakeAwsMetadata() as fake, quiet():
        run = spotsafe.session(
            str(folder / "run"),
            model=training.model,
            optimizer=training.optimizer,
            save_every=None,
            watch=[AwsWatcher(environ=fake.environ)],
            events=times,
        ).start()
        with contextlib.suppress(spotsafe.Reclaimed):
            for step in run.range(10_000):
                began = time.perf_counter()
                training.forward_backward()
                training.optimizer.step()
                steps.append(time.perf_counter() - began)
                if step == 2:
                    run.save()  # one that is measured: so a session knows what fits
                if step == 10:
                    run.wait()
                    fake.notice("terminate", in_seconds=120)
        with contextlib.suppress(spotsafe.Reclaimed):
            run.close()
    data = memoryview(mmap.mmap(-1, training.nbytes // mmap.PAGESIZE * mmap.PAGESIZE))
    raw = []
    for number in range(3):
        began = time.perf_counter()
        write_raw(folder / f"raw{number}", data)
        raw.append(time.perf_counter() - began)
        (folder / f"raw{number}").unlink()
    flag_to_disk = times.published - times.noticed - statistics.median(steps)
    return training.nbytes, flag_to_disk, statistics.median(raw)


def notice_cost(folder: Path) -> float:
    """Seconds of one look."""
    with quiet():
        run = spotsafe.session(str(folder / "empty"), watch=None, save_every=None, state=_state()).start()
        taken = min(timeit.repeat("run.notice", globals={"run": run}, number=1_000_000, repeat=5)) / 1e6
        run.close()
    return taken


def _state() -> dict[str, Any]:
    return {"generator": random.Random(0)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--notices", type=int, default=20)
    parser.add_argument("--idle", type=float, default=20.0)
    parser.add_argument("--width", type=int, default=1800)
    options = parser.parse_args()
    print(f"{'':8s}{'change to flag, ms':>20s}{'most':>8s}{'idle, % of a core':>20s}")
    for cloud in CLOUDS:
        found = reactions(cloud, options.notices)
        used = idle_cost(cloud, options.idle)
        print(f"{cloud:8s}{statistics.median(found) * 1e3:20.0f}{max(found) * 1e3:8.0f}{used * 100:20.3f}")
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-") as folder:
        nbytes, ours, raw = to_the_disk(Path(folder), options.width)
        print(
            f"\n{nbytes / GIB:.2f} GiB: flag to checkpoint {ours:.2f} s, raw write {raw:.2f} s: {ours / raw:.2f}"
        )
        print(f"run.notice: {notice_cost(Path(folder)) * 1e9:.0f} ns")


if __name__ == "__main__":
    main()
