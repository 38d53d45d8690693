"""SIGTERM is noticed, nobody else's handling of signals suffers, and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from spotsafe.clock import SystemClock
from spotsafe.events import Warned
from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice
from spotsafe.reclaim.signals import ECHO_S, SECOND_SIGNAL_S, SignalWatch
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.sinks import RecordingSink

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
PATIENCE_S = 30.0


def until(condition: Callable[[], object]) -> None:
    """Give other threads the time they need."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.001)


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """After every test the handlers and the wakeup descriptor are those from before it."""
    watched = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in watched]
    yield
    after = [signal.getsignal(number) for number in watched]
    descriptor = signal.set_wakeup_fd(-1)
    for number, handler in zip(watched, before, strict=True):
        signal.signal(number, handler)
    assert after == before
    assert descriptor == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "spotsafe-signals"]


class Heard:
    """Collects notices."""

    def __init__(self) -> None:
        self.notices: list[ReclaimNotice] = []
        self.sink = RecordingSink()
        self.left: list[int] = []

    def watch(
        self, *signals: int, clock: ManualClock | None = None, grace_s: float | None = None
    ) -> SignalWatch:
        return SignalWatch(
            signals or (signal.SIGTERM,),
            report=self.notices.append,
            emit=self.sink.emit,
            clock=SystemClock() if clock is None else clock,
            grace_s=grace_s,
            leave=self.left.append,
        )


@pytest.fixture
def heard() -> Heard:
    return Heard()


def test_sigterm_is_a_notice_and_does_not_kill(heard: Heard):
    """One SIGTERM makes one RECLAIM of unknown deadline, at the next bytecode of the main thread."""
    watch = heard.watch(clock=ManualClock())
    assert watch.install()
    assert watch.sources == ("SIGTERM",)
    send()
    expected = ReclaimNotice(
        source="SIGTERM", kind=NoticeKind.RECLAIM, action="terminate", deadline=None, received=1000.0
    )
    assert heard.notices == [expected]
    watch.uninstall()
    assert heard.notices == [expected], "handler and listener together must count it once"
    assert watch.count == 1
    assert watch.sources == ()


def test_grace_is_its_deadline(heard: Heard):
    """Where the user knows the time left, the notice carries it."""
    watch = heard.watch(clock=ManualClock(), grace_s=30.0)
    watch.install()
    send()
    watch.uninstall()
    assert heard.notices[0].deadline == 1030.0


def test_the_second_signal_hurries_and_the_third_is_obeyed(heard: Heard, capfd: pytest.CaptureFixture[str]):
    """A second SIGTERM leaves five seconds at most, whatever the grace; the third leaves nothing and says so."""
    clock = ManualClock()
    watch = heard.watch(clock=clock, grace_s=30.0)
    watch.install()
    for expected in (1, 2, 3):
        assert heard.left == []
        send()
        assert watch.count == expected
        clock.advance(ECHO_S)
    watch.uninstall()
    assert [notice.deadline for notice in heard.notices] == [1030.0, 1001.0 + SECOND_SIGNAL_S, 1002.0]
    assert heard.left == [128 + signal.SIGTERM]
    assert capfd.readouterr().err.startswith("spotsafe: SIGTERM for the third time: leaving at once")


def test_an_echo_is_no_impatience(heard: Heard):
    """A launcher signals the group, and each process in it besides: three at once are one, with its whole grace."""
    clock = ManualClock()
    watch = heard.watch(clock=clock, grace_s=30.0)
    watch.install()
    for _ in range(3):
        send()
        clock.advance(0.3)
    assert (watch.count, len(heard.notices), heard.left) == (1, 1, [])
    clock.advance(ECHO_S)
    send()
    assert (watch.count, len(heard.notices), heard.left) == (2, 2, [])
    watch.uninstall()


@pytest.mark.parametrize("own", ["handler", "ignored"])
def test_the_programs_own_answer_to_the_signal_stands(heard: Heard, own: str):
    """Where the signal would not have ended the process without us, the third does not either."""
    calls: list[int] = []
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN if own == "ignored" else lambda number, _: calls.append(number)
    )
    clock = ManualClock()
    watch = heard.watch(clock=clock)
    watch.install()
    for _ in range(4):
        send()
        clock.advance(ECHO_S)
    watch.uninstall()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert len(calls) == (0 if own == "ignored" else 4)
    assert heard.left == []
    assert heard.notices[2].deadline == 1002.0


