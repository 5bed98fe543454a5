"""The number of threads that models compute on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_COUNT: ContextVar[int | None] = ContextVar("threads", default=None)


def usual_threads() -> int | None:
    """Return the threads of a model that is opened now; ``None`` where its runtime chooses."""
    return _COUNT.get()


@contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """Make models that are opened and run inside the block compute on this many threads.

    It reaches all runtimes on the processor, also where another exporter's code opens them.

    Args:
        count: number of threads, the calling one included; ``None`` leaves it to the runtimes.
    """
    import torch

    usual = torch.get_num_threads()
    torch.set_num_threads(count or usual)
    try:
        with sessions_on_threads(count):
            yield
    finally:
        torch.set_num_threads(usual)


@contextmanager
def sessions_on_threads(count: int | None) -> Iterator[None]:
    """Do the same without PyTorch, which is then not imported."""
    token = _COUNT.set(count)
    try:
        yield
    finally:
        _COUNT.reset(token)
