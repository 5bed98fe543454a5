"""Networks lowered from torch: what is left of them, and that they compute the same."""

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

from compressor.graph.layers import graph_layers
from compressor.graph.values import all_nodes
from samples.cifar.model import resnet20
from samples.digits.model import digits_net

SHAPE_ARITHMETIC = {"Shape", "Constant", "Identity", "CastLike", "Expand", "Concat"}


class Encoder(nn.Module):
    """Embedding, position, two pre-norm encoder layers, tied head; the length is dynamic."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.position = nn.Parameter(torch.randn(1, 64, 32))
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids) + self.position[:, : ids.shape[1]]
        return self.head(self.encoder(x))


class Decoder(nn.Module):
    """Causal attention by scaled_dot_product_attention, RMS normalization, gated MLP."""

    def __init__(self, layers=2, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "norm2": nn.RMSNorm(width),
                    "up": nn.Linear(width, 2 * width, bias=False),
                    "down": nn.Linear(2 * width, width, bias=False),
                }
            )
            for _ in range(layers)
        )

    def forward(self, ids):
        x = self.embedding(ids)
        batch, length, width = x.shape
        for block in self.blocks:
            parts = block["qkv"](block["norm1"](x)).chunk(3, -1)
            q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["out"](y.transpose(1, 2).reshape(batch, length, width))
            x = x + block["down"](
                functional.gelu(block["up"](block["norm2"](x)), approximate="tanh")
            )
        return x


class ConvNeXtBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.1))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.down(functional.gelu(self.up(y)))
        return x + self.scale * y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, 4)
        self.blocks = nn.Sequential(ConvNeXtBlock(16), ConvNeXtBlock(16))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean([-2, -1]))


def unit(channels_in, channels_out, size, groups, activation):
    return [
        nn.Conv2d(channels_in, channels_out, size, 1, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels_out),
        *([activation()] if activation else []),
    ]


class MobileNet(nn.Module):
    """Inverted residuals with ReLU6 and with hard-swish, squeeze-and-excitation."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*unit(3, 8, 3, 1, nn.Hardswish))
        self.first = nn.Sequential(
            *unit(8, 16, 1, 1, nn.ReLU6), *unit(16, 16, 3, 16, nn.ReLU6), *unit(16, 8, 1, 1, None)
        )
        self.reduce, self.expand = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 10))

    def forward(self, x):
        x = self.stem(x)
        x = x + self.first(x)
        gate = functional.relu(self.reduce(functional.adaptive_avg_pool2d(x, 1)))
        x = x * functional.hardsigmoid(self.expand(gate))
        return self.head(x.mean([2, 3]))