def test_of_two_watches_one_obeys(heard: Heard):
    """Two sessions in one process: the one below is the one that found the default there."""
    clock = ManualClock()
    below, above = heard.watch(clock=clock), heard.watch(clock=clock)
    below.install()
    above.install()
    for _ in range(3):
        send()
        clock.advance(ECHO_S)
    above.uninstall()
    below.uninstall()
    assert heard.left == [128 + signal.SIGTERM]


def test_the_second_signal_does_not_lengthen_a_short_grace(heard: Heard):
    """With two seconds of grace, the second signal leaves two and not five."""
    clock = ManualClock()
    watch = heard.watch(clock=clock, grace_s=2.0)
    watch.install()
    send()
    clock.advance(ECHO_S)
    send()
    watch.uninstall()
    assert [notice.deadline for notice in heard.notices] == [1002.0, 1003.0]


def test_several_signals_are_counted_each_for_itself(heard: Heard):
    """SIGUSR1 and then SIGTERM are two first signals, not one that hurries."""
    watch = heard.watch(signal.SIGTERM, signal.SIGUSR1)
    watch.install()
    assert watch.sources == ("SIGTERM", "SIGUSR1")
    send(signal.SIGUSR1)
    send(signal.SIGTERM)
    watch.uninstall()
    assert [(notice.source, notice.deadline) for notice in heard.notices] == [
        ("SIGUSR1", None),
        ("SIGTERM", None),
    ]
    assert watch.count == 2


