"""Fold a constant factor or term into the layer behind it.

Networks scale and shift activations by one learned number each, as PP-LCNetV3 does: between an
activation and a layer, nothing before them can take them over.
"""

from __future__ import annotations

import onnx_ir as ir

from compressor.graph.layers import layer_of
from compressor.graph.operators import operator
from compressor.graph.values import constant_of
from compressor.passes.fuse.absorb import (
    Step,
    Target,
    arithmetic_step,
    bias_fits,
    scale_weight,
    set_bias,
)
from compressor.passes.fuse.affine import Affine, identity
from compressor.passes.fuse.draft import Draft, node_graph, private_maker, scalar, wide
from compressor.passes.fuse.halves import is_held

_MOST = 16.0  # times a factor that a term may be: sums with larger ones would lose digits


def fold_ahead(node: ir.Node, draft: Draft) -> bool:
    """Fold multiplications by and additions of one number into the layer that reads them."""
    layer = layer_of(node) if operator(node).is_product else None
    if layer is None or not bias_fits(node, layer):
        return False
    target, changed = Target(layer, node, None, ()), False
    while (step := _step_before(node.inputs[0], node)) is not None and not target.obstacle:
        if step.scales:
            if not is_held(step, target):
                break
            scale_weight(step, target, draft)
        elif layer.bias_is_separate or layer.is_transposed_convolution:
            break
        elif _is_padded(node):  # what lies beyond the image is no sum
            if not _turn_around(step, target, draft):
                break
            changed = True
            break
        else:
            _add_to_bias(step, target, draft)
        _drop(step)
        draft.did(layer.name, f"fold {step.name} before it")
        draft.counts[f"{step.name.split()[0]} folded"] += 1
        changed = True
    return changed


def _step_before(value: ir.Value | None, reader: ir.Node) -> Step | None:
    """Return the factor or term of one number that makes a value for one reader."""
    before = private_maker(value, reader)
    step = None if before is None else arithmetic_step(before)
    constants = [] if before is None else [constant_of(v) for v in before.inputs]
    single = all(t is None or t.size == 1 for t in constants)
    return step if step is not None and single else None


def _is_padded(node: ir.Node) -> bool:
    automatic = node.attributes.get_string("auto_pad", "NOTSET")
    return automatic not in ("NOTSET", "VALID") or any(node.attributes.get_ints("pads", ()))


def _add_to_bias(step: Step, target: Target, draft: Draft) -> None:
    weight = constant_of(target.weight)
    assert weight is not None
    factor = target.node.attributes.get_float("alpha", 1.0)  # of a Gemm

    def affine() -> Affine:
        sums = target.layer.canonical(wide(weight)).sum(1) * factor
        return Affine(identity().scale, sums * step.affine().shift)

    set_bias(target, affine, draft)


def _turn_around(step: Step, target: Target, draft: Draft) -> bool:
    """Move a factor behind a term, so that it can be folded: ``a x + b`` is ``a (x + b / a)``."""
    before = _step_before(step.source, step.node)
    if before is None or not before.scales:
        return False
    factor, term = float(before.affine().scale), float(step.affine().shift)
    if factor == 0 or abs(term) > _MOST * abs(factor) or not is_held(before, target):
        return False
    dtype = step.source.dtype
    assert dtype is not None
    scale_weight(before, target, draft)
    index = next(i for i, v in enumerate(step.node.inputs) if scalar(v) is not None)
    sign = -1.0 if operator(step.node).arithmetic == "-" else 1.0
    name = f"{target.layer.name}.term"
    term_value = draft.constant([sign * term / factor], dtype, name)
    step.node.replace_input_with(index, term_value)
    output = step.node.outputs[0]
    output.name = f"{output.name}_folded"
    _drop(before)
    draft.did(target.layer.name, f"fold {before.name} before it")
    draft.counts[f"{before.name.split()[0]} folded"] += 1
    return True


def _drop(step: Step) -> None:
    """Remove a node; what read it reads what it read."""
    ir.convenience.replace_all_uses_with(step.node.outputs[0], step.source)
    node_graph(step.node).remove(step.node, safe=True)
