"""Ctrl-C during training: the step is finished and its state saved before the process ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether somebody wants the training to end."""

    def __init__(self) -> None:
        self.wanted = False

    def note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Take a signal.

        Raises:
            KeyboardInterrupt: it is the second one: there is no time to save anything.
        """
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


@contextmanager
def deferred_interrupts() -> Iterator[Interruption]:
    """Yield what tells whether SIGINT or SIGTERM has come, which no longer end the process at once.

    Outside of the main thread nothing changes: only that one is told about signals.
    """
    found = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    before = {number: signal.signal(number, found.note) for number in _SIGNALS}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
