"""Networks of which some layers may be faster as floats, for tests of the choice."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compressor.passes.quantize.static.cuts import Network, Sides
from compressor.passes.quantize.static.islands import kernels_of
from compressor.passes.quantize.static.latency import CostModel, typical_shapes
from compressor.passes.quantize.static.latency_facts import VNNI, Latency
from compressor.passes.quantize.static.options import StaticRule
from compressor.passes.quantize.static.placement import ORT_CPU
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.passes import PassContext
from tests.compressor.graph.channels.channel_graphs import graph

ORT = PassContext(targets=frozenset({"ort-cpu"}))
ALL = QuantizeStatic(layers=(StaticRule(match="*"),))
POINT = "kernel_shape = [1, 1]"
WINDOW = "kernel_shape = [3, 3], pads = [1, 1, 1, 1]"


def chain(*layers: str, size: int = 64, channels: int = 3, batch: str = "N") -> ir.Model:
    """Make a network of convolutions: each ``<kind><output channels>``, or an operator."""
    lines, weights, value = [], {}, "x"
    for index, layer in enumerate(layers):
        kind, new = layer[:5], f"v{index}"
        if kind in ("point", "dense", "depth"):
            wide = int(layer[5:] or channels)
            groups = channels if kind == "depth" else 1
            window = POINT if kind == "point" else WINDOW
            shape = (wide, channels // groups, *((1, 1) if kind == "point" else (3, 3)))
            name = f"layer{index}"
            weights[name], channels = shape, wide
            lines.append(f"{new} = Conv<{window}, group = {groups}>({value}, {name})")
        else:
            lines.append(f"{new} = {layer}({value})")
        value = new
    lines[-1] = lines[-1].replace(f"{value} =", "y =")
    first = next(iter(weights.values()))[1]
    text = (
        f"(float[{batch}, {first}, {size}, {size}] x) => (float[N, c, h, w] y) "
        f"{{ {' '.join(lines)} }}"
    )
    model = graph(text, weights)
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        array = value.const_value.numpy()
        scaled = array / np.sqrt(array[0].size)
        value.const_value = ir.tensor(scaled.astype(np.float32), name=value.name)
    return model


def network(model: ir.Model, *cpus: Latency) -> tuple[Network, frozenset[ir.Node]]:
    declared = ALL._settings(ORT).decide(model)
    kernels = kernels_of(model, ORT_CPU, declared.readers, declared.schemes)
    shapes = typical_shapes(model)
    costs = [CostModel(facts, shapes) for facts in cpus or (VNNI,)]
    return Network(model.graph, kernels, costs), frozenset(kernels.layers)


def nanoseconds(net: Network, chosen: Sides) -> float:
    return chosen.ratio * net.floating[0]
