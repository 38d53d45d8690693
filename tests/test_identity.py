"""Who this process is, under every launcher and under none."""

from __future__ import annotations

import contextvars
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spotsafe import identity
from spotsafe.identity import NONCES, Identity, Launcher, is_running, job_end, launchers_of, new_nonce

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "job7"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "2", "SLURM_JOB_ID": "4711"}


def of(environ: dict[str, str] | None = None, *argv: str) -> Identity:
    return Identity.of_this_process(environ or {}, argv or ("train.py",))


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, (0, 1, 0)),
        (TORCHRUN, (3, 8, 1)),
        (SLURM, (5, 16, 2)),
        ({**SLURM, **TORCHRUN}, (3, 8, 1)),
        ({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}, (0, 1, 0)),
        ({"RANK": "-1", "WORLD_SIZE": "many"}, (0, 1, 0)),
        ({"RANK": "x", **SLURM}, (5, 16, 2)),
    ],
)
def test_rank_and_world(environ: dict[str, str], place: tuple[int, int, int]) -> None:
    """torchrun's variables come first, then Slurm's; without either, or with nonsense, it is one process."""
    me = of(environ)

    assert (me.rank, me.world_size, me.local_rank) == place


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        (TORCHRUN, "TORCHELASTIC_RUN_ID=job7"),
        (SLURM, "SLURM_JOB_ID=4711"),
        ({"SKYPILOT_TASK_ID": "sky-1", **SLURM, **TORCHRUN}, "SKYPILOT_TASK_ID=sky-1"),
        ({**SLURM, **TORCHRUN}, "SLURM_JOB_ID=4711"),
    ],
)
def test_the_job_is_the_launchers(environ: dict[str, str], job: str) -> None:
    """The outermost launcher names the job: it is what stays the same over restarts."""
    assert of(environ).job == job


@pytest.mark.parametrize(
    ("environ", "launchers"),
    [
        ({}, ()),
        (TORCHRUN, (Launcher.TORCHRUN,)),
        ({**SLURM, **TORCHRUN}, (Launcher.TORCHRUN, Launcher.SLURM)),
        ({"SKYPILOT_TASK_ID": "sky-1", **TORCHRUN}, (Launcher.TORCHRUN, Launcher.SKYPILOT)),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, (Launcher.KUBERNETES,)),
        ({"SLURM_JOB_ID": ""}, ()),
    ],
)
def test_who_started_it(environ: dict[str, str], launchers: tuple[Launcher, ...]) -> None:
    """All of them, the innermost first."""
    assert launchers_of(environ) == launchers


@pytest.mark.parametrize(
    ("text", "at"), [("1700000000", 1.7e9), ("", None), ("soon", None), ("-1", None), ("N/A", None)]
)
def test_the_end_of_a_job_of_slurm(text: str, at: float | None) -> None:
    """What is no time counts as none."""
    assert job_end({"SLURM_JOB_END_TIME": text}) == at
    assert job_end({}) is None


@pytest.mark.parametrize("made_up", ["none", "5f0c1c4e-9d7e-4d0e-8a52-1f6f7f1c9b00"])
def test_a_run_id_that_torchrun_made_up_names_no_job(made_up: str) -> None:
    """`none` is what every torchrun without --rdzv-id says; with --standalone each start has another UUID."""
    assert of({"TORCHELASTIC_RUN_ID": made_up}).job == of({}).job


@pytest.mark.parametrize(
    ("host", "workload"),
    [
        ("gpt-x7k2p", "gpt"),
        ("gpt-0", "gpt-0"),
        ("gpt-train", "gpt-train"),
        ("gpt-worker-3", "gpt-worker-3"),
        ("gpt-5d4f8b7c9d-zx9wq", "gpt-5d4f8b7c9d"),
    ],
)
def test_in_kubernetes_the_workload_is_the_job(
    host: str, workload: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next pod of a Job is the same job; another Job, or the same name in another namespace, is another."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setattr(identity, "_NAMESPACE", str(tmp_path / "namespace"))
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "0"}

    assert of(pod).job == f"kubernetes=/{workload}"
    assert of({**pod, "POD_NAMESPACE": "team"}).job == f"kubernetes=team/{workload}"
    (tmp_path / "namespace").write_text("research\n")
    assert of(pod).job == f"kubernetes=research/{workload}"
    assert of({**pod, **TORCHRUN}).job == "TORCHELASTIC_RUN_ID=job7"


def test_two_pods_of_one_job_are_the_same_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Job's pod that was taken away comes back under another random name."""
    jobs = set()
    for host in ("gpt-x7k2p", "gpt-b4zq9"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        jobs.add(of({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}).job)
    assert len(jobs) == 1


def test_without_a_launcher_host_and_arguments_are_the_job() -> None:
    """The same command again is the same job; another argument or order is another."""
    assert of({}, "train.py", "--lr=1").job == of({}, "train.py", "--lr=1").job
    others = {
        of({}, "train.py", "--lr=2").job,
        of({}, "train.py").job,
        of({}, "--lr=1", "train.py").job,
        of({}, "train.py--lr=1").job,
        of({}, "train.py", "--lr=1").job,
    }
    assert len(others) == 5
    assert socket.gethostname() in of({}).job


def test_another_host_is_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two people may run the same script with the same arguments on two machines."""
    here = of({}).job
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")

    assert of({}).job != here


def test_arguments_that_are_no_utf8_are_no_error() -> None:
    """A file name in another encoding may be an argument."""
    assert of({}, "train.py", "caf\udce9").job.startswith("host=")


def test_the_process_itself() -> None:
    """Host, pid and arguments are those of this process; defaults come from the real environment."""
    me = Identity.of_this_process()

    assert (me.host, me.pid) == (socket.gethostname(), os.getpid())
    assert me.arguments == tuple(sys.argv)


def test_the_boot_id_is_the_same_until_the_next_boot() -> None:
    """Two processes of one boot agree on it."""
    command = "from spotsafe.identity import Identity; print(Identity.of_this_process().boot)"
    other = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)

    assert other.stdout.strip() == of().boot


def test_a_system_without_a_boot_id_has_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc is missing nothing fails."""

    def missing(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)

    assert identity._boot_id() == ""
    assert is_running(os.getpid()) is False


def test_nonces_are_eight_digits_and_differ() -> None:
    """What tells two writers of the same name apart."""
    nonces = {new_nonce() for _ in range(1000)}

    assert len(nonces) > 990
    assert all(re.fullmatch(r"[0-9a-f]{8}", nonce) for nonce in nonces)


def test_is_running() -> None:
    """This process runs; one that has been waited for does not."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    assert is_running(os.getpid())
    assert is_running(child.pid)

    child.communicate(b"\n")
    assert not is_running(child.pid)


def test_a_zombie_does_not_run() -> None:
    """A process that has ended and was not waited for holds its number, but writes nothing any more."""
    child = subprocess.Popen([sys.executable, "-c", ""])

    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert not is_running(child.pid)
    child.wait()


def test_a_test_can_say_which_nonces_come() -> None:
    """A context of its own may have nonces of its own; everybody else's stay random."""

    def repeatable() -> str:
        NONCES.set(lambda: "0123abcd")
        return new_nonce()

    assert contextvars.Context().run(repeatable) == "0123abcd"
    assert new_nonce() != "0123abcd"
