"""Names for nodes that have none: TensorRT reports layers by the nodes that they came from."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from compressor.graph.values import all_nodes


def with_node_names(model: ir.Model) -> ir.Model:
    """Return a model in which every node has a name of its own.

    The given model is returned where that is so already. A node without one is named after what it
    writes.
    """
    counted = Counter(node.name or "" for node in all_nodes(model.graph))
    if "" not in counted and all(count == 1 for count in counted.values()):
        return model
    changed = model.clone()
    taken = {name for name, count in counted.items() if name and count == 1}
    for node in all_nodes(changed.graph):
        if node.name and counted[node.name] == 1:
            continue
        wanted = node.name or next((v.name for v in node.outputs if v.name), "") or node.op_type
        name, number = wanted, 1
        while name in taken:
            name, number = f"{wanted}_{number}", number + 1
        node.name = name
        taken.add(name)
    return changed