class TestHandlersOfOthers:
    def test_a_handler_from_before_is_called_too(self, heard: Heard):
        """A Python handler that was there gets every signal after ours, and stands alone at the end."""
        calls: list[int] = []

        def mine(number: int, frame: object) -> None:
            assert len(heard.notices) == 1
            calls.append(number)

        signal.signal(signal.SIGTERM, mine)
        watch = heard.watch()
        watch.install()
        send()
        assert calls == [signal.SIGTERM]
        watch.uninstall()
        assert signal.getsignal(signal.SIGTERM) is mine
        send()
        assert calls == [signal.SIGTERM] * 2
        assert len(heard.notices) == 1
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def test_what_a_handler_from_before_raises_is_raised(self, heard: Heard):
        """A handler that ends the program does so, after the notice is in force."""

        def leave(number: int, frame: object) -> None:
            raise SystemExit(5)

        signal.signal(signal.SIGTERM, leave)
        watch = heard.watch()
        watch.install()
        with pytest.raises(SystemExit):
            send()
        watch.uninstall()
        assert len(heard.notices) == 1
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def test_an_ignored_signal_is_a_notice_and_ignored_again_at_the_end(self, heard: Heard):
        """SIG_IGN before means that there is nothing to call, and that it is put back."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        watch = heard.watch()
        watch.install()
        send()
        watch.uninstall()
        assert len(heard.notices) == 1
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def test_a_handler_installed_later_survives(self, heard: Heard):
        """Whoever comes after us keeps what he installed, inside and after."""
        calls: list[int] = []

        def mine(number: int, frame: object) -> None:
            calls.append(number)

        watch = heard.watch()
        watch.install()
        signal.signal(signal.SIGTERM, mine)
        send()
        watch.uninstall()
        assert signal.getsignal(signal.SIGTERM) is mine
        assert (len(calls), heard.notices) == (1, []), "he has taken the signal for himself"
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def test_a_handler_installed_later_may_pass_on_to_ours(self, heard: Heard):
        """Chained from above, ours works; and after the end it does what stood there before us."""
        below: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: below.append(number))
        watch = heard.watch()
        watch.install()
        ours = signal.getsignal(signal.SIGTERM)
        assert callable(ours)

        def above(number: int, frame: FrameType | None) -> None:
            ours(number, frame)

        signal.signal(signal.SIGTERM, above)
        send()
        assert (len(heard.notices), len(below)) == (1, 1)
        watch.uninstall()
        send()
        assert (len(heard.notices), len(below)) == (1, 2)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def test_a_later_handler_that_passes_on_to_ours_after_the_end_does_not_kill(self, heard: Heard):
        """Where nothing stood before us, there is nothing to pass on to, and certainly no default action."""
        watch = heard.watch()
        watch.install()
        ours, calls = signal.getsignal(signal.SIGTERM), list[int]()
        assert callable(ours)

        def above(number: int, frame: FrameType | None) -> None:
            calls.append(number)
            ours(number, frame)

        signal.signal(signal.SIGTERM, above)
        watch.uninstall()
        send()
        assert (calls, heard.notices) == ([signal.SIGTERM], [])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def test_two_watches_both_notice_and_end_in_either_order(self, heard: Heard):
        """Two sessions in one process both see the signal; whichever ends first, nothing stays."""
        for first_in_first_out in (False, True):
            other = Heard()
            one, two = heard.watch(), other.watch()
            one.install()
            two.install()
            send()
            until(lambda two=two, one=one: one.count == two.count == 1)
            for each in (one, two) if first_in_first_out else (two, one):
                each.uninstall()
            assert len(other.notices) == 1
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert len(heard.notices) == 2

    def test_the_one_that_is_left_still_notices(self, heard: Heard):
        """The upper one of two stays installed when the lower one ends, by handler and by listener."""
        lower, upper = Heard().watch(), heard.watch()
        lower.install()
        upper.install()
        lower.uninstall()
        send()
        upper.uninstall()
        assert len(heard.notices) == 1
        assert lower.count == 0

    def test_installing_and_uninstalling_twice_is_no_error(self, heard: Heard):
        """The second call finds the work done; an uninstalled one can be installed again."""
        watch = heard.watch()
        assert watch.install()
        assert watch.install()
        watch.uninstall()
        watch.uninstall()
        assert watch.install()
        send()
        watch.uninstall()
        assert len(heard.notices) == 1

    def test_descriptors_do_not_leak(self, heard: Heard):
        """Many sessions one after the other leave no open file."""
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            watch = heard.watch()
            watch.install()
            watch.uninstall()
        assert len(os.listdir("/proc/self/fd")) == before


class TestOffTheMainThread:
    def in_a_thread(self, work: Callable[[], object]) -> object:
        results: list[object] = []
        thread = threading.Thread(target=lambda: results.append(work()))
        thread.start()
        thread.join(PATIENCE_S)
        return results[0]

    def test_it_installs_nothing_and_says_so_once(self, heard: Heard):
        """Python forbids it there: False, one warning that says what to do, no ValueError."""
        before = signal.getsignal(signal.SIGTERM)
        watch = heard.watch()
        assert self.in_a_thread(watch.install) is False
        assert signal.getsignal(signal.SIGTERM) is before
        [warning] = heard.sink.of(Warned)
        assert "main thread" in warning.message
        assert "SIGTERM" in warning.message
        assert watch.sources == ()
        watch.uninstall()

    def test_uninstalled_there_it_does_what_was_before(self, heard: Heard):
        """The handler cannot be exchanged from there, so it steps aside and calls what stood before it."""
        calls: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
        watch = heard.watch(signal.SIGUSR1)
        watch.install()
        ours = signal.getsignal(signal.SIGUSR1)
        self.in_a_thread(watch.uninstall)
        assert signal.getsignal(signal.SIGUSR1) is ours
        send(signal.SIGUSR1)
        assert (calls, heard.notices) == ([signal.SIGUSR1], [])
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        listener = watch._listener
        assert listener is not None
        listener.stop()


class TestListener:
    def test_a_signal_is_noticed_while_the_main_thread_is_busy_in_c(self, heard: Heard):
        """The handler waits for the main thread, the listener does not."""
        watch = heard.watch()
        watch.install()
        times: list[float] = []

        def signal_and_watch() -> None:
            send()
            until(lambda: heard.notices)
            times.append(time.monotonic())

        helper = threading.Thread(target=signal_and_watch)
        helper.start()
        # One long call in C that no signal interrupts: what a collective or a compile looks like from Python.
        hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)
        came_back = time.monotonic()
        helper.join(PATIENCE_S)
        watch.uninstall()
        assert len(heard.notices) == 1
        assert times[0] < came_back

    def test_the_listener_alone_hears(self, heard: Heard, monkeypatch: pytest.MonkeyPatch):
        """Without the handler's help (the main thread never comes back) the notice still comes, once."""
        watch = heard.watch()
        watch.install()
        monkeypatch.setattr(watch._counters[signal.SIGTERM], "handled", lambda now: None)
        send()
        until(lambda: [each for each in heard.notices if each.received])
        until(lambda: watch.count >= 1)
        watch.uninstall()

    def test_bytes_go_on_to_the_previous_owner(self, heard: Heard):
        """Who had the descriptor before us gets every number, ours or not, and has it back at the end."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        reader.settimeout(PATIENCE_S)
        signal.set_wakeup_fd(writer.fileno())
        watch = heard.watch()
        watch.install()
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        send(signal.SIGUSR1)
        assert reader.recv(10) == bytes([signal.SIGUSR1])
        send()
        assert reader.recv(10) == bytes([signal.SIGTERM])
        watch.uninstall()
        assert signal.set_wakeup_fd(-1) == writer.fileno()
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        reader.close()
        writer.close()

    def test_a_previous_owner_that_is_gone_is_not_written_to(self, heard: Heard):
        """Its number may be anybody's by now: nothing is written there, and it is not put back."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        watch = heard.watch()
        watch.install()
        number = writer.fileno()
        writer.close()
        reader.close()
        stranger_reader, stranger = os.pipe()
        os.set_blocking(stranger, False)
        os.dup2(stranger, number)
        os.set_blocking(stranger_reader, False)
        send()
        watch.uninstall()
        with pytest.raises(BlockingIOError):
            os.read(stranger_reader, 10)
        for descriptor in {number, stranger, stranger_reader}:
            os.close(descriptor)
        assert len(heard.notices) == 1

    def test_an_owner_that_cannot_be_chained_keeps_the_descriptor(self, heard: Heard):
        """A descriptor on which writing can block stays as it is; the handler does the noticing."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        writer.setblocking(True)
        watch = heard.watch()
        watch.install()
        send()
        assert len(heard.notices) == 1
        watch.uninstall()
        assert signal.set_wakeup_fd(-1) == writer.fileno()
        assert writer.getblocking()
        reader.close()
        writer.close()

    def test_an_owner_that_closed_its_descriptor_is_nobody(self, heard: Heard):
        """What is closed before we come is neither passed on to nor put back."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        reader.close()
        writer.close()
        watch = heard.watch()
        watch.install()
        send()
        assert len(heard.notices) == 1
        watch.uninstall()

    def test_who_took_the_descriptor_after_us_keeps_it(self, heard: Heard):
        """At the end a later owner's descriptor is still in place."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        watch = heard.watch()
        watch.install()
        signal.set_wakeup_fd(writer.fileno())
        watch.uninstall()
        assert signal.set_wakeup_fd(-1) == writer.fileno()
        reader.close()
        writer.close()


class TestAsyncio:
    def test_inside_a_running_loop_its_own_handlers_work_and_ours_too(self, heard: Heard):
        """A session in a coroutine: a handler of the loop for another signal runs inside and after."""

        async def main() -> list[str]:
            loop, calls = asyncio.get_running_loop(), list[str]()
            came = asyncio.Event()

            def mine() -> None:
                calls.append("mine")
                came.set()

            loop.add_signal_handler(signal.SIGUSR1, mine)
            watch = heard.watch()
            watch.install()
            send(signal.SIGUSR1)
            await asyncio.wait_for(came.wait(), PATIENCE_S)
            send(signal.SIGTERM)
            await asyncio.sleep(0)
            assert len(heard.notices) == 1
            watch.uninstall()
            came.clear()
            send(signal.SIGUSR1)
            await asyncio.wait_for(came.wait(), PATIENCE_S)
            loop.remove_signal_handler(signal.SIGUSR1)
            return calls

        assert asyncio.run(main()) == ["mine", "mine"]

    def test_a_loop_that_starts_inside_the_session_works(self, heard: Heard):
        """asyncio.run in a loop body takes the descriptor and drops it: both still get their signals."""
        clock = ManualClock()
        watch = heard.watch(clock=clock)
        watch.install()

        async def main() -> None:
            loop, came = asyncio.get_running_loop(), asyncio.Event()
            loop.add_signal_handler(signal.SIGUSR1, came.set)
            send(signal.SIGUSR1)
            await asyncio.wait_for(came.wait(), PATIENCE_S)
            send(signal.SIGTERM)
            await asyncio.sleep(0)
            loop.remove_signal_handler(signal.SIGUSR1)

        asyncio.run(main())
        assert len(heard.notices) == 1
        clock.advance(ECHO_S)
        send(signal.SIGTERM)
        assert len(heard.notices) == 2
        watch.uninstall()

    def test_a_loop_that_owns_the_descriptor_but_does_not_run_yet_is_passed_on_to(self, heard: Heard):
        """Handlers added before the session, run after it began: the loop hears through us."""
        loop, calls = asyncio.new_event_loop(), list[int]()

        def mine() -> None:
            calls.append(1)
            loop.stop()

        loop.add_signal_handler(signal.SIGUSR1, mine)
        watch = heard.watch()
        watch.install()
        send(signal.SIGUSR1)
        loop.call_later(PATIENCE_S, loop.stop)
        loop.run_forever()
        watch.uninstall()
        assert calls == [1]
        loop.remove_signal_handler(signal.SIGUSR1)
        loop.close()


class TestFork:
    def child(self, work: Callable[[], object]) -> int:
        """Run it in a forked child; returns how the child ended, as Popen.returncode would say it."""
        pid = os.fork()
        if pid == 0:
            try:
                work()
                os._exit(0)
            except BaseException:
                os._exit(99)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def test_a_forked_child_dies_of_sigterm_as_without_us(self, heard: Heard):
        """The default action is back in the child, at once: DataLoader workers must be killable."""
        watch = heard.watch()
        watch.install()

        def work() -> None:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            assert signal.set_wakeup_fd(-1) == -1
            send()

        assert self.child(work) == -signal.SIGTERM
        watch.uninstall()
        assert heard.notices == [], "the child's signal must not reach the parent"

    def test_a_forked_child_has_the_handler_from_before(self, heard: Heard):
        """A Python handler from before us is what runs in the child."""
        calls: list[int] = []

        def mine(number: int, frame: object) -> None:
            calls.append(number)

        signal.signal(signal.SIGTERM, mine)
        watch, above = heard.watch(), Heard().watch()
        watch.install()
        above.install()

        def work() -> None:
            assert signal.getsignal(signal.SIGTERM) is mine
            send()
            assert calls == [signal.SIGTERM]
            assert heard.notices == []

        assert self.child(work) == 0
        above.uninstall()
        watch.uninstall()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def test_our_handler_in_a_child_acts_as_if_it_were_not_there(self, heard: Heard):
        """Where no fork hook ran, the handler sees by the pid that it is not at home."""
        watch = heard.watch()
        watch.install()
        handler = signal.getsignal(signal.SIGTERM)

        def work() -> None:
            watch.active = True
            signal.signal(signal.SIGTERM, handler)
            send()

        assert self.child(work) == -signal.SIGTERM
        watch.uninstall()
        assert heard.notices == []

    def test_the_parent_still_notices_after_a_fork(self, heard: Heard):
        """Forking and the child's end change nothing for us."""
        watch = heard.watch()
        watch.install()
        assert self.child(lambda: None) == 0
        send()
        watch.uninstall()
        assert len(heard.notices) == 1

    def test_uninstalling_in_a_child_changes_nothing_there(self, heard: Heard):
        """A child that runs the session's clean-up has nothing of ours to clean up."""
        watch = heard.watch()
        watch.install()

        def work() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            watch.uninstall()
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN

        assert self.child(work) == 0
        watch.uninstall()


