"""Rules for recurrent layers as PyTorch's exporters write them."""

from __future__ import annotations

import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.graph.values import constant_array, input_of, is_op
from compressor.passes.fuse.draft import Draft, integers, private_maker, replace

_MOVES = ("shape", "order", "some")
_STATES = (5, 6)  # of an LSTM, a GRU or an RNN; a GRU and an RNN have the first alone


def zero_states(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Leave out first states that are zero, as they are where nothing is given.

    Their shape has the batch, so that it was computed in each run.
    """
    if operator(node).recurrent is None or node.domain not in ("", "ai.onnx"):
        return False
    zeros = [i for i in _STATES if _is_zero(input_of(node, i))]
    for index in zeros:
        node.replace_input_with(index, None)
    return bool(zeros)


def _is_zero(value: ir.Value | None) -> bool:
    """Whether a value is zero everywhere: repeated, cut or laid out otherwise."""
    if value is None:
        return False
    held = constant_array(value)
    if held is not None:
        return held.dtype.kind == "f" and not held.any()
    node = value.producer()
    if node is None:
        return False
    if operator(node).moves in _MOVES:
        return _is_zero(node.inputs[0])
    if operator(node).zeros != "repeated":
        return False
    if len(node.inputs) > 1:  # a value, and the shape that it is repeated to
        return _is_zero(node.inputs[0])
    fill = node.attributes.get("value")
    return fill is None or not fill.as_tensor().numpy().any()


def reshape_units(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Replace ``Reshape(Transpose(x))`` by ``Reshape(x)`` where only axes of length 1 move."""
    if not is_op(node, "Reshape"):
        return False
    transpose = private_maker(node.inputs[0], node, "Transpose")
    source = None if transpose is None else transpose.inputs[0]
    wanted = integers(input_of(node, 1))
    if transpose is None or source is None or source.shape is None or wanted is None:
        return False
    perm = list(transpose.attributes.get_ints("perm", ()))
    long = [axis for axis in perm if source.shape[axis] != 1]
    if not perm or long != sorted(long):
        return False
    copied = [axis for axis, length in enumerate(wanted) if length == 0]
    if any(axis >= len(perm) or perm[axis] != axis for axis in copied):
        return False
    replace(node, "Reshape", [source, node.inputs[1]], dict(_allowzero(node)))
    return True


def _allowzero(node: ir.Node) -> dict[str, int]:
    return {"allowzero": 1} if node.attributes.get_int("allowzero", 0) else {}
