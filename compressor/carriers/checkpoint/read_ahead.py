"""Read parts of mapped files a bounded distance before they are used.

One thread touches every page in order, so the kernel sees one sequential reader, whatever the
number of threads that use the data: it then reads ahead by itself in large pieces, which costs a
fraction of what asking for pieces (``POSIX_FADV_WILLNEED``) does. Pages go as soon as they have
been used; those that follow take their place.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from compressor.carriers.checkpoint.reading import Span
from compressor.errors import ModelError

DISTANCE = 64 << 20
"""Bytes that may be read and not yet used; the page cache holds little more of the input."""

_STEP = 2 << 20  # bytes read at once


class ReadAhead:
    """Reads spans into the page cache in the order in which they will be used.

    Used as a context manager; its thread ends when the block does.

    Args:
        spans: what will be read, in this order.
        distance: how many bytes may be read and not yet :meth:`used`.
    """

    def __init__(self, spans: Iterable[Span], distance: int = DISTANCE):
        self._spans = tuple(spans)
        self._left = distance
        self._change = threading.Condition()
        self._ended = False
        self._files = ExitStack()
        self._handles: dict[Path, int] = {}
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        try:
            for path in dict.fromkeys(span.file.path for span in self._spans):
                handle = self._files.enter_context(path.open("rb"))
                self._handles[path] = handle.fileno()
        except OSError:
            self._files.close()
            raise
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._change:
            self._ended = True
            self._change.notify_all()
        self._thread.join()
        self._files.close()

    def used(self, span: Span) -> None:
        """Say that a span has been read for the last time; its pages may go."""
        span.file.release(span.start, span.stop)
        handle = self._handles[span.file.path]
        with suppress(OSError):  # it is advice, and some file systems take none
            os.posix_fadvise(handle, span.start, span.stop - span.start, os.POSIX_FADV_DONTNEED)
        with self._change:
            self._left += span.stop - span.start
            self._change.notify_all()

    def _run(self) -> None:
        for span in self._spans:
            for start in range(span.start, span.stop, _STEP):
                length = min(_STEP, span.stop - start)
                with self._change:
                    # A single piece longer than the distance must not wait for ever.
                    self._change.wait_for(lambda: self._ended or self._left > 0)
                    if self._ended:
                        return
                    self._left -= length
                try:
                    span.file.touch(start, start + length)
                except ModelError:
                    return  # whoever uses the data meets the same error, and reports it
