"""`spotsafe rollback`."""

from __future__ import annotations

import json

import pytest

from spotsafe.checkpoint.attempts import read_attempt
from spotsafe.checkpoint.candidates import look
from spotsafe.checkpoint.layout import attempt_record, data_file
from spotsafe.cli import rollback
from spotsafe.clock import SystemClock
from spotsafe.ledger.occupancy import Occupancy
from spotsafe.storage.open import open_store
from tests.cli import runs


@pytest.fixture
def impatient(monkeypatch):
    """A clock on which waiting takes no time; counts the seconds."""
    waited = []

    class Clock(SystemClock):
        def wait(self, event, timeout_s):
            waited.append(timeout_s)
            return False

    monkeypatch.setattr(rollback, "SystemClock", Clock)
    return waited


def files(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_rolls_back_and_says_what_that_means(tmp_path, call, impatient):
    """The chosen step, what is set aside, and that nothing was deleted; `ls` shows it."""
    _, two, three = runs.run(tmp_path, 1, 2, 3)

    result = call("rollback", f"{tmp_path}@2")

    assert result.exit_code == 0, result.output
    assert f"goes on from step 2 ({two}) at its next start; attempt 2 says so" in result.stdout
    assert f"{three}: set aside, not deleted" in result.stdout
    assert read_attempt(open_store(str(tmp_path)), 2).is_rollback
    listed = {line.split()[0]: line for line in call("ls", tmp_path).stdout.splitlines()}
    assert "set aside by a rollback" in listed["3"]
    assert "set aside" not in listed["2"]


def test_json(tmp_path, call, impatient):
    """Programs get the same members whether it was done, looked at, or needless."""
    one, two, three = runs.run(tmp_path, 1, 2, 3)

    look_first = json.loads(call("rollback", f"{tmp_path}@1", "--dry-run", "--json").stdout)
    done = json.loads(call("rollback", f"{tmp_path}@1", "--json").stdout)
    again = json.loads(call("rollback", f"{tmp_path}@{one}", "--json").stdout)
    back = json.loads(call("rollback", f"{tmp_path}@3", "--json").stdout)

    assert look_first.keys() == done.keys() == again.keys() == back.keys()
    assert (look_first["attempt"], look_first["done"], look_first["dry_run"]) == (None, False, True)
    assert (done["attempt"], done["done"], done["step"]) == (2, True, 1)
    assert done["set_aside"] == look_first["set_aside"] == [str(three), str(two)]
    assert (again["attempt"], again["done"], again["set_aside"]) == (None, True, [])
    assert (back["attempt"], back["brought_back"]) == (3, [str(three), str(two)])


def test_dry_run_changes_nothing(tmp_path, call):
    """It says what would be done; it does not even wait for a job that may be alive."""
    runs.run(tmp_path, 1, 2)
    before = files(tmp_path)

    result = call("rollback", f"{tmp_path}@1", "--dry-run")

    assert result.exit_code == 0, result.output
    assert "would go on from step 1" in result.stdout
    assert "nothing was changed" in result.stdout
    assert files(tmp_path) == before


def test_nothing_to_do_is_said(tmp_path, call):
    """The newest needs no rollback, and none is made."""
    runs.run(tmp_path, 1, 2)
    before = files(tmp_path)

    result = call("rollback", f"{tmp_path}@latest")

    assert (result.exit_code, "nothing to do" in result.stdout) == (0, True)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [
        ("", 2, "which checkpoint? Write"),
        ("@7", 1, "no checkpoint of step 7; there are steps 4, 2, 1"),
        ("@3", 1, "never published"),
        ("@best", 1, "has a metric"),
        ("@latest-and-greatest", 2, "which checkpoint"),
        ("@a000009-s000000001-0001-00000000", 1, "has no checkpoint"),
    ],
)
def test_what_cannot_be_gone_back_to(tmp_path, call, target, code, words):
    """Each mistake has its message and its exit code, and changes nothing."""
    runs.run(tmp_path, 1, 2)
    runs.checkpoint(tmp_path, 3, published=False)
    runs.checkpoint(tmp_path, 4)
    before = files(tmp_path)

    result = call("rollback", f"{tmp_path}{target}")

    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert result.stdout == ""
    assert files(tmp_path) == before


def test_no_run(tmp_path, call):
    """An empty folder is no run."""
    result = call("rollback", f"{tmp_path}@1")
    assert result.exit_code == 1
    assert "no run at" in result.stderr