class Shared(nn.Module):
    """One convolution used twice with different batch-norms."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn2(self.conv(functional.relu(self.bn1(self.conv(x)))))


def upsampler():
    return nn.Sequential(
        nn.ConvTranspose2d(8, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 3, groups=2),
        nn.BatchNorm2d(8),
    )


def perceptron():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


@dataclass(frozen=True)
class Case:
    build: object
    shape: tuple
    ops: dict
    folded: int
    tokens: bool = False
    dynamic: dict = field(default_factory=dict)


CASES = {
    "digits": Case(
        digits_net,
        (1, 8, 8),
        {"Conv": 6, "Relu": 5, "Add": 2, "GlobalAveragePool": 1, "Reshape": 1, "Gemm": 1},
        6,
    ),
    "resnet20": Case(
        resnet20,
        (3, 32, 32),
        {"Conv": 19, "Relu": 19, "Add": 9, "Slice": 2, "Pad": 2, "GlobalAveragePool": 1}
        | {"Reshape": 1, "Gemm": 1},
        19,
    ),
    "mobilenet": Case(
        MobileNet,
        (3, 16, 16),
        {"Conv": 6, "HardSwish": 1, "Clip": 2, "Add": 1, "GlobalAveragePool": 2, "Relu": 1}
        | {"HardSigmoid": 1, "Mul": 1, "Flatten": 1, "Gemm": 1},
        4,
    ),
    "convnext": Case(
        ConvNeXt,
        (3, 16, 16),
        {"Conv": 3, "Transpose": 4, "LayerNormalization": 2, "MatMul": 4, "Add": 6, "Gelu": 2}
        | {"GlobalAveragePool": 1, "Flatten": 1, "Gemm": 1},
        2,
    ),
    "upsampler": Case(upsampler, (8, 8, 8), {"ConvTranspose": 2, "Relu": 1}, 2),
    "perceptron": Case(perceptron, (8,), {"Gemm": 2, "Relu": 1}, 1),
    "shared": Case(Shared, (4, 8, 8), {"Conv": 2, "BatchNormalization": 2, "Relu": 1}, 0),
    "encoder": Case(
        Encoder,
        (),
        {"Gather": 1, "Slice": 1, "Add": 11, "LayerNormalization": 4, "MatMul": 11, "Gelu": 2}
        | {"Transpose": 13, "Reshape": 10, "Mul": 2, "Softmax": 2, "Gemm": 2, "Shape": 2}
        | {"Concat": 1, "Split": 2},
        0,
        tokens=True,
    ),
    "decoder": Case(
        Decoder,
        (),
        {"Gather": 1, "LayerNormalization": 2, "MatMul": 12, "Add": 12, "Split": 2, "Reshape": 8}
        | {"Transpose": 8, "Mul": 6, "Softmax": 2, "Pow": 2, "ReduceMean": 2, "Sqrt": 2}
        | {"Reciprocal": 2, "Gelu": 2, "Shape": 1, "Concat": 1, "Expand": 1, "Trilu": 1}
        | {"Equal": 1, "Where": 1},
        0,
        tokens=True,
    ),
}


def randomize(module):
    generator = torch.Generator().manual_seed(1)
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean.normal_(generator=generator)
            part.running_var.uniform_(0.5, 2, generator=generator)
            part.weight.data.normal_(generator=generator)
            part.bias.data.normal_(generator=generator)


_LARGE = ("encoder",)  # the decoder has its operators, and more


@pytest.fixture(
    scope="module",
    params=[pytest.param(c, marks=pytest.mark.slow) if c in _LARGE else c for c in CASES],
)
def network(request, lower, fuse):
    """A case, its network as lowered, and what fusing makes of it."""
    case = CASES[request.param]
    torch.manual_seed(0)
    module = case.build().eval()
    randomize(module)
    if case.tokens:
        axes = {0: Dim("batch"), 1: Dim("length", max=64)}
        model = lower(module, (torch.zeros(2, 7, dtype=torch.int64),), (axes,))
    else:
        model = lower(module, (torch.zeros(2, *case.shape),), ({0: Dim("batch")},))
    return case, model, fuse(model, kind="torch")


def feeds(case, model, batch):
    rng = np.random.default_rng(batch)
    name = model.graph.inputs[0].name
    if case.tokens:
        return {name: rng.integers(0, 50, (batch, 3 + batch))}
    return {name: rng.standard_normal((batch, *case.shape)).astype(np.float32)}


def test_what_is_left(network, ops):
    case, _, outcome = network
    fused = outcome.carrier.model
    assert ops(fused) == case.ops
    if not case.tokens:
        assert not SHAPE_ARITHMETIC & set(case.ops)
    folded = [e for e in outcome.layers if any("fold" in a for a in e.details["fused"])]
    assert len(folded) == case.folded


def test_it_computes_the_same_for_every_batch(network, agree):
    case, model, outcome = network
    for batch in (1, 2, 5):
        agree(model, outcome.carrier.model, feeds(case, model, batch), 1e-5)


def test_layers_and_axes_keep_their_names(network):
    _, model, outcome = network
    fused = outcome.carrier.model
    assert [e.name for e in graph_layers(fused)] == [e.name for e in graph_layers(model)]
    for old, new in zip(graph_layers(model), graph_layers(fused), strict=True):
        assert (old.rows, old.columns) == (new.rows, new.columns)
    for old, new in (
        (model.graph.inputs, fused.graph.inputs),
        (model.graph.outputs, fused.graph.outputs),
    ):
        assert [(v.name, str(v.shape), v.dtype) for v in new] == [
            (v.name, str(v.shape), v.dtype) for v in old
        ]
    assert not [v for v in fused.graph.initializers if v.endswith("_bias") and "in_proj" not in v]


def test_every_value_has_a_shape(network):
    _, _, outcome = network
    for node in all_nodes(outcome.carrier.model.graph):
        for value in node.outputs:
            assert value.shape is not None, value.name
            assert value.dtype is not None, value.name


def test_fusing_again_changes_nothing(network, fuse):
    fused = network[2].carrier.model
    again = fuse(fused, kind="torch")
    assert "nothing to fuse" in again.notes[0]
    assert ir.serde.serialize_model(again.carrier.model) == ir.serde.serialize_model(fused)


def test_survey_says_what_apply_does(network, survey):
    _, model, outcome = network
    planned = {e.name: e.action for e in survey(model, kind="torch").layers if e.touched}
    done = {e.name: "; ".join(e.details["fused"]) for e in outcome.layers}
    assert planned == done


def test_only_the_queries_of_attention_are_scaled(network):
    """TensorRT wants the scale before the product; one multiplication is enough."""
    case, _, outcome = network
    fused = outcome.carrier.model
    softmaxes = [n for n in fused.graph if n.op_type == "Softmax"]
    assert bool(softmaxes) == case.tokens
    for softmax in softmaxes:
        product = softmax.inputs[0].producer()
        if product.op_type == "Add":
            product = product.inputs[0].producer()
        assert product.op_type == "MatMul"
        assert [v.producer().op_type for v in product.inputs] == ["Mul", "Transpose"]
        assert product.inputs[0].producer().inputs[0].producer().op_type == "Transpose"


class Gated(nn.Module):
    """Parameters that a fresh module has at 0 and 1, where a rule might take them for nothing."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.linear = nn.Linear(4, 4)
        self.gate, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        y = functional.relu(self.conv(x)).mean([2, 3])
        return functional.relu(self.linear(y)) * self.gate + self.shift


