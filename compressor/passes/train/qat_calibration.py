"""Ranges of a graph's activations from the calibration data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from compressor import catalog
from compressor.types.carrier import Carrier
from compressor.types.data import share
from compressor.types.statistics import Observer, Request
from compressor.types.training import Training


def calibrated(
    carrier: Carrier, graph: ir.Model, requests: Sequence[Request], training: Training
) -> dict[str, Any]:
    """Return the requested statistics by their keys.

    The run itself collects statistics of the model that a pass is given; here they are of a graph
    that exists only inside the pass.

    Args:
        carrier: the model that the graph was made from.
        graph: what is run.
        requests: what to observe.
        training: has the calibration data.

    Raises:
        DataError: there are none, or a value is not finite.
    """
    inputs = {i.name for i in carrier.inputs}
    taps = dict.fromkeys(t for r in requests for t in r.tensors if t not in inputs)
    runner = carrier.with_graph(graph).runner(tuple(taps))
    found: dict[str, Any] = catalog.resolve(catalog.COLLECT)(
        lambda batch: {**batch, **runner.run(batch)},
        share(training.samples.batches(), training.ranks),
        requests,
        _observer,
        None,
        training.ranks,
    )
    return found


def placeholders(requests: Sequence[Request]) -> Mapping[str, Any]:
    """Return statistics of the right form, for planning."""
    return {r.key: _observer(r.observer, r.options).placeholder() for r in requests}


def _observer(name: str, options: Mapping[str, Any]) -> Observer[Any, Any]:
    found: Observer[Any, Any] = catalog.load("observer", name)(**options)
    return found
