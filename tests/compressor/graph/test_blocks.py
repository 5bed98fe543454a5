"""Partition of graphs into blocks: the blocks together are the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

from compressor.graph.blocks import (
    GraphBlock,
    block_outputs,
    extract_block,
    inner_graphs,
    partition,
    reaching,
    sink_constants,
)
from compressor.graph.layers import graph_layers
from compressor.models.onnx.ort_runner import graph_runner
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.carrier import Carrier
from compressor.types.tensors import Array, Batch, TensorSpec
from tests.compressor.passes.quantize.small_models import graph, noise

TOKENS = TensorSpec("tokens", ("batch", "sequence"), "int64")
IMAGE = TensorSpec("image", ("batch", 3, 8, 8), "float32")


class Attention(nn.Module):
    """One head with a causal mask that comes from outside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) + mask
        return self.o(scores.softmax(-1) @ self.v(x))


class Decoder(nn.Module):
    """Two pre-norm decoder blocks over an embedding and position table, untied head."""

    def __init__(self, width: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.places = nn.Embedding(16, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.attention = nn.ModuleList(Attention(width) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(width, inner) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(inner, width) for _ in range(2))
        self.head = nn.Linear(width, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])
        mask = torch.where(places[:, None] >= places[None, :], 0.0, -1e9)
        x = self.embed(tokens) + self.places(places)
        for i in range(2):
            x = x + self.attention[i](self.norms[2 * i](x), mask)
            x = x + self.down[i](torch.relu(self.up[i](self.norms[2 * i + 1](x))))
        return self.head(x)


class SharedBias(nn.Module):
    """Every block adds a bias that is looked up once, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.bias = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        bias = self.bias(torch.arange(tokens.shape[1]))
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x) + bias)
        return x


class Convolutions(nn.Module):
    """A stem, a residual block, a head; and an output in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.side = nn.Conv2d(4, 2, 1)
        self.fc = nn.Linear(4, 3)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.relu(self.stem(image))
        side = self.side(x)
        x = torch.relu(x + self.second(torch.relu(self.first(x))))
        return side, self.fc(x.mean((2, 3)))


class Ladder(nn.Module):
    """Encoder and decoder with a skip around all between: one place to cut, behind the stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second, self.last = (
            nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        y = self.first(x)
        z = self.second(y)
        return self.last(z * y) + x


@cache
def carrier(make: Callable[[], nn.Module], spec: TensorSpec) -> Carrier:
    """A module with random weights; lowered once for all tests."""
    torch.manual_seed(0)
    module = make()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return TorchCarrier(module, [spec])


def batch_for(spec: TensorSpec) -> Batch:
    random = np.random.default_rng(0)
    if spec is TOKENS:
        return {"tokens": random.integers(0, 11, (2, 7))}
    return {"image": random.standard_normal((2, 3, 8, 8), np.float32)}


def tapped(model: ir.Model, blocks: tuple[GraphBlock, ...], batch: Batch) -> Batch:
    """Run block after block; everything that a layer reads or writes, and what ends a block."""
    values = dict(batch)
    for block in blocks:
        names = [n for layer in graph_layers(model) for n in (*layer.inputs, layer.output)]
        given = {*block.inputs, block.entry}
        own = [n for n in dict.fromkeys(names) if n in block.reads - given - set(block.weights)]
        outputs = list(dict.fromkeys([*own, *([block.exit] if block.exit else [])]))
        if block.exit is None:
            outputs.append(model.graph.outputs[-1].name or "")
        values.update(graph_runner(extract_block(model, block, outputs, {})).run(values))
    return values


CASES = [
    (Decoder, TOKENS, 5),
    (SharedBias, TOKENS, 3),
    (Convolutions, IMAGE, 4),
    (Ladder, IMAGE, 2),
]


@pytest.mark.parametrize(("module", "spec", "count"), CASES)
def test_the_blocks_one_after_another_compute_what_the_model_does(module, spec, count):
    model = carrier(module, spec)
    blocks = partition(model.graph())
    assert len(blocks) == count
    batch = batch_for(spec)
    found = tapped(model.graph(), blocks, batch)
    common = [n for n in found if n not in batch]
    want = model.runner(common).run(batch)
    assert len(common) > count
    for name in common:
        np.testing.assert_allclose(found[name], want[name], rtol=1e-4, atol=1e-5)


def test_a_decoder_is_cut_at_its_residual_stream():
    graph = carrier(Decoder, TOKENS).graph()
    blocks = partition(graph)
    layers = {layer.weight for layer in graph_layers(graph)}
    found = [[w for w in block.weights if w in layers] for block in blocks]
    assert found[0][:2] == ["embed.weight", "places.weight"]
    assert found[0][2:] == [f"attention.0.{n}.weight" for n in "qkvo"]
    assert found[1] == ["up.0.weight", "down.0.weight"]
    assert found[4] == ["head.weight"]
    assert [b.entry for b in blocks[1:]] == [b.exit for b in blocks[:-1]]
    assert all("embed.weight" not in b.weights for b in blocks[1:])


def test_a_block_is_to_reproduce_the_model_outputs_computed_in_it():
    graph = carrier(Convolutions, IMAGE).graph()
    side, last = (value.name for value in graph.graph.outputs)
    blocks = partition(graph)
    stem, second, *middle, end = (block_outputs(graph, block) for block in blocks)
    assert stem == [blocks[0].exit]
    assert second == [blocks[1].exit, side]
    assert [middle, end] == [[[block.exit] for block in blocks[2:-1]], [last]]


def test_there_is_no_cut_between_heads_on_one_value():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
            self.second, self.third = nn.Linear(4, 3), nn.Linear(4, 5)

        def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = self.body(image).mean((2, 3))
            return self.first(x), self.second(x), self.third(x)

    blocks = partition(carrier(Heads, IMAGE).graph())
    assert all(block.entry != block.exit for block in blocks)


def test_there_is_no_cut_across_a_skip():
    first, second = partition(carrier(Ladder, IMAGE).graph())
    assert (first.entry, first.exit, first.inputs) == (None, "conv2d", ("image",))
    assert (second.entry, second.exit, second.inputs) == ("conv2d", None, ())
    assert {f"{n}.weight" for n in ("first", "second", "last")} <= set(second.weights)


def test_a_graph_without_a_cut_is_one_block():
    (block,) = partition(carrier(partial(nn.Conv2d, 3, 2, 1), IMAGE).graph())
    assert (block.entry, block.exit, block.inputs) == (None, None, ("image",))


def test_every_layer_is_in_exactly_one_block():
    for module, spec, _ in CASES:
        graph = carrier(module, spec).graph()
        blocks = partition(graph)
        for layer in graph_layers(graph):
            if layer.kind != "Gather":
                assert sum(layer.weight in b.weights for b in blocks) == 1, layer.name


def test_changed_weights_are_used_and_the_others_shared():
    graph = carrier(Decoder, TOKENS).graph()
    block = partition(graph)[1]
    change = {"up.0.weight": torch.zeros(12, 8), "head.weight": torch.zeros(11, 8)}
    assert block.exit is not None
    own = extract_block(graph, block, [block.exit], change)
    assert set(own.graph.initializers) <= set(block.weights)
    untouched = own.graph.initializers["down.0.weight"].const_value
    assert untouched is graph.graph.initializers["down.0.weight"].const_value
    stream = np.random.default_rng(0).standard_normal((2, 7, 8), np.float32)
    entry: dict[str, Array] = {block.entry or "": stream}
    want = graph_runner(extract_block(graph, block, [block.exit], {})).run(entry)[block.exit]
    found = graph_runner(own).run(entry)[block.exit]
    assert np.abs(found - want).max() > 0.1
    up_bias, down = (graph.graph.initializers[n] for n in ("up.0.bias", "down.0.weight"))
    assert up_bias.const_value is not None
    assert down.const_value is not None
    hidden = np.maximum(up_bias.const_value.numpy(), 0) @ down.const_value.numpy().T
    bias = graph.graph.initializers["down.0.bias"].const_value
    assert bias is not None
    np.testing.assert_allclose(found, stream + hidden + bias.numpy(), rtol=1e-4, atol=1e-5)


def test_the_size_of_an_input_joins_blocks_unless_it_is_read_again():
    """A batch that is read at the start and used at the end lives as long as anything else."""

    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)
            self.head = nn.Linear(5 * 16, 2)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.second(torch.relu(self.first(image))))
            return self.head(x.view(image.size(0), -1))

    model = TorchCarrier(Flattened().eval(), [IMAGE]).graph()
    blocks = partition(model, past_sizes=True)
    assert len(partition(model)) < len(blocks) == 3
    assert [block.inputs for block in blocks if block.inputs] == [("image",), ("image",)]


BRANCHES = """
<ir_version: 9, opset_import: ["": 18]>
branching (float[2] x, bool flag) => (float[2] y, float[2] z)
<int8[2] own = {1, 2}, int8[2] shared = {3, 4}, float scale = {0.5}, int8[2] deep = {5, 6},
 int8[2] kept = {7, 8}, float zero = {0}>
{
    own_float = Cast <to = 1> (own)
    own_weight = Mul (own_float, scale)
    shared_weight = Cast <to = 1> (shared)
    deep_weight = Cast <to = 1> (deep)
    noise = RandomNormalLike <scale = 0.0000001> (own_weight)
    z = Cast <to = 1> (kept)
    of_input = Mul (x, scale)
    y = If (flag) <
        then_branch = first () => (float[2] a) {
            a1 = Add (own_weight, noise)
            a = Add (a1, of_input)
        },
        else_branch = second () => (float[2] b) {
            c = Greater (scale, zero)
            b = If (c) <
                then_branch = third () => (float[2] d) { d = Add (shared_weight, deep_weight) },
                else_branch = fourth () => (float[2] e) { e = Add (shared_weight, x) }
            >
        }
    >
}
"""


def test_what_is_computed_of_constants_moves_into_the_branch_that_alone_reads_it() -> None:
    """ONNX Runtime lays the weights of a convolution out anew only in the graph that has both.

    A model of two convolutions in each branch took 1.34 x the float model's time, with its weights
    as codes, before their floats were computed where they are read.
    """
    source = onnx.parser.parse_model(BRANCHES)
    sunk = onnx.ModelProto()
    sunk.CopyFrom(source)
    sink_constants(sunk.graph)
    onnx.checker.check_model(sunk, full_check=True)
    first, second = inner_graphs(sunk.graph)
    third, _ = inner_graphs(second)
    made = {g.name: [n.output[0] for n in g.node] for g in (sunk.graph, first, second, third)}
    # What draws numbers stays where it is, and with it what it reads; so does what two read.
    assert made == {
        "branching": ["own_float", "own_weight", "noise", "z", "of_input", "y"],
        "first": ["a1", "a"],
        "second": ["shared_weight", "c", "b"],
        "third": ["deep_weight", "d"],
    }
    held = {g.name: {t.name for t in g.initializer} for g in (sunk.graph, first, second, third)}
    assert held == {
        "branching": {"own", "scale", "kept"},
        "first": set(),
        "second": {"shared", "zero"},
        "third": {"deep"},
    }
    feeds = [
        {"x": np.array([1, 2], np.float32), "flag": np.array(value)} for value in (True, False)
    ]
    for feed in feeds:
        wanted, found = (
            ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(
                None, feed
            )
            for m in (source, sunk)
        )
        for a, b in zip(wanted, found, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)  # of the noise


def test_weights_of_a_branch_move_with_their_scales() -> None:
    noise = "noise = RandomNormalLike <scale = 0.0000001> (own_weight)"
    without_noise = BRANCHES.replace(noise, "")
    proto = onnx.parser.parse_model(
        without_noise.replace("Add (own_weight, noise)", "Neg (own_weight)")
    )
    sink_constants(proto.graph)
    first = next(iter(inner_graphs(proto.graph)))
    assert [n.output[0] for n in first.node] == ["own_float", "own_weight", "a1", "a"]
    assert {t.name for t in first.initializer} == {"own"}  # others multiply with the scale, too


def test_what_is_added_behind_a_block_says_which_inputs_it_needs():
    carrier = graph(
        """g (float[N, 4] x) => (float[N, 4] y) {
            n = Tanh (x)
            a = MatMul (n, first.weight)
            b = Relu (a)
            c = MatMul (b, second.weight)
            y = Add (c, n)
        }""",
        {"first.weight": noise(4, 4), "second.weight": noise(4, 4)},
    )
    block = GraphBlock("a", "c", (), ("second.weight",), frozenset("ab"), frozenset("bc"))
    assert reaching(carrier.graph(), block, ["c"]).inputs == ()
    assert reaching(carrier.graph(), block, ["c", "n"]).inputs == ("x",)
