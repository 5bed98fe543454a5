"""Weights of an ONNX file that are in no layer, so that no pass touches them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.graph.stored_weights import is_quantized
from compressor.graph.values import DEFAULT_DOMAINS, static_shape
from compressor.types.carrier import Capability, Carrier

_SHARE = 0.25  # of the model's bytes, from which on the result is not what was asked for
_OPTIMIZER = "com.microsoft"
_MATRIX = 2  # axes


def unreached_weights(carrier: Carrier, previews: Sequence[Carrier], size: int) -> tuple[str, ...]:
    """Return a warning where much of a file is weights that passes do not know as such.

    They are floats of two axes and more that are in no layer, before or after the passes: those of
    an operator that ONNX Runtime's optimizer made of others, or the left operand of a product.

    Args:
        previews: the model after each pass.
        size: bytes of the float model.
    """
    chosen = [carrier, *previews[-1:]]
    known = all(c.kind == "onnx" and Capability.GRAPH in c.offers for c in chosen)
    if not previews or not known or is_quantized(carrier.graph()):
        return ()
    before, after = (_apart(c) for c in chosen)
    left = [value for name, value in before.items() if name in after]
    held = sum(0 if v.const_value is None else v.const_value.nbytes for v in left)
    if held == 0 or held < _SHARE * size:
        return ()
    nodes = {use.node: use.idx for value in left for use in value.uses()}
    names = ", ".join(sorted({_named(node, place) for node, place in nodes.items()}))
    text = (
        f"{100 * held / size:.0f} % of the model's bytes are weights in no layer, which no pass "
        f"touches: those of {names}"
    )
    if any(node.domain == _OPTIMIZER for node in nodes):
        text += "; export the model again without ONNX Runtime's graph optimizations"
    return (text,)


def _apart(carrier: Carrier) -> dict[str, ir.Value]:
    """Return the weights that are in no layer, by name."""
    layers = {layer.weight for layer in carrier.layers()}
    return {
        name: value
        for name, value in carrier.graph().graph.initializers.items()
        if name not in layers
        and any(value.uses())
        and value.dtype is not None
        and value.dtype.is_floating_point()
        and sum(length > 1 for length in static_shape(value) or ()) >= _MATRIX
    }


def _named(node: ir.Node, place: int) -> str:
    domain = "" if node.domain in DEFAULT_DOMAINS else f"{node.domain}."
    side = " (on its left)" if operator(node).is_product and place == 0 else ""
    return f"{domain}{node.op_type}{side}"
