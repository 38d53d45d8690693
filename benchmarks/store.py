"""What a save and a load cost on a local disk and on S3, beside the best that others do.

    python benchmarks/store.py [--mib 1024] [--repeats 5] [--s3-mib 256] [--s3-repeats 3]
        [--only local,seaweedfs,sink,seaweedfs-https,small]

Digests are made and compared in every row that is ours. A row is measured in a process of its own, which counts its
processor time and that of all below it; servers run in other processes. Ratios are what matters: the numbers of
one table are of one run, turn by turn. Extra memory is what the peak adds to the state (and, of a load, to the result).

- local: a save of a session from the safe point until it is published, so with the copy, beside as many bytes
  written with O_DIRECT and an fsync; a verified load, beside plain reads by as many threads into the same kind of
  memory, with a cold and a warm page cache.
- seaweedfs, sink: S3, by a real server and by one that throws everything away (`benchmarks/sink.py`), over plain http.
- seaweedfs-https: saves to the same real server over TLS, as S3 is used in life. No client hashes bodies to sign them
  there. (The discarding server is Python, which is too slow at TLS to be no part of what is measured.)
- small: 50,000 tensors of 64 bytes on the local disk, beside torch.distributed.checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

MIB = 1 << 20
PART = 16 * MIB
THREADS = 8
SMALL_TENSORS = 50_000


# -- measuring -----------------------------------------------------------------------------------------------------


def tree() -> list[int]:
    """This process and all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def cpu_s() -> float:
    """Processor seconds of this process and of all below it so far; of those that live in steps of 10 ms."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks = 0
    for pid in tree()[1:]:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return sum(one.ru_utime + one.ru_stime for one in used) + ticks / os.sysconf("SC_CLK_TCK")


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclass
class Cost:
    wall_s: float
    cpu_s: float
    extra_mib: float


def measured(work: Callable[[], Any]) -> tuple[Any, Cost]:
    wall, cpu, peak = time.perf_counter(), cpu_s(), peak_mib()
    result = work()
    return result, Cost(time.perf_counter() - wall, cpu_s() - cpu, peak_mib() - peak)


def in_child(case: str, *arguments: str, env: dict[str, str] | None = None) -> Any:
    """What a case prints, from a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--case", case, *arguments]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


# -- our side ------------------------------------------------------------------------------------------------------