def test_damaged_checkpoint_is_not_gone_back_to(tmp_path, call, impatient):
    """Every byte is read first: a start would only pass it over. Whoever knows better says so."""
    one, _ = runs.run(tmp_path, 1, 2)
    data = tmp_path / one.file(data_file(0, 0))
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    before = files(tmp_path)

    result = call("rollback", f"{tmp_path}@1")

    assert result.exit_code == 1
    assert str(one) in result.stderr
    assert "Nothing was changed" in result.stderr
    assert files(tmp_path) == before
    assert call("rollback", f"{tmp_path}@1", "--no-verify").exit_code == 0


def beating(tmp_path, monkeypatch):
    """Each look at the heartbeat finds another one."""
    beats = iter(range(1000))
    monkeypatch.setattr(
        "spotsafe.ledger.occupancy.read_heartbeat", lambda store, attempt: b"%d" % next(beats)
    )


def test_a_run_that_is_alive_is_left_alone(tmp_path, call, impatient, monkeypatch):
    """Its heart beats: an error that says how to go on, unless it is to be taken over."""
    runs.run(tmp_path, 1, 2)
    beating(tmp_path, monkeypatch)
    before = files(tmp_path)

    result = call("rollback", f"{tmp_path}@1")

    assert result.exit_code == 1
    assert "is alive. Stop it first, or pass --takeover" in result.stderr
    assert files(tmp_path) == before
    impatient.clear()
    assert call("rollback", f"{tmp_path}@1", "--takeover").exit_code == 0
    assert impatient == []


def test_a_run_without_an_end_is_watched_for_an_interval(tmp_path, call, impatient):
    """A machine that vanished wrote no end; after an interval without a beat it is taken for dead."""
    runs.run(tmp_path, 1, 2)

    result = call("rollback", f"{tmp_path}@1")
    assert result.exit_code == 0
    assert result.stderr.count("whether it is alive") == 1, "said once"
    assert sum(impatient) >= 30
    impatient.clear()
    assert call("rollback", f"{tmp_path}@2").exit_code == 0
    assert sum(impatient) >= 30, "the rollback in between says nothing about the attempt before it"


def test_a_damaged_newest_record_is_no_obstacle(tmp_path, call, impatient):
    """The command is the way out of a record that nobody can read."""
    runs.run(tmp_path, 1, 2)
    (tmp_path / attempt_record(2)).write_bytes(b"")

    result = call("rollback", f"{tmp_path}@1", "--json")

    assert json.loads(result.stdout)["attempt"] == 3
    assert look(open_store(str(tmp_path))).attempts == (1, 2, 3)


def test_other_commands_mean_what_counts(tmp_path, call, impatient):
    """The latest is the one gone back to; what is set aside can be looked at by its step, and is verified too."""
    _, two, three = runs.run(tmp_path, 1, 2, 3)
    call("rollback", f"{tmp_path}@2")
    for command in ("show", "verify"):
        assert str(two) in call(command, f"{tmp_path}@latest").stdout
        assert str(three) in call(command, f"{tmp_path}@3").stdout
        assert str(three) in call(command, f"{tmp_path}@{three}").stdout
    assert call("verify", tmp_path).stdout.count(": good") == 3


def test_a_folder_of_runs_shows_the_newest_that_counts(tmp_path, call, impatient):
    """Not the one that was set aside."""
    runs.run(tmp_path / "run", 1, 2, 3)
    call("rollback", f"{tmp_path / 'run'}@2")
    [record] = json.loads(call("ls", tmp_path, "--json").stdout)["runs"]
    assert (record["newest_step"], record["checkpoints"]) == (2, 3)


def test_long_lists_are_cut(tmp_path, call, impatient):
    """A screen is enough for people; --json has all."""
    runs.run(tmp_path, *range(30))

    result = call("rollback", f"{tmp_path}@0")

    assert "and 19 more" in result.stdout
    assert len(result.stdout.splitlines()) == 12


def test_what_a_job_did_while_it_was_watched_is_told(tmp_path, call, monkeypatch):
    """The list is that of the run as it was gone back in, not as it was before the wait."""
    _, two = runs.run(tmp_path, 1, 2)
    monkeypatch.setattr(Occupancy, "check", lambda *_: made.append(runs.checkpoint(tmp_path, 3)))
    made = []

    done = json.loads(call("rollback", f"{tmp_path}@1", "--json").stdout)

    assert done["set_aside"] == [str(made[0]), str(two)]
