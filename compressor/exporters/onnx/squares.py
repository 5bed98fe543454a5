"""Write ``x * x`` and ``x + x`` as operators of one value, for OpenVINO.

OpenVINO computes a product or a sum of what a convolution gives in the kernel of the convolution.
Where both sides are that value, kernels of integers give zeros (2026.4).
"""

from __future__ import annotations

import numpy as np

from compressor.graph.editing import Editor
from compressor.graph.values import all_nodes, is_op

_OF_ONE = {"Mul": "Pow", "Add": "Mul"}


def write_squares(editor: Editor) -> bool:
    """Replace products and sums of a float value with itself; return whether there was any."""
    found = [
        node
        for node in all_nodes(editor.model.graph)
        if is_op(node, *_OF_ONE) and node.inputs[0] is node.inputs[1] is not None
    ]
    changed = False
    for node in found:
        dtype = node.outputs[0].dtype
        if dtype is None or not dtype.is_floating_point():
            continue
        two = editor.shared_constant(f"two_{dtype.name}", np.array(2, dtype.numpy()))
        node.op_type = _OF_ONE[node.op_type]
        node.replace_input_with(1, two)
        changed = True
    return changed
