"""Small models for the tests of graph passes that quantize: written as ONNX text, and networks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxruntime as ort
import torch
from onnx import numpy_helper, parser
from torch import Tensor, nn

from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier, open_module
from compressor.types.carrier import Carrier
from compressor.types.tensors import Array, Batch, TensorSpec
from samples.digits.model import digits_net
from tests.paths import ROOT

DIGITS = ROOT / "samples" / "digits" / "digits.pt"


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def graph(
    text: str,
    weights: Mapping[str, Array] | None = None,
    opset: int = 21,
    *,
    inferred: bool = True,
) -> OnnxCarrier:
    """Make a carrier of a graph in ONNX's textual form, with initializers beside it."""
    header = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
    dotted = {name.replace(".", "_"): name for name in weights or {}}
    for plain, name in dotted.items():  # the textual form knows no dots in names
        text = text.replace(name, plain)
    proto = parser.parse_model(f"{header} {text}")
    for node in proto.graph.node:
        names = [dotted.get(name, name) for name in node.input]
        del node.input[:]
        node.input.extend(names)
    proto.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in (weights or {}).items()
    )
    model = ir.from_proto(proto)
    if inferred:
        common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
    return OnnxCarrier(model)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        query, key, value = (
            part.reshape(batch, time, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads)
        mixed = torch.softmax(scores, -1) @ value
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return joined


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Transformer(nn.Module):
    """Two blocks; positions from sines; the head shares the embedding's weight."""

    def __init__(self, vocabulary: int = 60, width: int = 32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.rates: Tensor
        self.register_buffer("rates", 100.0 ** -torch.linspace(0, 1, width))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1]).to(torch.float32)
        angles = places[:, None] * self.rates
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(tokens) + torch.sin(angles))))
        return logits


@cache
def transformer() -> TorchCarrier:
    torch.manual_seed(0)
    return open_module(Transformer, {}, [TensorSpec("tokens", ("batch", "time"), "int64")], "m")


def tokens(batch: int = 3, time: int = 11) -> Batch:
    return {"tokens": np.random.default_rng(5).integers(0, 60, (batch, time))}


@cache
def digits() -> TorchCarrier:
    carrier = open_module(
        digits_net, {}, [TensorSpec("image", ("batch", 1, 8, 8), "float32")], "model.factory"
    )
    carrier.load(DIGITS)
    return carrier


def images(batch: int = 16) -> Batch:
    return {"image": np.abs(noise(batch, 1, 8, 8, seed=7))}


def ops(carrier: Carrier) -> list[str]:
    """Operators of the main graph, in order."""
    return [node.op_type for node in carrier.graph().graph]


def optimized_ops(carrier: Carrier, folder: Path) -> list[str]:
    """Operators that ONNX Runtime's CPU provider executes in the end."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    model = ir.to_proto(carrier.graph()).SerializeToString()
    ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]


def run_plainly(carrier: Carrier, batch: Batch) -> Batch:
    """Run the graph as it is written: ONNX Runtime fuses some forms into kernels that round."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = ir.to_proto(carrier.graph()).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, batch), strict=True))


def file_bytes(carrier: Carrier) -> int:
    """Size of the model as a file."""
    onnx.checker.check_model(proto := ir.to_proto(carrier.graph()), full_check=True)
    return len(proto.SerializeToString())


def parity_db(reference: Carrier, candidate: Carrier, batch: Batch) -> float:
    """SQNR of all outputs together; infinite where they are equal."""
    wanted, got = reference.runner().run(batch), candidate.runner().run(batch)
    assert list(wanted) == list(got)
    assert all(wanted[k].dtype == got[k].dtype and wanted[k].shape == got[k].shape for k in got)
    signal = sum(float(np.square(w, dtype=np.float64).sum()) for w in wanted.values())
    error = sum(float(np.square(wanted[k].astype(np.float64) - got[k]).sum()) for k in wanted)
    return math.inf if error == 0 else 10 * math.log10(signal / error)


def float_weights(carrier: Carrier, least: int = 2) -> list[str]:
    """Names of float32 initializers with ``least`` axes or more."""
    return [
        name
        for name, value in carrier.graph().graph.initializers.items()
        if value.dtype == ir.DataType.FLOAT
        and value.shape is not None
        and len(value.shape) >= least
    ]
