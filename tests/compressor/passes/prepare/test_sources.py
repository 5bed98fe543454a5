"""Where factors on a layer's input can go, and that moving them there changes nothing."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from compressor.graph.inference import infer_shapes
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prepare.sources import InputGroup, input_groups
from compressor.passes.quantize.weights.awq import Folded, awq_groups
from compressor.types.carrier import Carrier
from compressor.types.layers import Scheme
from compressor.types.tensors import Array, TensorSpec

STREAM = TensorSpec("x", ("batch", "sequence", 8), "float32")
IMAGE = TensorSpec("image", ("batch", 3, 6, 6), "float32")
HEADS, SHARED, SIZE = 4, 2, 2


class Rms(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Gated(nn.Module):
    """A decoder block of grouped queries and a gated network, as Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Rms(8), Rms(8)
        self.q, self.o = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.k, self.v = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=True)
        self.gate, self.up = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def heads(self, x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], count, SIZE).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q = self.heads(self.q(y), HEADS)
        k, v = (self.heads(f(y), SHARED) for f in (self.k, self.v))
        k, v = (t[:, :, None].expand(-1, -1, HEADS // SHARED, -1, -1).flatten(1, 2) for t in (k, v))
        mixed = (q @ k.transpose(2, 3)).softmax(-1) @ v
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Packed(nn.Module):
    """Queries, keys and values from one layer, layer norms with biases, and ReLU, as in GPT."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.o = nn.Linear(8, 24), nn.Linear(8, 8)
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)
        self.activation = activation()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).split(8, -1)
        x = x + self.o((q @ k.transpose(1, 2)).softmax(-1) @ v)
        return x + self.fc2(self.activation(self.fc1(self.second(x))))


class Convolutional(nn.Module):
    """Three convolutions in a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.first, self.second = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        return x + self.second(torch.relu(self.first(x)))


def carrier(module: nn.Module, spec: TensorSpec = STREAM) -> Carrier:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=0.2, std=0.4)
    return TorchCarrier(module, [spec])


def groups(model: Carrier, *skipped: str) -> tuple[InputGroup, ...]:
    schemes = {x.name: Scheme(4) for x in model.layers() if x.name not in skipped}
    kept = {f"{name}.weight" for name in skipped}
    return awq_groups(model.graph(), schemes, model.tensors().keys() - kept)


def described(found: tuple[InputGroup, ...]) -> dict[str, list[str]]:
    return {
        "+".join(layer.name for layer in group.layers): []
        if group.source is None
        else [*group.source.vectors, *([group.source.layer.name] if group.source.layer else [])]
        for group in found
    }


def outputs(model: Carrier, spec: TensorSpec) -> Array:
    random = np.random.default_rng(1)
    shape = [3 if isinstance(d, str) else d for d in spec.shape]
    batch = {spec.name: random.standard_normal(shape, np.float32)}
    return next(iter(model.runner().run(batch).values()))


@pytest.fixture(scope="module")
def gated() -> Carrier:
    return carrier(Gated())


@pytest.fixture(scope="module")
def packed() -> Carrier:
    return carrier(Packed())


@pytest.fixture(scope="module")
def convolutional() -> Carrier:
    return carrier(Convolutional(), IMAGE)


def test_sources_of_a_gated_block(gated):
    assert described(groups(gated)) == {
        "q+k+v": ["first.weight"],
        "o": ["v.bias", "v"],
        "gate+up": ["second.weight"],
        "down": ["up"],
    }


def test_heads_that_share_a_value_share_its_channels(gated):
    source = next(g.source for g in groups(gated) if g.layers[0].name == "o")
    assert source is not None
    assert source.channels == (0, 1, 0, 1, 2, 3, 2, 3)
    assert source.count == 4


def test_sources_of_a_packed_block(packed):
    assert described(groups(packed)) == {
        "qkv": ["first.weight", "first.bias"],
        "o": ["qkv.bias", "qkv"],
        "fc1": ["second.weight", "second.bias"],
        "fc2": ["fc1.bias", "fc1"],
    }
    source = next(g.source for g in groups(packed) if g.layers[0].name == "o")
    assert source is not None
    assert source.channels == tuple(range(16, 24))


def test_a_function_that_does_not_commute_with_factors_ends_the_search():
    found = groups(carrier(Packed(nn.GELU)))
    assert described(found)["fc2"] == []
    assert next(g.reason for g in found if g.layers[0].name == "fc2").startswith("nothing before")


def test_kept_layers_neither_share_a_scale_nor_absorb_one(gated):
    found = described(groups(gated, "k", "up"))
    assert found["q+v"] == []
    assert found["gate"] == []
    assert found["down"] == []
    reason = next(g.reason for g in groups(gated, "k") if g.layers[0].name == "q")
    assert reason == "its input is read by k too"


@pytest.mark.parametrize(
    ("name", "spec"), [("gated", STREAM), ("packed", STREAM), ("convolutional", IMAGE)]
)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**20))
def test_moving_factors_changes_no_output(request, name, spec, seed):
    model: Carrier = request.getfixturevalue(name)
    found = [group for group in groups(model) if group.source is not None]
    assert found
    stored = model.tensors()
    folded = Folded(lambda name: stored[name].read())
    generator = torch.Generator().manual_seed(seed)
    for group in found:
        assert group.source is not None
        own = torch.empty(group.source.count).uniform_(0.2, 5, generator=generator)
        folded.fold(group, own[torch.tensor(group.source.channels)])
    layers = {layer.weight: layer for layer in model.layers()}
    changes = {
        name: layers[name].stored(tensor) if name in layers else tensor
        for name, tensor in folded.taken(()).items()
    }
    after = model.with_weights(changes)
    assert all(not torch.equal(stored[n].read(), t) for n, t in changes.items())
    np.testing.assert_allclose(outputs(after, spec), outputs(model, spec), rtol=2e-4, atol=2e-5)


