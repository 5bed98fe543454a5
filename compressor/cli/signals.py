"""What ends the command line from outside: Ctrl-C and termination, at any moment."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130
_GRACE = 0.1  # seconds in which Python code gets to see a signal
_CLEANING = 15.0  # seconds for removing what is half done
_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # sent to many at once
_FILES = 1024  # that a process may have open when it starts


_asked = Event()


def asked_to_end() -> bool:
    """Whether a signal has asked this process to end.

    ``KeyboardInterrupt`` may not arrive: raised while a library imports modules, it comes out as an
    error of that import, or of what the half imported module lacks.
    """
    return _asked.is_set()


def end_silently_on_interrupt() -> None:
    """Let Ctrl-C end the process without a traceback while modules are imported.

    Nothing is done yet. Whoever has asked for it to be ignored is obeyed.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class Termination:
    """Treats a termination signal as Ctrl-C, and ends the process if nothing comes of it.

    Python code sees a signal once the C++ code that it called has returned, which may take
    minutes. A thread sees it at once, unless that code holds Python's lock; then a process that
    does nothing else, the guard, sees that no thread has. Both end the process as a kill would:
    what is half done lies in folders that the next command removes.

    Whoever wants to go on after the signal, as a training does that saves its state, switches
    ``signal.set_wakeup_fd`` off meanwhile.

    Args:
        end: prints that the command was interrupted.
    """

    def __init__(self, end: Callable[[], object]):
        self._end = end
        self._ending = Lock()  # held by the thread that ends the process
        self._seen = False
        self._guard = 0

    def watch(self) -> None:
        """Begin, in the main thread and before there is another one; until :meth:`release`."""
        if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signal.SIGINT, _on_interrupt)
        arrived, send = socket.socketpair()
        watched = os.getpid()
        self._guard = os.fork()
        if not self._guard:
            send.close()
            _guard(arrived, watched, self._end)
        signal.signal(signal.SIGTERM, self._interrupt)
        send.setblocking(False)
        signal.set_wakeup_fd(send.detach(), warn_on_full_buffer=False)
        # A child's signals are not ours.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        Thread(target=self._wait, args=(arrived,), daemon=True).start()

    def release(self) -> None:
        """End the guard, so that no trace of it is left after the process."""
        if signal.getsignal(signal.SIGINT) is _on_interrupt:  # a second one ends us silently
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        with suppress(ProcessLookupError, ChildProcessError):  # another one has waited for it
            os.kill(self._guard, signal.SIGKILL)
            os.waitpid(self._guard, 0)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        signal.set_wakeup_fd(-1)
        if self._seen:  # a second one changes nothing
            return
        self._seen = True
        _asked.set()
        if not self._ending.acquire(blocking=False):
            time.sleep(_CLEANING)  # the other thread ends the process
        raise KeyboardInterrupt

    def _wait(self, arrived: socket.socket) -> None:
        while True:
            arrived.recv(1, socket.MSG_PEEK)  # read below: with Python's lock
            terminated = signal.SIGTERM in arrived.recv(64)
            # Somebody else may have taken it over.
            if not terminated or signal.getsignal(signal.SIGTERM) != self._interrupt:
                continue
            time.sleep(_GRACE)
            if not self._ending.acquire(blocking=False):  # the main thread has seen the signal
                time.sleep(_CLEANING)
            try:
                self._end()
            finally:
                os._exit(_INTERRUPTED)


def _on_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    _asked.set()
    raise KeyboardInterrupt


def _guard(arrived: socket.socket, watched: int, end: Callable[[], object]) -> NoReturn:
    """Kill the parent if it was terminated and no thread of it has seen that; end when it ends.

    Args:
        arrived: where the numbers of its signals come; they are left to its thread.
        watched: the number of the parent.
    """
    try:
        for number in _GROUP:
            signal.signal(number, signal.SIG_IGN)
        handle = arrived.fileno()
        for first, after in ((0, 2), (3, handle), (handle + 1, _FILES)):  # not stderr
            os.closerange(first, after)
        while arrived.recv(1, socket.MSG_PEEK) and os.getppid() == watched:
            time.sleep(_GRACE)
            with suppress(BlockingIOError):
                unseen = arrived.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                if signal.SIGTERM in unseen and os.getppid() == watched:
                    end()
                    os.kill(watched, signal.SIGKILL)
                    break  # it is there until its memory is given back, which may take seconds
    finally:
        os._exit(0)
