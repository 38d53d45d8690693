"""The writer process at work: takes one staged save after another, and outlives the trainer by the last one."""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator

from spotsafe.events import Event
from spotsafe.writer import channel, wire
from spotsafe.writer.copied import Staging, place_of
from spotsafe.writer.upload import Uploader

_PARENT_EVERY_MS = 500
"""How often to look for the trainer where the system does not tell when it ends."""
_FULL_MS = 100


class Trainer:
    """The process that is served, and the way to it.

    Args:
        end: of the connection to it.
        pid: its number.
    """

    def __init__(self, end: socket.socket, pid: int) -> None:
        self._end, self._pid = end, pid
        self._lock = threading.RLock()
        self._watch: int | None = None
        with contextlib.suppress(AttributeError, OSError):
            self._watch = os.pidfd_open(pid)

    def is_gone(self) -> bool:
        """Whether it has ended. A forked child of it may still hold its end of the connection open."""
        if os.getppid() != self._pid:
            return True
        if self._watch is None:
            return False
        poll = select.poll()
        poll.register(self._watch, select.POLLIN)
        return bool(poll.poll(0))

    def messages(self) -> Iterator[tuple[wire.ToWriter, list[int]]]:
        """What it says, until it has ended or says no more; what it said before is not lost."""
        while True:
            # Asked before the last look: what was sent before the end is there by then.
            gone = self.is_gone()
            try:
                received = channel.receive(self._end)
            except BlockingIOError:
                if gone:
                    return
                self._wait()
                continue
            if received is None:
                return
            data, descriptors = received
            yield wire.for_writer(data), descriptors

    def tell(self, message: wire.ToTrainer) -> None:
        """Send it something; nothing if it is not there any more."""
        data = wire.encode(message)
        with self._lock:
            while True:
                try:
                    channel.send(self._end, data)
                except BlockingIOError:
                    if self.is_gone():
                        return
                    self._wait_for_room()
                    continue
                except OSError:
                    return
                return

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        if self._watch is not None:
            poll.register(self._watch, select.POLLIN)
        poll.poll(None if self._watch is not None else _PARENT_EVERY_MS)

    def _wait_for_room(self) -> None:
        poll = select.poll()
        poll.register(self._end, select.POLLOUT)
        poll.poll(_FULL_MS)


class Told(logging.Handler):
    """Gives what is logged here to the trainer's log."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(logging.WARNING)
        self._trainer = trainer

    def emit(self, record: logging.LogRecord) -> None:
        """Send the record, with its traceback as text."""
        try:
            text = self.format(record).encode(errors="backslashreplace").decode()
            self._trainer.tell(wire.Logged(logger=record.name, level=record.levelno, text=text))
        except Exception:  # noqa: BLE001 - logging's own way: report by its rules, never raise
            self.handleError(record)


class Service:
    """Writes what one trainer stages.

    Args:
        trainer: who it is.
        uploader: writes.
        words: memory of the `Staging` words.
    """

    def __init__(self, trainer: Trainer, uploader: Uploader, words: memoryview) -> None:
        self._trainer, self._uploader, self._words = trainer, uploader, words
        self._receiver = wire.Receiver()
        self._maps: dict[int, mmap.mmap] = {}

    def take(self, message: wire.Job, descriptors: list[int]) -> None:
        """Write one save, and tell how it ended."""
        for number in message.gone:
            _let_go(self._maps.pop(number))
        for memory, descriptor in zip(message.new, descriptors, strict=True):
            self._maps[memory.number] = mmap.mmap(descriptor, memory.size, prot=mmap.PROT_READ)
            os.close(descriptor)
        job = self._receiver.job(message)
        staging, copy = None, message.copy
        if copy is not None:
            words, gone = place_of(self._words, copy.place), self._trainer.is_gone
            staging = Staging(words, serial=copy.serial, gone=gone)
        lent = None if message.lent is None else memoryview(self._maps[message.lent.number])
        result = self._uploader.run(job, memoryview(self._maps[message.arena.number]), lent, staging)
        if message.lent is not None:
            del lent
            _let_go(self._maps.pop(message.lent.number))
        self._trainer.tell(wire.finished(result, undecided=self._uploader.undecided))


def _let_go(memory: mmap.mmap) -> None:
    """Give memory back, which may be as large as a model, at once: not when the collector next comes by."""
    try:
        memory.close()
    except BufferError:  # by the frames of an error that somebody has handled
        gc.collect()
        with contextlib.suppress(BufferError):
            memory.close()


def serve(
    trainer: Trainer, hello: wire.Hello, words: memoryview, make: Callable[[wire.Hello], Uploader]
) -> None:
    """Take saves until the trainer has ended or wants no more; the last one is finished in any case.

    Args:
        trainer: whom to serve.
        hello: its first message.
        words: memory of the `Staging` words.
        make: makes what writes.
    """
    service = Service(trainer, make(hello), words)
    trainer.tell(wire.Ready())
    for message, descriptors in trainer.messages():
        assert isinstance(message, wire.Job), "a trainer introduces itself once"
        service.take(message, descriptors)


def telling(trainer: Trainer) -> Callable[[Event], None]:
    """An `emit` whose events the trainer gets."""

    def emit(event: Event) -> None:
        trainer.tell(wire.said(event))

    return emit