def test_convolutions_absorb_through_relu(convolutional):
    assert described(groups(convolutional)) == {
        "stem": [],
        "first": [],
        "second": ["first.bias", "first"],
    }


@pytest.mark.parametrize("middle", ["y = MatMul(shares, v)", "y = Reshape(v, shape)"])
def test_a_batch_that_two_values_name_differently(middle: str) -> None:
    """Older exporters leave the batch behind a Reshape nameless, and inference invents a name."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    g (float[N, T, 4] x, float[N, T, T] shares, int64[2] shape) => (z) {{
        p = MatMul(x, w) v = Add(p, b) {middle} z = MatMul(y, u)
    }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    values = {v.name: v for node in model.graph for v in (*node.inputs, *node.outputs) if v}
    for name, lengths in {"w": (4, 4), "b": (4,), "u": (4, 4)}.items():
        value = values[name]
        value.const_value = ir.tensor(np.ones(lengths, np.float32), name=name)
        value.shape, value.type = ir.Shape(lengths), ir.TensorType(ir.DataType.FLOAT)
        model.graph.register_initializer(value)
    for name, axes in {"p": "NT", "v": "NT", "y": "MT" if "shares" in middle else "N"}.items():
        values[name].shape = ir.Shape([*axes, 4])
        values[name].type = ir.TensorType(ir.DataType.FLOAT)
    (group,) = (
        g for g in input_groups(model, {"w", "u"}, {"w", "b", "u"}) if g.layers[0].name == "u"
    )
    assert group.source is not None
    assert group.source.channels == (0, 1, 2, 3)


ONES = ", ".join("1" * 16)
BETWEEN = {
    "y = Slice(r, zero, four, one, one)": True,
    "y = Slice(r, minus, far, one, minus)": False,  # turned round
    "c = Cast<to=10>(r) y = Cast<to=1>(c)": True,
    "c = Cast<to=6>(r) y = Cast<to=1>(c)": False,  # a half becomes none
}


@pytest.mark.parametrize("between", BETWEEN)
def test_what_channels_keep_their_factors_through(between: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[N, 4] x) => (float[N, 4] z)
    <float[4, 4] w = {{{ONES}}}, float[4, 4] u = {{{ONES}}}, int64[1] zero = {{0}},
     int64[1] one = {{1}}, int64[1] four = {{4}}, int64[1] minus = {{-1}}, int64[1] far = {{-9}}> {{
        p = MatMul(x, w) r = Relu(p) {between} z = MatMul(y, u)
    }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    infer_shapes(model)
    found = {g.layers[0].name: g.source for g in input_groups(model, {"w", "u"}, {"w", "u"})}
    assert (found["u"] is not None) is BETWEEN[between]
