"""When garbage is looked for: not while most objects that are made stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_holders = 0
"""Blocks of :func:`objects_frozen` that are not left yet."""


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
    global _holders  # noqa: PLW0603 - the collector is one for the process, too
    if not _holders:  # an outer block keeps its objects
        gc.collect(1)
        gc.freeze()
    _holders += 1
    try:
        yield
    finally:
        _holders -= 1
        if not _holders:
            gc.unfreeze()


def freeze_objects() -> None:
    """Within :func:`objects_frozen`, also exclude the objects that exist now, until its end."""
    if _holders:
        gc.collect()
        gc.freeze()
