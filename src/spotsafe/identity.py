"""Who this process is: rank, job, host, and what tells it from another start of the same program."""

from __future__ import annotations

import enum
import hashlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

NONCES: ContextVar[Callable[[], str]] = ContextVar("spotsafe_nonces", default=lambda: secrets.token_hex(4))
"""Where nonces come from. Only a test that must be repeatable sets it."""

# torchrun's run id where nobody gave one: "none", or with --standalone another UUID at each start.
_MADE_UP = re.compile(r"none|[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
# What Kubernetes appends to the name of a Job to name its next pod: five of its letters without vowels. A pod of an
# Indexed Job or of a StatefulSet has a host name that stays, with its index.
_POD_SUFFIX = re.compile(r"-[bcdfghjklmnpqrstvwxz2456789]{5}$")
_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


class Launcher(enum.Enum):
    """Who starts processes, and makes something of how they end."""

    TORCHRUN = "torchrun"
    SKYPILOT = "SkyPilot"
    SLURM = "Slurm"
    KUBERNETES = "Kubernetes"


_LAUNCHERS = {
    "TORCHELASTIC_RUN_ID": Launcher.TORCHRUN,
    "SKYPILOT_TASK_ID": Launcher.SKYPILOT,
    "SLURM_JOB_ID": Launcher.SLURM,
    "KUBERNETES_SERVICE_HOST": Launcher.KUBERNETES,
}


def launchers_of(environ: Mapping[str, str]) -> tuple[Launcher, ...]:
    """All that started a process with this environment, the innermost first; none for a bare program."""
    return tuple(launcher for name, launcher in _LAUNCHERS.items() if environ.get(name))


def job_end(environ: Mapping[str, str]) -> float | None:
    """When the time that Slurm gave the job is over, in seconds since 1970; None if it does not say."""
    text = environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isascii() and text.isdigit() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process of a job."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int
    boot: str
    """The kernel's boot id and the pid namespace: tells whether a pid of another record is one of ours."""
    job: str
    """Stable over restarts of the same job, different for another job."""
    arguments: tuple[str, ...]

    @staticmethod
    def of_this_process(
        environ: Mapping[str, str] | None = None, argv: Sequence[str] | None = None
    ) -> Identity:
        """Read the launcher's environment variables; without a launcher, host and arguments are the job.

        In Kubernetes the job is the namespace and the workload's name, as the pod's host name has it: a completion
        index alone is the same in every Job.
        """
        env = os.environ if environ is None else environ
        arguments = tuple(sys.argv if argv is None else argv)
        host = socket.gethostname()
        return Identity(
            rank=_number(env, ("RANK", "SLURM_PROCID"), 0),
            world_size=_number(env, ("WORLD_SIZE", "SLURM_NTASKS"), 1),
            local_rank=_number(env, ("LOCAL_RANK", "SLURM_LOCALID"), 0),
            host=host,
            pid=os.getpid(),
            boot=_boot_id(),
            job=_job_id(env, host, arguments),
            arguments=arguments,
        )


def new_nonce() -> str:
    """Eight hexadecimal digits that no other writer has."""
    return NONCES.get()()


def is_running(pid: int) -> bool:
    """Whether a process of this number lives on this host (a zombie does not count)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def _number(env: Mapping[str, str], names: Sequence[str], default: int) -> int:
    for name in names:
        text = env.get(name, "")
        if text.isdigit():
            return int(text)
    return default


def _job_id(env: Mapping[str, str], host: str, arguments: Sequence[str]) -> str:
    for name in ("SKYPILOT_TASK_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        value = env.get(name, "")
        if value and not (name == "TORCHELASTIC_RUN_ID" and _MADE_UP.fullmatch(value)):
            return f"{name}={value}"
    if env.get("KUBERNETES_SERVICE_HOST"):
        return f"kubernetes={_namespace(env)}/{_POD_SUFFIX.sub('', host)}"
    digest = hashlib.sha256("\0".join((host, *arguments)).encode("utf-8", "surrogateescape")).hexdigest()
    return f"host={host} arguments={digest[:16]}"


def _namespace(env: Mapping[str, str]) -> str:
    try:
        with open(_NAMESPACE, encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, UnicodeError):
        return env.get("POD_NAMESPACE", "")


def _boot_id() -> str:
    """Two containers of one machine may have one host name, but not one pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
