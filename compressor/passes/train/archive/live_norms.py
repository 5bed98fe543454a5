"""Batch norms that stay: they are trained by batches, and kept as a scale and a shift."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compressor.graph.editing import Editor
from compressor.graph.layers import layers_with_nodes
from compressor.graph.operators import operator
from compressor.models.element_types import tensor_of


@dataclass(frozen=True)
class LiveNorm:
    """The vectors of a batch norm, by their names.

    An archive needs two of the four: what a channel is multiplied with, and what is added to it.
    Few bits of these are kept, once the network is trained.

    Attributes:
        weight: times the inverse root of the variance, it is the scale.
        bias: without the mean times the scale, it is the shift.
        mean: of each channel, a running one.
        variance: likewise.
        epsilon: what is added to variances.
    """

    weight: str
    bias: str
    mean: str
    variance: str
    epsilon: float

    @property
    def names(self) -> tuple[str, str, str, str]:
        """The vectors' names, in the order in which a node reads them."""
        return self.weight, self.bias, self.mean, self.variance

    def factor(self, held: Mapping[str, Tensor]) -> Tensor:
        """Return the factor between weight and scale, ``[channels]``."""
        return torch.rsqrt(held[self.variance] + self.epsilon)


def live_norms(graph: ir.Model) -> tuple[LiveNorm, ...]:
    """Return the batch norms of a graph whose vectors are initializers of their own."""
    found, held = Counter[LiveNorm](), graph.graph.initializers
    for node in graph.graph:
        if not operator(node).running_statistics:
            continue
        names = [value.name for value in node.inputs[1:5] if value is not None and value.name]
        if len(names) == 4 and all(name in held for name in names):
            weight, bias, mean, variance = names
            epsilon = node.attributes.get_float("epsilon", 1e-5)
            # A module that is called twice has two nodes.
            found[LiveNorm(weight, bias, mean, variance, epsilon)] += 1
    return tuple(
        norm
        for norm, nodes in found.items()
        if all(len(held[name].uses()) == nodes for name in norm.names)
    )


def inner_biases(graph: ir.Model) -> dict[str, str]:
    """Return the biases of layers that only a batch norm follows, and the name of its mean.

    A norm that takes each batch's mean takes them away again: they can be zero.
    """
    means = {norm.mean for norm in live_norms(graph)}
    found = dict[str, str]()
    for layer, node in layers_with_nodes(graph):
        uses = tuple(node.outputs[0].uses())
        if layer.bias is None or len(uses) != 1 or node.outputs[0].is_graph_output():
            continue
        reader, index = uses[0]
        mean = reader.inputs[3] if operator(reader).running_statistics else None
        bias = graph.graph.initializers.get(layer.bias)
        alone = bias is not None and [use.node for use in bias.uses()] == [node]
        if alone and index == 0 and mean is not None and len(mean.uses()) == 1:
            found |= {layer.bias: mean.name} if mean.name in means else {}
    return found


def move_biases(graph: ir.Model) -> None:
    """Zero the biases of layers before norms, and subtract them from the norms' means, in place."""
    held = graph.graph.initializers
    for name, mean in inner_biases(graph).items():
        bias, middle = (tensor_of(held[n]) for n in (name, mean))
        for target, tensor in ((name, torch.zeros_like(bias)), (mean, middle - bias)):
            held[target].const_value = ir.tensor(tensor.numpy(), name=target)


def with_plain_statistics(graph: ir.Model, norms: Collection[LiveNorm]) -> ir.Model:
    """Return a graph whose norms only multiply with their weight and add their bias.

    The mean is 0, and the variance 1 with its epsilon. Norms of one width share these vectors, as
    each tensor of an archive takes some bytes for its name and its place.
    """
    graph = graph.clone()
    editor, held = Editor(graph), graph.graph.initializers
    by_names: dict[tuple[str | None, ...], LiveNorm] = {norm.names: norm for norm in norms}
    for node in graph.graph:
        norm = by_names.get(tuple(v.name if v is not None else None for v in node.inputs[1:5]))
        if norm is None:
            continue
        for index, name, number in ((3, "mean", 0.0), (4, "variance", 1 - norm.epsilon)):
            old = node.inputs[index]
            assert old is not None
            vector = np.full_like(tensor_of(old).numpy(), number)
            node.replace_input_with(index, editor.shared_constant(f"{name}_{len(vector)}", vector))
            if not old.uses():
                editor.release(held[old.name or ""])
    return graph