def test_structure_does_not_depend_on_weights(lower, fuse):
    """Planning fuses a fresh module; the run fuses the trained one."""
    structures = []
    for trained in (False, True):
        torch.manual_seed(trained)
        module = Gated()
        if trained:
            for parameter in module.parameters():
                parameter.data.normal_()
        else:
            for parameter in module.parameters():
                parameter.data.fill_(float(parameter.dim() > 1))
            module.gate.data.fill_(1)
        model = lower(module, (torch.zeros(2, 3, 8, 8),), ({0: Dim("batch")},))
        fused = fuse(model, kind="torch").carrier.model
        structures.append(
            [(n.op_type, n.name, [v.name for v in (*n.inputs, *n.outputs)]) for n in fused.graph]
        )
    assert structures[0] == structures[1]


def test_two_hundred_layers(parse, fuse, ops):
    """Takes two seconds; what grows with the square of the layers would take minutes."""
    lines, parameters = [], {}
    for i in range(200):
        norm = [f"b{i}.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
        parameters |= {name: np.ones(4, np.float32) for name in norm}
        parameters[f"c{i}.weight"] = np.ones((4, 4, 1, 1), np.float32)
        lines.append(f"h{i} = Conv(r{i}, c{i}.weight)")
        lines.append(f"n{i} = BatchNormalization(h{i}, {', '.join(norm)}) r{i + 1} = Relu(n{i})")
    model = parse(
        f"g (float[N, 4, 5, 5] r0) => (float[N, 4, 5, 5] r200) {{ {' '.join(lines)} }}", parameters
    )
    assert ops(fuse(model).carrier.model) == {"Conv": 200, "Relu": 200}
