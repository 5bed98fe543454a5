"""What ends the command line from outside: Ctrl-C and termination, at any moment."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from threading import Event, Thread
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130
_GRACE = 1.0  # seconds in which Python code gets to see a signal
_CLEANING = 15.0  # seconds for removing what is half done


def end_silently_on_interrupt() -> None:
    """Let Ctrl-C end the process without a traceback while modules are imported.

    Nothing is done yet. Whoever has asked for it to be ignored is obeyed.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class Termination:
    """Treats a termination signal as Ctrl-C, and ends the process if nothing comes of it.

    Python code sees a signal once the C++ code that it called has returned, which may take
    minutes. A thread sees it at once. It ends the process as a kill would: what is half done
    lies in folders that the next command removes.

    Args:
        end: prints that the command was interrupted.
    """

    def __init__(self, end: Callable[[], object]):
        self._end = end
        self._noticed = Event()

    def watch(self) -> None:
        """Begin, in the main thread; for the rest of the process."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, self._interrupt)
        arrived, send = os.pipe()
        os.set_blocking(send, False)
        signal.set_wakeup_fd(send, warn_on_full_buffer=False)
        # A child's signals are none of ours.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        Thread(target=self._wait, args=(arrived,), daemon=True).start()

    def _interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        del number, frame
        self._noticed.set()
        raise KeyboardInterrupt

    def _wait(self, arrived: int) -> None:
        while True:
            terminated = signal.SIGTERM in os.read(arrived, 64)
            # While a model is trained, its state is saved first.
            if not terminated or signal.getsignal(signal.SIGTERM) != self._interrupt:
                continue
            if self._noticed.wait(_GRACE):
                Event().wait(_CLEANING)
            try:
                self._end()
            finally:
                os._exit(_INTERRUPTED)
