"""Random networks whose values are tied in many ways, for tests of scaling."""

from __future__ import annotations

import numpy as np
import torch

from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.prepare.balance import ScaledGroup, scaled_weights
from compressor.passes.prepare.groups import scale_map
from compressor.types.carrier import Carrier
from compressor.types.passes import Outcome
from compressor.types.tensors import Batch
from tests.compressor.passes.prune.random_graphs import Builder

_PIECES = ("activation", "constant", "pool", "pad", "gate", "transposed", "norm", "rest", "rest")


class Tied(Builder):
    """A builder with more operators that commute with factors, and more that do not."""

    def grow(self) -> None:
        """Add one random piece behind a random value."""
        value, channels = self.open[self.random.integers(len(self.open))]
        match str(self.random.choice(_PIECES)):
            case "activation":
                op_type = str(self.random.choice(["Relu", "Relu", "LeakyRelu", "PRelu", "Clip"]))
                slope = [self.weight(channels, 1, 1)] if op_type == "PRelu" else []
                made = self.node(op_type, [value, *slope])
            case "constant":
                shape = [(channels, 1, 1), (1, channels, 1, 1), (1,)][self.random.integers(3)]
                op_type = str(self.random.choice(["Add", "Mul", "Div", "Sub", "Max"]))
                made = self.node(op_type, [value, self.weight(*shape, positive=op_type == "Div")])
            case "pool":
                op_type = str(self.random.choice(["MaxPool", "AveragePool"]))
                window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [1, 1]}
                made = self.node(op_type, [value], window)
            case "pad":
                amounts = self.constant([0, 1, 0, 0, 0, 2, 0, 0])
                made, channels = self.node("Pad", [value, amounts]), channels + 3
            case "gate":
                axes = self.constant([2, 3])
                mean = self.node("ReduceMean", [value, axes], {"keepdims": 1})
                gate = self.node("Sigmoid", [self.conv(mean, channels, channels)])
                made = self.node("Mul", [value, gate])
            case "transposed":
                out = int(self.random.integers(2, 5))
                kernel = self.weight(channels, out, 3, 3)
                made = self.node("ConvTranspose", [value, kernel], {"pads": [1, 1, 1, 1]})
                channels = out
            case "norm":
                scales = [self.weight(channels), self.weight(channels)]
                made = self.node("InstanceNormalization", [value, *scales])
            case _:
                super().grow()
                return
        self.open.append((made, channels))


def tied_network(seed: int, pieces: int) -> OnnxCarrier:
    """Return a network of a convolution, so many random pieces, and a head."""
    builder = Tied(seed)
    builder.open = [(builder.conv(builder.image, 3, 6), 6)]
    for _ in range(pieces):
        builder.grow()
    return builder.carrier()


def image(seed: int = 0, batch: int = 4) -> Batch:
    """Return a batch of inputs."""
    random = np.random.default_rng(seed)
    return {"image": random.standard_normal((batch, 3, 6, 6)).astype(np.float32)}


def chain(scale: float = 1.0, seed: int = 0) -> OnnxCarrier:
    """Return three convolutions with a residual sum, whose channels differ by up to ``scale²``."""
    builder = Builder(seed)
    first = builder.node("Relu", [builder.conv(builder.image, 3, 6)])
    second = builder.node("Relu", [builder.conv(first, 6, 6)])
    third = builder.conv(second, 6, 6)
    builder.open = [(builder.node("Relu", [builder.node("Add", [first, third])]), 6)]
    carrier = builder.carrier()
    return carrier if scale == 1.0 else stretched(carrier, scale)


def scaled_layers(carrier: Carrier, outcome: Outcome, batch: Batch) -> set[str]:
    """Return the layers whose channels a pass scaled, by what they write in the float model."""
    if outcome.rescale is None:
        return set()
    names = [layer.output for layer in carrier.layers()]
    before, after = (c.runner(names).run(batch) for c in (carrier, outcome.rescale(carrier)))
    for spec in carrier.outputs:
        most = np.abs(before[spec.name]).max()
        np.testing.assert_allclose(after[spec.name], before[spec.name], rtol=0, atol=1e-5 * most)
    return {
        layer.name
        for layer in carrier.layers()
        if not np.allclose(after[layer.output], before[layer.output], rtol=1e-3, atol=1e-5)
    }


def stretched(carrier: OnnxCarrier, scale: float, seed: int = 1) -> OnnxCarrier:
    """Return the same function with channels scaled by factors from 1 / scale to scale."""
    random = torch.Generator().manual_seed(seed)
    groups = [
        ScaledGroup(g, scale ** (2 * torch.rand(g.count, generator=random) - 1), 0.0)
        for g in scale_map(carrier.graph(), carrier.tensors()).groups
    ]
    return OnnxCarrier(carrier.with_weights(scaled_weights(carrier, groups)).graph())
