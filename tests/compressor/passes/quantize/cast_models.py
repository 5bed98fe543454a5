"""Apply ``cast`` to a graph, and look at what it made of it."""

from collections import Counter

import onnx_ir as ir

from compressor.passes.quantize.cast.cast import Cast
from compressor.types.carrier import Carrier
from compressor.types.passes import Outcome, PassContext
from compressor.types.tensors import Array
from tests.compressor.passes.quantize.small_models import (
    file_bytes,
    graph,
)

PLAIN = PassContext()
HALF = ir.DataType.FLOAT16


def applied(carrier: Carrier, step: Cast | None = None) -> Outcome:
    return (step or Cast()).apply(carrier, PLAIN, {})


def half(text: str, **weights: Array) -> tuple[Carrier, Carrier]:
    """Return a graph and the same in half precision, which must be sound."""
    carrier = graph(text, weights)
    result = applied(carrier).carrier
    check_casts(result)
    return carrier, result


def check_casts(carrier: Carrier) -> None:
    """No cast follows a cast, none is idle, and no value is cast to one type twice."""
    file_bytes(carrier)
    made: Counter[tuple[str | None, int]] = Counter()
    for node in carrier.graph().graph:
        if node.op_type != "Cast" or node.inputs[0] is None:
            continue
        source = node.inputs[0]
        before = source.producer()
        to = node.attributes.get_int("to", 0)
        assert before is None or before.op_type != "Cast"
        assert source.dtype is None or source.dtype.value != to
        made[source.name, to] += 1
    assert set(made.values()) <= {1}


def kinds(carrier: Carrier) -> dict[str, ir.DataType | None]:
    """Element type of each node's first output, by operator (the last of each)."""
    return {node.op_type: node.outputs[0].dtype for node in carrier.graph().graph}


def stored(carrier: Carrier, name: str) -> ir.DataType | None:
    return carrier.graph().graph.initializers[name].dtype
