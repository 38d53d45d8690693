"""The writer process: what `writer.boot` runs. Wiring only; imports no torch.

It opens the run anew, by its url, and writes what the trainer stages until the trainer has ended or wants no more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import mmap
import os
import socket
import time
from functools import partial

from spotsafe.ledger.reading import ended_at, writes_no_more
from spotsafe.storage.open import open_store, use_settings
from spotsafe.writer import wire
from spotsafe.writer.copied import BYTES
from spotsafe.writer.flight import MOST_IN_FLIGHT
from spotsafe.writer.serving import Told, Trainer, serve, telling
from spotsafe.writer.upload import Uploader


def main(end: socket.socket) -> None:
    """Serve the trainer at the other end of the connection, then end this process."""
    faulthandler.enable()
    trainer = Trainer(end, os.getppid())
    for hello, descriptors in trainer.messages():
        assert isinstance(hello, wire.Hello), "a trainer introduces itself first"
        # The lock stays open as long as this process lives: that is all it says.
        memory, _lock = descriptors
        trainer = Trainer(end, hello.trainer)
        logging.getLogger().addHandler(Told(trainer))
        words = memoryview(mmap.mmap(memory, BYTES * MOST_IN_FLIGHT))
        serve(trainer, hello, words, partial(_uploader, trainer))
        for path in hello.remains:
            with contextlib.suppress(OSError):
                os.unlink(path)
        break
    # Nothing is open that matters: what is published is durable, and threads of clients take their time.
    os._exit(0)


def _uploader(trainer: Trainer, hello: wire.Hello) -> Uploader:
    use_settings(hello.settings)
    store = open_store(hello.url)
    uploader = Uploader(
        store,
        emit=telling(trainer),
        monotonic=time.monotonic,
        ended=partial(writes_no_more, store) if hello.single_writer else None,
        ended_at=partial(ended_at, store),
    )
    for name in hello.unfinished:
        uploader.note_lost(name)
    return uploader
