"""Where the outputs of named layers are had: in a module by hooks, in a graph as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from compressor.errors import ModelError, SpecError, suggestion
from compressor.graph.values import is_op, value_by_name
from compressor.models.executor import GraphModule
from compressor.models.torch.lowering import NamedModule
from compressor.types.carrier import Capability, Carrier
from compressor.types.layers import Layer


def check_layer(name: str, carrier: Carrier, where: str) -> None:
    """Refuse what is neither a layer nor a part of the model that holds parameters.

    Raises:
        SpecError: it is not; a close name is suggested.
    """
    known = [layer.name for layer in carrier.layers()]
    if name in known:
        return
    if Capability.TRAIN in carrier.offers:
        known += [part for tensor in carrier.tensors() for part in _parents(tensor)]
    if name in known or name in _values(carrier):
        return
    raise SpecError(
        where, f"names {name!r}, which is no layer", suggestion(name, dict.fromkeys(known))
    )


def layer_values(names: Sequence[str], carrier: Carrier, where: str) -> list[str]:
    """Return the graph's values that are the outputs of layers.

    Raises:
        SpecError: a name is that of a part without a weight of its own, which a graph does not
            know.
    """
    layers = {layer.name: layer for layer in carrier.layers()}
    values = _values(carrier)
    found = []
    for name in names:
        if name in layers:
            found.append(_with_bias(layers[name], values))
        elif name in values and name not in carrier.graph().graph.initializers:
            found.append(name)
        else:
            raise SpecError(
                where,
                f"names {name!r}; the model is executed as a graph, which knows layers with a "
                "weight of their own only",
                suggestion(name, layers),
            )
    return found


def has_layer_values(names: Sequence[str], carrier: Carrier) -> bool:
    """Tell whether all names are layers of the graph."""
    return {layer.name for layer in carrier.layers()}.issuperset(names)


def executes_graph(module: NamedModule) -> bool:
    """Tell whether a model's module stands for its graph, and so has no submodules to hook."""
    return isinstance(module.module, GraphModule)


@contextmanager
def hooked(module: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary that holds layers' outputs once the module has been run.

    Raises:
        ModelError: a layer gives no tensor.
    """
    seen: dict[str, Tensor] = {}
    parts = dict(module.named_modules())
    handles = []
    for name in dict.fromkeys(names):

        def note(part: nn.Module, given: Any, output: Any, name: str = name) -> None:
            del part, given
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            if not tensors:
                raise ModelError(f"layer {name!r}", "gives no tensor", "name another layer")
            seen[name] = tensors[0]

        handles.append(parts[name].register_forward_hook(note))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def seen_output(seen: Mapping[str, Tensor], name: str) -> Tensor:
    """Return what a hooked layer gave.

    Raises:
        ModelError: it was not run.
    """
    if name not in seen:
        raise ModelError(f"layer {name!r}", "is not run by the model", "name another layer")
    return seen[name]


def with_outputs(graph: ir.Model, names: Sequence[str]) -> ir.Model:
    """Return a copy of a graph that gives further values."""
    graph = graph.clone()
    known = {output.name for output in graph.graph.outputs}
    values = value_by_name(graph)
    graph.graph.outputs.extend(values[name] for name in dict.fromkeys(names) if name not in known)
    return graph


def _parents(tensor: str) -> Iterator[str]:
    """Yield the paths of the modules that a tensor lies in."""
    parts = tensor.split(".")
    for length in range(1, len(parts)):
        yield ".".join(parts[:length])


def _values(carrier: Carrier) -> dict[str, ir.Value]:
    return value_by_name(carrier.graph())


def _with_bias(layer: Layer, values: Mapping[str, ir.Value]) -> str:
    """Return the layer's output; of a product whose bias is added after it, the sum."""
    value = values[layer.output]
    uses = list(value.uses())
    if not layer.bias_is_separate or len(uses) != 1 or value.is_graph_output():
        return layer.output
    node = uses[0].node
    added = [v for v in node.inputs if v is not None and v.is_initializer()]
    if not is_op(node, "Add") or len(added) != 1 or len(added[0].shape or ()) != 1:
        return layer.output
    return node.outputs[0].name or layer.output
