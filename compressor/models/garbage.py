"""When garbage is looked for: not while most objects that are made stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Suspend garbage collection inside the block, and look once for what it has left.

    For graphs that are made: nearly all of these objects stay, and to look for garbage among them
    again and again takes a seventh of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.collect(1)  # what stays is old from now on
            gc.enable()


@contextmanager
def objects_frozen() -> Iterator[None]:
    """Exclude the objects that exist already from garbage collection inside the block.

    A full collection takes a third of a second because of the libraries' objects, and a run
    collects after each pass: a graph has reference cycles, and would keep its weights until then.
    Garbage of the planning is young, and the oldest objects are the libraries'.
    """
    if gc.get_freeze_count():  # whoever has done so keeps them
        yield
        return
    gc.collect(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def freeze_objects() -> None:
    """Within :func:`objects_frozen`, also exclude the objects that exist now, until its end."""
    if gc.get_freeze_count():
        gc.collect()
        gc.freeze()
