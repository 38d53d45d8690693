"""`spotsafe watch`: a notice of a cloud becomes a signal, and nothing else about the program changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotsafe.testing.aws import FakeAwsMetadata

PATIENCE_S = 60.0
WAITS = """
import signal, sys
def leave(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(7)
for one in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"):
    signal.signal(getattr(signal, one), leave)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def aws() -> Iterator[FakeAwsMetadata]:
    with FakeAwsMetadata() as fake:
        yield fake


class Watched:
    """A program below `spotsafe watch`, with pipes to what it says."""

    def __init__(
        self, *program: str, options: tuple[str, ...] = (), environ: dict[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spotsafe", "watch", *options, "--", *program],
            env={**os.environ, "AWS_EC2_METADATA_DISABLED": "", **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        """The next line of the program."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def said(self) -> str:
        """The next line of `spotsafe watch`."""
        assert self._process.stderr is not None
        return self._process.stderr.readline().strip().removeprefix("spotsafe watch: ")

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Exit code, and the rest of what the two say."""
        out, err = self._process.communicate(timeout=PATIENCE_S)
        return self._process.returncode, out, err


def waiting(aws: FakeAwsMetadata, *options: str) -> Watched:
    """A program that waits for a signal, and is ready."""
    watched = Watched(sys.executable, "-c", WAITS, options=options, environ=aws.environ)
    assert watched.said() == "watching: aws"
    assert watched.line() == "ready"
    return watched


def test_a_notice_becomes_a_signal(aws: FakeAwsMetadata) -> None:
    """At once, with the seconds that are left said, and the exit code is the program's."""
    watched = waiting(aws)
    aws.notice("terminate", in_seconds=120)
    assert watched.line() == "got SIGTERM"
    assert watched.said().startswith("aws: terminate, 1")
    assert watched.end() == (7, "", "")


def test_another_signal_and_less_time(aws: FakeAwsMetadata) -> None:
    """`--signal` chooses, and `--grace` says what a cloud does not know."""
    watched = waiting(aws, "--signal", "USR1", "--grace", "5")
    aws.notice("terminate", in_seconds=120)
    assert watched.line() == "got SIGUSR1"
    assert watched.said().endswith("s left; SIGUSR1 is sent")
    assert watched.end()[0] == 7


@pytest.mark.slow
def test_a_risk_is_no_end(aws: FakeAwsMetadata) -> None:
    """A rebalance recommendation is said, and the program goes on until the notice."""
    watched = waiting(aws)
    aws.rebalance()
    assert "only a risk, no signal is sent" in watched.said()
    aws.notice()
    assert watched.line() == "got SIGTERM"
    assert watched.end()[0] == 7


@pytest.mark.slow
def test_once_for_a_notice_and_again_for_the_next(aws: FakeAwsMetadata) -> None:
    """A notice that was taken back and comes again is another one."""
    counts = WAITS.replace("sys.exit(7)", "").replace(
        "while True:\n    signal.pause()", "signal.pause()\nsignal.pause()"
    )
    watched = Watched(sys.executable, "-c", counts, environ=aws.environ)
    assert (watched.said(), watched.line()) == ("watching: aws", "ready")
    aws.notice()
    assert watched.line() == "got SIGTERM"
    assert "SIGTERM is sent" in watched.said()
    aws.cancel()
    assert watched.said() == "aws has taken its notice back"
    aws.notice()
    assert watched.line() == "got SIGTERM"
    assert watched.end()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_on(aws: FakeAwsMetadata, number: signal.Signals) -> None:
    """As if the program had been started alone."""
    watched = waiting(aws)
    watched.send(number)
    assert watched.line() == f"got {number.name}"
    assert watched.end() == (7, "", "")


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import signal, os; signal.raise_signal(signal.SIGPIPE)", 0),
    ],
)
def test_the_exit_code_is_that_of_the_program(program: str, code: int) -> None:
    """A signal that ended it counts as a shell counts it; with no cloud in sight it is run all the same."""
    returned, _, err = Watched(sys.executable, "-c", program).end()
    assert returned == code
    assert "no cloud seen" in err


def test_started_by_somebody_who_ignores_the_end_of_children() -> None:
    """As some launchers do, and what is ignored is inherited: the exit code is the program's all the same."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        watched = Watched(sys.executable, "-c", "raise SystemExit(5)")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert watched.end()[0] == 5


def test_what_python_ignores_is_not_handed_down() -> None:
    """A program that is no Python ends at a closed pipe, as it does below a shell."""
    code, _, _ = Watched("sh", "-c", "kill -PIPE $$; exit 5").end()
    assert code == 128 + signal.SIGPIPE


def test_options_of_the_program_are_its_own() -> None:
    """Also such as this command has too."""
    code, out, _ = Watched("echo", "--grace", "-h", "--", "x").end()
    assert (code, out) == (0, "--grace -h -- x\n")


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    """127 and 126, as a shell has them, with the reason."""
    plain = tmp_path / "plain"
    plain.write_text("x")
    code, _, err = Watched("no-such-program-anywhere").end()
    assert code == 127
    assert "no-such-program-anywhere: No such file" in err
    code, _, err = Watched(str(plain)).end()
    assert code == 126
    assert "Permission denied" in err


def test_a_variable_that_makes_no_sense() -> None:
    """The program is not started, for nobody would tell it of its end."""
    environ = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "nonsense"}
    code, out, err = Watched("echo", "started", environ=environ).end()
    assert (code, out) == (1, "")
    assert "nonsense" in err


@pytest.mark.slow
def test_the_cloud_goes_away_and_comes_back(aws: FakeAwsMetadata) -> None:
    """That it cannot be asked is said, and ends nothing."""
    watched = waiting(aws)
    aws.stop()
    assert watched.said().startswith("aws cannot be asked: ")
    aws.start()
    assert watched.said() == "aws answers again"
    watched.send(signal.SIGTERM)
    assert watched.end()[0] == 7


def test_as_the_first_process_of_a_container() -> None:
    """Orphans come to it: they are waited for, and only the program's end is the end."""
    space = ["unshare", "--pid", "--fork", "--mount-proc"]
    able = subprocess.run([*space, "true"], capture_output=True, check=False)
    if able.returncode:
        pytest.skip(f"no pid namespace can be made here: {able.stderr.decode().strip()}")
    states = "for f in /proc/[0-9]*/stat; do cut -d' ' -f3 < $f; done"
    program = f"(sh -c 'exit 3' & sh -c 'sleep 0.1; exit 3' &); sleep 0.5; {states}; exit 4"
    done = subprocess.run(
        [*space, sys.executable, "-m", "spotsafe", "watch", "--", "sh", "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert done.stdout.split()
    assert "Z" not in done.stdout.split(), "an orphan that nobody has waited for"
