"""Layers of files by PyTorch's exporters are named after modules; rules take other names, too."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from compressor.errors import SpecError
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.models.torch.lowering import OPSET
from compressor.passes.quantize.dynamic import QuantizeDynamic
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.layer_rules import resolve_rules
from compressor.types.passes import LayerRule, PassContext


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.fc(x))


class Net(nn.Module):
    """Linear layers on three axes, whose weights exporters transpose, and a folded batch-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(3, 16, 3, padding=1), nn.BatchNorm1d(16))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lstm = nn.LSTM(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.lstm(x)[0])


LAYERS = {"stem.0", "blocks.0.fc", "blocks.1.fc", "lstm.weight_ih", "lstm.weight_hh", "head"}


@pytest.mark.parametrize("dynamo", [True, False])
def test_names_of_modules(tmp_path: Path, dynamo: bool) -> None:
    torch.manual_seed(0)
    path = tmp_path / "net.onnx"
    given = torch.randn(2, 3, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        extra: dict[str, Any] = {"external_data": False, "verbose": False} if dynamo else {}
        torch.onnx.export(Net().eval(), (given,), path, dynamo=dynamo, **extra)
    stored = {tensor.name for tensor in onnx.load(path).graph.initializer}
    assert any(name.startswith(("val_", "onnx::")) for name in stored)
    carrier = open_onnx(path, OPSET)
    assert {layer.name for layer in carrier.layers()} == LAYERS
    result = next(iter(carrier.runner().run({carrier.inputs[0].name: given.numpy()}).values()))
    import onnxruntime as ort

    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    wanted = session.run(None, {carrier.inputs[0].name: given.numpy()})[0]
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)


def test_a_product_of_the_outermost_module_keeps_its_name(tmp_path: Path) -> None:
    """The name of its node is a path without a module: ``/MatMul``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = (torch.randn(2, 3, 4),)
        torch.onnx.export(nn.Linear(4, 5), given, tmp_path / "net.onnx", dynamo=False)
    (stored,) = (t.name for t in onnx.load(tmp_path / "net.onnx").graph.initializer if t.dims[1:])
    assert [layer.name for layer in open_onnx(tmp_path / "net.onnx", OPSET).layers()] == [stored]


def hand_made(folder: Path, scopes: str, names: tuple[str, str]) -> OnnxCarrier:
    """Return two products in modules of the same path."""
    weights = [numpy_helper.from_array(np.eye(8, dtype=np.float32), name) for name in names]
    nodes = [
        helper.make_node("MatMul", ["x", names[0]], ["a"], name="first"),
        helper.make_node("MatMul", ["a", names[1]], ["y"], name="second"),
    ]
    for node in nodes:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 8]) for n in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / "m.onnx")
    return open_onnx(folder / "m.onnx", OPSET)


@pytest.mark.parametrize(
    ("scopes", "names", "layers"),
    [
        ("['', 'a', 'a.b', 'matmul']", ("val_1", "val_2"), ["a.b", "a.b.weight_1"]),
        ("['', 'a', 'matmul']", ("tied.weight", "val_2"), ["tied", "a"]),
        ("['', 'matmul']", ("val_1", "w"), ["val_1", "w"]),
        ("not a list", ("val_1", "w"), ["val_1", "w"]),
        ("[1, 2, 3]", ("val_1", "w"), ["val_1", "w"]),
    ],
)
def test_names_that_are_kept(
    tmp_path: Path, scopes: str, names: tuple[str, str], layers: list[str]
) -> None:
    carrier = hand_made(tmp_path, scopes, names)
    assert [layer.name for layer in carrier.layers()] == layers


@pytest.mark.parametrize("match", ["second", "w2", "w2.weight", "s*d"])
@pytest.mark.parametrize(
    "declared",
    [
        lambda rules: QuantizeStatic.model_validate({"layers": rules}),
        lambda rules: QuantizeDynamic.model_validate({"layers": rules}),
        lambda rules: QuantizeWeights.model_validate({"bits": 8, "layers": rules}),
    ],
)
def test_rules_by_node_or_initializer(tmp_path: Path, declared: Any, match: str) -> None:
    carrier = hand_made(tmp_path, "", ("w1.weight", "w2.weight"))
    rows = declared(({"match": match, "skip": True},)).survey(carrier, PassContext()).layers
    assert [(row.name, row.touched) for row in rows] == [("w1", True), ("w2", False)]


def test_settings_of_a_rule_by_node(tmp_path: Path) -> None:
    carrier = hand_made(tmp_path, "", ("w1.weight", "w2.weight"))
    declared = QuantizeStatic.model_validate(
        {"layers": ({"match": "second", "bits": 4, "activation_bits": 4}, {"match": "*"})}
    )
    rows = declared.survey(carrier, PassContext()).layers
    assert [row.action for row in rows] == ["int8/channel x uint8", "int4/channel x uint4"]


def test_a_name_of_a_layer_comes_first(tmp_path: Path) -> None:
    """A pattern that fits the names of layers does not look at nodes."""
    layers = hand_made(tmp_path, "", ("first", "other")).layers()
    rules = resolve_rules([LayerRule(match="*r*t", skip=True)], layers)
    assert {name: rule is not None for name, rule in rules.items()} == {
        "first": True,
        "other": False,
    }
    with pytest.raises(SpecError, match="layer rule 'third': matches no layer"):
        resolve_rules([LayerRule(match="third")], layers)


class Recurrent(nn.Module):
    """Weights too large for the exporter to put together, with a state for each direction."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(96, 96, bidirectional=True)
        self.lstm = nn.LSTM(192, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.gru(x)[0])[0]


def test_gates_that_the_graph_sorts_are_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path, given = tmp_path / "net.onnx", torch.randn(5, 2, 96)
    module = Recurrent().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (given,), path, dynamo=True, external_data=False)
    stored = {i.name for i in onnx.load(path).graph.initializer}
    recurrences = [n for n in onnx.load(path).graph.node if n.op_type in ("GRU", "LSTM")]
    assert not any(n.input[1] in stored for n in recurrences), "nothing to put together"
    carrier = open_onnx(path, OPSET)
    names = {f"{name}.weight_{kind}" for name in ("gru", "lstm") for kind in ("ih", "hh")}
    assert {layer.name for layer in carrier.layers()} == names
    (got,) = carrier.runner().run({carrier.inputs[0].name: given.numpy()}).values()
    np.testing.assert_allclose(got, module(given).detach().numpy(), rtol=1e-4, atol=1e-5)