STUCK = """
import hashlib
from spotsafe.reclaim import signals
signals.ECHO_S = 0.0
watch = signals.SignalWatch(report=lambda notice: print(notice.source, flush=True), emit=print, exit_code=75)
assert watch.install()
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)  # minutes in C, which no signal interrupts
"""


def test_the_third_signal_ends_a_process_that_is_stuck_in_c():
    """Its main thread never gets to the handler; the listener hears, says it, and leaves with the run's code."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "SIGTERM\n"
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "for the third time: leaving at once" in said


SLEEPER = """
import sys, threading
from spotsafe.reclaim.signals import SignalWatch
from spotsafe.reclaim.watcher import Watch
told = threading.Event()
watch = Watch([], emit=lambda event: (print(event.source, flush=True), told.set()))
signals = SignalWatch(report=watch.report, emit=print)
assert signals.install()
watch.start()
print("ready", flush=True)
assert told.wait(60)
signals.uninstall()
watch.stop()
print("left", flush=True)
if sys.argv[1] == "again":
    threading.Event().wait(60)
"""


@pytest.mark.parametrize(("after", "code"), [("leave", 0), ("again", -signal.SIGTERM)])
def test_a_real_process_notices_a_real_sigterm_and_dies_of_it_afterwards(after: str, code: int):
    """SIGTERM from outside is told and survived; once uninstalled, the next one kills as ever."""
    process = subprocess.Popen([sys.executable, "-c", SLEEPER, after], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n"
    assert process.stdout.readline() == "left\n"
    if after == "again":
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == code
    process.stdout.close()