class Staged:
    """A state of four float32 tensors, staged as a session stages it."""

    def __init__(self, nbytes: int) -> None:
        import numpy as np
        import torch

        from spotsafe.tensors.plan import plan_save, specs_of
        from spotsafe.tensors.staging import stage
        from spotsafe.tensors.tree import Capture, Collector
        from spotsafe.writer.arena import Arena

        rng = np.random.default_rng(0)
        self.tensors = {
            f"w{i}": torch.from_numpy(rng.standard_normal(nbytes // 16, dtype=np.float32)) for i in range(4)
        }
        collector = Collector()
        tree = {
            name: collector.tensor(one, f"model.{name}", role="parameter")
            for name, one in self.tensors.items()
        }
        capture = Capture(state={"model": tree}, tensors=collector.tensors, session={})
        self.plan, self.state = plan_save(specs_of(collector.tensors)), capture.state
        self.arena = Arena(self.plan.arena_size)
        stage(self.plan, capture, self.arena.view)

    def job(self, number: int) -> Any:
        from spotsafe.checkpoint.layout import CheckpointName
        from spotsafe.policy.retention import latest
        from spotsafe.writer.job import SaveJob

        return SaveJob(
            name=CheckpointName(1, number, number, "0123abcd"),
            run="0123abcd",
            parent=None,
            reason="interval",
            created=time.time(),
            world_size=1,
            rank=0,
            metrics={},
            files=self.plan.files,
            tensors=self.plan.tensors,
            state=self.state,
            session={},
            health=self.plan.health,
            nonfinite_before=frozenset(),
            keep=latest(2),
            resumed_from=None,
        )


def saver(store: Any, staged: Staged) -> Callable[[int], None]:
    """Saves under a number."""
    from spotsafe.writer.upload import Uploader

    def save(number: int) -> None:
        uploader = Uploader(store, emit=lambda _event: None, monotonic=time.monotonic)
        check(uploader.run(staged.job(number), staged.arena.view))

    return save


def check(result: Any) -> None:
    if result.error is not None:
        raise result.error


def newest(store: Any) -> Any:
    from spotsafe.checkpoint.candidates import candidates, look

    return next(iter(candidates(store, look(store))))


# -- local ---------------------------------------------------------------------------------------------------------


def write_raw(path: Path, data: memoryview) -> None:
    """The same bytes as fast as the disk takes them, and durable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o666)
    for start in range(0, len(data), PART):
        os.write(fd, data[start : start + PART])
    os.fsync(fd)
    os.close(fd)


def read_raw(files: list[Path]) -> list[Any]:
    """As a load reads: so many threads, blocks of 16 MiB, into new memory of torch."""
    import torch

    results = [torch.empty(file.stat().st_size, dtype=torch.uint8) for file in files]
    descriptors = [os.open(file, os.O_RDONLY) for file in files]

    def read(fd: int, view: memoryview, start: int) -> None:
        end, at = min(start + PART, len(view)), start
        while at < end:
            at += os.preadv(fd, [view[at:end]], at)

    with ThreadPoolExecutor(THREADS) as pool:
        views = [memoryview(one.numpy()) for one in results]
        jobs = [
            pool.submit(read, fd, view, start)
            for fd, view in zip(descriptors, views, strict=True)
            for start in range(0, len(view), PART)
        ]
        for job in jobs:
            job.result()
    for fd in descriptors:
        os.close(fd)
    return results


def forget_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


class Published:
    """A sink that measures each save, from the beginning of its copy until the checkpoint is there."""

    def __init__(self) -> None:
        self.began: tuple[float, float] = 0.0, 0.0
        self.costs: list[Cost] = []

    def emit(self, event: Any) -> None:
        from spotsafe import events

        now = time.perf_counter(), cpu_s()
        if isinstance(event, events.SaveStarted):
            self.began = now
        elif isinstance(event, events.CheckpointPublished):
            self.costs.append(Cost(now[0] - self.began[0], now[1] - self.began[1], 0.0))


def local_saves(mib: int, repeats: int, folder: str) -> list[tuple[Cost, Cost]]:
    """Saves of a session, from the safe point until each is published, in turn with raw writes of as many bytes."""
    import numpy as np
    import torch

    import spotsafe

    rng, raw, sink = np.random.default_rng(0), Path(folder, "raw"), Published()
    model = torch.nn.ParameterList(
        torch.from_numpy(rng.standard_normal(mib * MIB // 128, dtype=np.float32)) for _ in range(32)
    )
    memory = mmap.mmap(-1, mib * MIB)
    np.frombuffer(memory, dtype=np.uint8)[:] = 1
    write_raw(raw, memoryview(memory))  # the disk's first write of its size is never like the others
    theirs = []
    quiet = contextlib.redirect_stderr(io.StringIO())
    with quiet, spotsafe.session(f"{folder}/run", model=model, save_every=1, keep=2, events=sink) as run:
        for _ in run.range(repeats + 1):
            run.wait()  # for the save of the step before, and for the deletion of an older one behind it
            raw.unlink()
            theirs.append(measured(lambda: write_raw(raw, memoryview(memory)))[1])
    return list(zip(sink.costs, theirs, strict=True))[1:]  # the first save also makes the memory


def case_local(mib: int, repeats: int, folder: str) -> list[dict[str, Any]]:
    from spotsafe.reader import load_verified
    from spotsafe.storage.local import LocalStore

    pairs = {"save": local_saves(mib, repeats, folder), "load, cold cache": [], "load, warm cache": []}
    store = LocalStore(Path(folder, "run"))
    candidate = newest(store)
    files = sorted(Path(folder, "run").glob(f"checkpoints/{candidate.name}/data*"))
    for kind in ("load, cold cache", "load, warm cache"):
        for _ in range(repeats):
            costs = []
            for work in (lambda: load_verified(store, candidate), lambda: read_raw(files)):
                if "cold" in kind:
                    for file in files:
                        forget_cache(file)
                result, cost = measured(work)
                del result
                costs.append(cost)
            pairs[kind].append((costs[0], costs[1]))
    return [_local_row(kind, found, mib) for kind, found in pairs.items()]


def _local_row(kind: str, pairs: list[tuple[Cost, Cost]], mib: int) -> dict[str, Any]:
    gib = mib / 1024
    return {
        "what": kind,
        "ours": statistics.median(mib / ours.wall_s for ours, _ in pairs),
        "theirs": statistics.median(mib / theirs.wall_s for _, theirs in pairs),
        "ratio": statistics.median(theirs.wall_s / ours.wall_s for ours, theirs in pairs),
        "cpu": statistics.median(ours.cpu_s / gib for ours, _ in pairs),
        "theirs_cpu": statistics.median(theirs.cpu_s / gib for _, theirs in pairs),
    }


# -- S3 ------------------------------------------------------------------------------------------------------------

SAVES = (
    "obstore",
    "boto3",
    "s3fs pipe_file",
    "s3fs open().write",
    "boto3 upload_fileobj",
    "DCP FsspecWriter",
)
LOADS = ("boto3", "s3fs cat_file", "s3fs readinto", "DCP FsspecReader")
OURS = {"obstore", "boto3"}


class Source:
    """A file over memory, as a program without copies of its own would hand it in."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def read(self, size: int = -1) -> bytes:
        end = len(self.data) if size < 0 else self.at + size
        piece = bytes(self.data[self.at : end])
        self.at += len(piece)
        return piece


def s3fs_system() -> Any:
    import fsspec

    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


def save_work(how: str, url: str, staged: Staged) -> Callable[[], Any]:
    """The work of one save; what it needs is made before."""
    data = staged.arena.view[: staged.plan.arena_size]
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if how in OURS:
        from spotsafe.storage.fast import FastS3Store
        from spotsafe.storage.s3 import S3Store

        store = (FastS3Store if how == "obstore" else S3Store)(url)
        store.names("")
        save = saver(store, staged)
        return lambda: save(1)
    if how == "boto3 upload_fileobj":
        import boto3
        from boto3.s3.transfer import TransferConfig

        client = boto3.client("s3")
        client.head_bucket(Bucket=bucket)
        config = TransferConfig(multipart_chunksize=PART, max_concurrency=THREADS)
        return lambda: client.upload_fileobj(Source(data), bucket, f"{key}/file", Config=config)
    if how == "DCP FsspecWriter":
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return lambda: dcp.save(staged.tensors, storage_writer=FsspecWriter(url), no_dist=True)
    fs = s3fs_system()
    if how == "s3fs pipe_file":
        return lambda: fs.pipe_file(f"{url}/file", bytes(data), chunksize=PART)

    def write() -> None:
        with fs.open(f"{url}/file", "wb", block_size=PART) as file:
            for start in range(0, len(data), PART):
                file.write(data[start : start + PART])

    return write


def case_save(how: str, url: str, mib: int) -> dict[str, Any]:
    staged = Staged(mib * MIB)
    work = save_work(how, url, staged)
    _, cost = measured(work)
    return vars(cost)


def case_load(how: str, url: str, mib: int, *, sink: bool) -> dict[str, Any]:
    """`url` is what a save of the same client, or of ours for s3fs, has left there."""
    size = mib * MIB
    import torch  # noqa: F401 - an import is no load

    work = load_work(how, url, size, sink=sink)
    result, cost = measured(work)
    del result
    return {**vars(cost), "extra_mib": cost.extra_mib - mib}


def load_work(how: str, url: str, size: int, *, sink: bool) -> Callable[[], Any]:
    if how == "boto3":
        return our_load(url, size, sink=sink)
    if how == "DCP FsspecReader":
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        def load() -> Any:
            into = {f"w{i}": torch.empty(size // 16) for i in range(4)}
            dcp.load(into, storage_reader=FsspecReader(url), no_dist=True)
            return into

        return load
    fs = s3fs_system()
    fs.exists(f"{url}/file")
    if how == "s3fs cat_file":
        return lambda: fs.cat_file(f"{url}/file")

    def readinto() -> Any:
        import torch

        result = torch.empty(size, dtype=torch.uint8)
        view, at = memoryview(result.numpy()), 0
        with fs.open(f"{url}/file", "rb", cache_type="none", block_size=PART) as file:
            while at < size and (count := file.readinto(view[at : at + PART])):
                at += count
        return result

    return readinto


def our_load(url: str, size: int, *, sink: bool) -> Callable[[], Any]:
    from spotsafe.storage.s3 import S3Store

    store = S3Store(url)
    if sink:
        return ranges_with_digests(store, size)
    from spotsafe.reader import load_verified

    candidate = newest(store)
    return lambda: load_verified(store, candidate)


def ranges_with_digests(store: Any, size: int) -> Callable[[], Any]:
    """What a verified load does, for an object whose bytes are the sink's pattern."""
    import torch

    from sink import pattern
    from spotsafe.checkpoint.digest import block_digest

    expected = block_digest(pattern())
    store.names("")

    def load() -> Any:
        result = torch.empty(size, dtype=torch.uint8)
        view = memoryview(result.numpy())

        def read(start: int) -> None:
            block = view[start : start + PART]
            store.read_into("file", start, block)
            if block_digest(block) != expected:
                raise ValueError(f"bytes from {start} on are not the sink's")

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(read, range(0, size, PART)))
        return result

    return load


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[dict[str, str]]:
    from tests import servers

    with servers.running(servers.start_seaweedfs, folder) as server:
        yield {**server.env, "BENCH_ROOT": server.root}


@contextlib.contextmanager
def seaweedfs_https(folder: Path) -> Iterator[dict[str, str]]:
    from tests import servers

    with servers.running(servers.start_seaweedfs_tls, folder) as server:
        yield {**server.env, "BENCH_ROOT": server.root}


@contextlib.contextmanager
def sink_server(_folder: Path) -> Iterator[dict[str, str]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "sink.py"), "serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        port = process.stdout.readline().strip()
        try:
            yield {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_ACCESS_KEY_ID": "k",
                "AWS_SECRET_ACCESS_KEY": "s",
                "AWS_DEFAULT_REGION": "us-east-1",
                "BENCH_ROOT": "s3://bench",
            }
        finally:
            process.stdin.close()


def s3_table(name: str, start: Callable[[Path], Any], mib: int, repeats: int, folder: Path) -> None:
    with start(folder) as env:
        loads = () if start is seaweedfs_https else LOADS
        rows = s3_rows(env, mib, repeats, loads=loads, sink=start is sink_server)
    print(f"\n{f'S3: {name}, {mib} MiB':46s} CPU s/GiB      MiB/s  extra MiB")
    for (kind, how), costs in rows.items():
        cpu = statistics.median(one["cpu_s"] for one in costs) * 1024 / mib
        rate = mib / statistics.median(one["wall_s"] for one in costs)
        extra = max(one["extra_mib"] for one in costs)
        label = f"{kind}: " + (f"spotsafe by {how}" if how in OURS else how)
        print(f"  {label:44s} {cpu:9.2f} {rate:10.0f} {max(extra, 0):10.0f}")
    print_ratios(rows)


def s3_rows(
    env: dict[str, str], mib: int, repeats: int, *, loads: tuple[str, ...], sink: bool
) -> dict[tuple[str, str], list[dict[str, float]]]:
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(repeats):
        for how in SAVES:
            url = f"{env['BENCH_ROOT']}/{how.replace(' ', '-')}-{number}"
            rows.setdefault(("save", how), []).append(in_child("save", how, url, str(mib), env=env))
        for how in loads:
            made_by = {"boto3": "boto3", "DCP FsspecReader": "DCP FsspecWriter"}.get(how, "s3fs pipe_file")
            if sink:
                if how.startswith("DCP"):
                    continue  # it reads no pattern
                made_by = "s3fs pipe_file"
            url = f"{env['BENCH_ROOT']}/{made_by.replace(' ', '-')}-{number}"
            arguments = [how, url, str(mib), *(["sink"] if sink else [])]
            rows.setdefault(("load", how), []).append(in_child("load", *arguments, env=env))
        if not sink:
            in_child("clean", env["BENCH_ROOT"], env=env)
    return rows


def print_ratios(rows: dict[tuple[str, str], list[dict[str, float]]]) -> None:
    cpu = {which: statistics.median(one["cpu_s"] for one in costs) for which, costs in rows.items()}
    best_save = min(cost for (kind, how), cost in cpu.items() if kind == "save" and how not in OURS)
    print(
        f"  CPU of the best other save / ours: obstore {best_save / cpu['save', 'obstore']:.2f} (2)", end=""
    )
    print(f", boto3 {best_save / cpu['save', 'boto3']:.2f} (1)")
    if ("load", "boto3") not in cpu:
        return
    s3fs = min(cost for (kind, how), cost in cpu.items() if kind == "load" and how.startswith("s3fs"))
    print(f"  CPU of a load / ours: the best of s3fs {s3fs / cpu['load', 'boto3']:.2f} (1.4)", end="")
    dcp = cpu.get(("load", "DCP FsspecReader"))
    print("" if dcp is None else f", DCP {dcp / cpu['load', 'boto3']:.2f} (2)")


def case_clean(root: str) -> None:
    fs = s3fs_system()
    for place in fs.ls(root, refresh=True):
        fs.rm(place, recursive=True)


# -- many small tensors --------------------------------------------------------------------------------------------


def case_small(folder: str) -> dict[str, float]:
    import torch
    import torch.distributed.checkpoint as dcp

    import spotsafe
    from spotsafe import events

    class Times:
        def __init__(self) -> None:
            self.staged: list[float] = []
            self.written: list[float] = []

        def emit(self, event: events.Event) -> None:
            if isinstance(event, events.SaveStaged):
                self.staged.append(event.blocked_s)
            elif isinstance(event, events.CheckpointPublished):
                self.written.append(event.write_s)

    model = torch.nn.Module()
    for layer in range(SMALL_TENSORS // 1000):
        block = torch.nn.ParameterList([torch.full((16,), float(i)) for i in range(1000)])
        model.add_module(f"layer{layer}", block)
    times = Times()
    quiet = contextlib.redirect_stderr(io.StringIO())
    with quiet, spotsafe.session(f"{folder}/run", model=model, save_every=1, events=times) as run:
        for _ in run.range(4):
            run.wait()
    saves = [staged + written for staged, written in zip(times.staged, times.written, strict=True)]
    loaded, load = measured(lambda: spotsafe.load(f"{folder}/run"))
    del loaded
    state = dict(model.state_dict())
    _, dcp_save = measured(lambda: dcp.save(state, checkpoint_id=f"{folder}/dcp", no_dist=True))
    into = {name: torch.zeros_like(one) for name, one in state.items()}
    _, dcp_load = measured(lambda: dcp.load(into, checkpoint_id=f"{folder}/dcp", no_dist=True))
    return {
        "save": saves[0],
        "again": statistics.median(saves[1:]),
        "load": load.wall_s,
        "dcp_save": dcp_save.wall_s,
        "dcp_load": dcp_load.wall_s,
    }


# -- tables --------------------------------------------------------------------------------------------------------


def local_table(mib: int, repeats: int, folder: Path) -> None:
    rows = in_child("local", str(mib), str(repeats), str(folder))
    print(f"local, {mib} MiB" + " " * 8 + "ours MiB/s   raw MiB/s  ours/raw  wanted   CPU s/GiB ours, raw")
    wanted = {"save": 0.85, "load, cold cache": 0.85, "load, warm cache": 0.60}
    for row in rows:
        print(
            f"  {row['what']:18s} {row['ours']:10.0f} {row['theirs']:11.0f} {row['ratio']:9.2f} "
            f"{wanted[row['what']]:7.2f} {row['cpu']:12.2f} {row['theirs_cpu']:6.2f}"
        )


def small_table(folder: Path) -> None:
    row = in_child("small", str(folder))
    print(f"\n{SMALL_TENSORS} tensors of 64 bytes   ours s      DCP s   DCP/ours  wanted")
    for label, ours, theirs, wanted in (
        ("save, first", row["save"], row["dcp_save"], 15),
        ("save, plan kept", row["again"], row["dcp_save"], 40),
        ("load", row["load"], row["dcp_load"], 15),
    ):
        print(f"  {label:22s} {ours:10.2f} {theirs:10.2f} {theirs / ours:10.1f} {wanted:7d}")


def run_case(case: str, arguments: list[str]) -> Any:
    warnings.simplefilter("ignore")
    if case == "local":
        return case_local(int(arguments[0]), int(arguments[1]), arguments[2])
    if case == "save":
        return case_save(arguments[0], arguments[1], int(arguments[2]))
    if case == "load":
        return case_load(arguments[0], arguments[1], int(arguments[2]), sink=arguments[3:] == ["sink"])
    if case == "small":
        return case_small(arguments[0])
    return case_clean(arguments[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--s3-mib", type=int, default=256)
    parser.add_argument("--s3-repeats", type=int, default=3)
    parser.add_argument("--only", default="local,seaweedfs,sink,seaweedfs-https,small")
    parser.add_argument("--case", nargs="+")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case[0], options.case[1:])))
        return

    def s3(title: str, start: Callable[[Path], Any]) -> Callable[[Path], None]:
        return lambda here: s3_table(title, start, options.s3_mib, options.s3_repeats, here)

    with tempfile.TemporaryDirectory(dir=".", prefix="bench-") as name:
        folder = Path(name).resolve()
        tables = {
            "local": lambda here: local_table(options.mib, options.repeats, here),
            "seaweedfs": s3("SeaweedFS", seaweedfs),
            "sink": s3("a discarding server", sink_server),
            "seaweedfs-https": s3("SeaweedFS over https", seaweedfs_https),
            "small": small_table,
        }
        for part in options.only.split(","):
            (folder / part).mkdir()
            tables[part](folder / part)
            shutil.rmtree(folder / part)


if __name__ == "__main__":
    main()
