"""Ranges of a graph's activations from the calibration data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compressor import catalog
from compressor.types.statistics import Observer, Request


def placeholders(requests: Sequence[Request]) -> Mapping[str, Any]:
    """Return statistics of the right form, for planning."""
    return {r.key: _observer(r.observer, r.options).placeholder() for r in requests}


def _observer(name: str, options: Mapping[str, Any]) -> Observer[Any, Any]:
    found: Observer[Any, Any] = catalog.load("observer", name)(**options)
    return found
