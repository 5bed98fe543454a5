"""A changed graph that takes a module's place and is trained, saved and restored like one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from compressor.errors import SpecError
from compressor.graph.editing import Editor
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.executor import GraphModule
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.matching import held_tensors
from compressor.types.carrier import Capability
from compressor.types.layers import QuantizedTensor, Scheme, WeightCodes
from tests.compressor.models.smaller_modules import VECTOR, Free, shaken, worst

ROWS = {"x": np.linspace(-2, 2, 30, dtype=np.float32).reshape(5, 6)}
NEW = ("added.first", "added.second")


def grown(carrier: TorchCarrier) -> ir.Model:
    """Return the graph with two numbers for each of its outputs: a factor and a summand."""
    graph = carrier.graph().clone()
    editor = Editor(graph)
    (output,) = graph.graph.outputs
    node = output.producer()
    assert node is not None
    value, name = node.outputs[0], output.name
    value.name = "before"
    size = value.shape[-1]
    for operator, wanted, number in (("Mul", NEW[0], 2.0), ("Add", NEW[1], 0.5)):
        held = editor.constant(wanted, np.full(size, number, np.float32))
        made = editor.node(operator, [value, held], operator.lower(), ir.DataType.FLOAT)
        made.outputs[0].shape = value.shape
        graph.graph.append(made)
        value = made.outputs[0]
    value.name = name
    graph.graph.outputs[0] = value
    return graph


@pytest.fixture
def carrier() -> TorchCarrier:
    return TorchCarrier(shaken(Free()), VECTOR)


@pytest.fixture
def after(carrier: TorchCarrier) -> TorchCarrier:
    found = carrier.with_trainable_graph(grown(carrier), NEW)
    assert isinstance(found, TorchCarrier)
    return found


def parameters(carrier: TorchCarrier) -> dict[str, nn.Parameter]:
    return dict(carrier.module.named_parameters(remove_duplicate=False))


def test_new_tensors_are_trained_beside_the_old_ones(carrier, after) -> None:
    assert after.executes_graph
    assert after.offers == set(Capability)
    assert isinstance(after.module, GraphModule)
    read = {x.weight for x in carrier.layers()}
    assert {*NEW, *read} <= parameters(after).keys()
    assert parameters(after).keys() <= {*NEW, *parameters(carrier)}
    assert {"norm.running_mean", "shift"} <= dict(after.module.named_buffers()).keys()
    (want,) = carrier.module_outputs(ROWS)
    for found in (after.module_outputs(ROWS)[0], *after.runner().run(ROWS).values()):
        assert worst(found, 2 * want + 0.5) < 1e-5

    before = {name: p.detach().clone() for name, p in parameters(carrier).items()}
    module = after.module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.from_numpy(ROWS["x"]))["output"].square().mean().backward()
    optimizer.step()
    module.eval()
    state = after.module.state_dict()
    assert not torch.equal(state[NEW[0]], torch.full_like(state[NEW[0]], 2.0))
    assert not torch.equal(state["up.weight"], before["up.weight"])
    for name, parameter in parameters(carrier).items():
        assert torch.equal(parameter, before[name])
    (found,) = after.runner().run(ROWS).values()
    assert worst(after.module_outputs(ROWS)[0], found) < 1e-5


def test_it_comes_back_as_it_was_saved(after, tmp_path: Path) -> None:
    size = after.module.state_dict()[NEW[1]].shape
    last = after.with_weights({NEW[1]: torch.full(size, 0.75)})
    folders = [tmp_path / name for name in ("first", "again", "restored")]
    for folder in folders:
        folder.mkdir()
    last.save(folders[0])
    last.save(folders[1])
    restored = TorchCarrier(Free(), VECTOR).restore(folders[0])
    assert isinstance(restored, TorchCarrier)
    restored.save(folders[2])
    names = sorted(path.name for path in folders[0].iterdir())
    for folder in folders[1:]:
        assert sorted(path.name for path in folder.iterdir()) == names
        for name in names:
            assert (folder / name).read_bytes() == (folders[0] / name).read_bytes()
    assert restored.offers == set(Capability)
    assert parameters(restored).keys() == parameters(last).keys() >= set(NEW)
    assert all(p.requires_grad for p in parameters(restored).values())
    for name, tensor in held_tensors(last.module).items():
        assert torch.equal(held_tensors(restored.module)[name], tensor), name
    (want,) = last.module_outputs(ROWS)
    assert np.array_equal(restored.module_outputs(ROWS)[0], want)


def test_a_second_change_keeps_the_first_ones_parameters(after, tmp_path: Path) -> None:
    graph = after.graph().clone()
    editor = Editor(graph)
    (output,) = graph.graph.outputs
    last = output.producer()
    assert last is not None
    again = editor.constant("third", np.zeros(output.shape[-1], np.float32))
    kept = last.inputs[0]
    assert kept is not None
    made = editor.node("Add", [kept, again], "further", ir.DataType.FLOAT)
    made.outputs[0].shape = output.shape
    last.prepend([made])
    last.replace_input_with(0, made.outputs[0])
    twice = after.with_trainable_graph(graph, ["third"])
    # Removing channels goes on from there: nothing is removed here.
    removed = twice.with_channels(twice.graph(), {})
    for one in (twice, removed):
        (folder := tmp_path / str(one is removed)).mkdir()
        one.save(folder)
        restored = TorchCarrier(Free(), VECTOR).restore(folder)
        assert parameters(restored).keys() == parameters(twice).keys() >= {*NEW, "third"}


def test_a_plan_runs_nothing_and_copies_nothing(carrier, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the model was run")

    graph = grown(carrier)
    monkeypatch.setattr("compressor.models.torch.carrier.Agreement", refuse)
    planned = carrier.with_trainable_graph(graph, NEW, planned=True)
    assert isinstance(planned, TorchCarrier)
    assert planned.offers == set(Capability)
    held, own = held_tensors(planned.module), held_tensors(carrier.module)
    assert held["up.weight"].data_ptr() == own["up.weight"].data_ptr()
    assert set(NEW) <= parameters(planned).keys()


def test_an_operator_of_onnx_runtime_alone_leaves_the_graph(carrier) -> None:
    graph = grown(carrier)
    (relu,) = [node for node in graph.graph if node.op_type == "Relu"]
    relu.op_type, relu.domain = "Normalizer", "ai.onnx.ml"
    graph.opset_imports["ai.onnx.ml"] = 1
    for planned in (False, True):
        found = carrier.with_trainable_graph(graph, NEW, planned=planned)
        assert isinstance(found, OnnxCarrier)


def test_codes_leave_the_graph(carrier) -> None:
    (layer,) = (x for x in carrier.layers() if x.name == "up")
    scheme = Scheme(8)

    def compute(matrix: torch.Tensor) -> QuantizedTensor:
        codes = torch.ones(matrix.shape, dtype=torch.int8)
        scale = torch.ones(len(matrix), 1)
        return QuantizedTensor(codes, scale, torch.zeros_like(scale, dtype=torch.int8), scheme)

    coded = carrier.with_codes({"up.weight": WeightCodes(layer, scheme, compute)})
    assert isinstance(coded.with_trainable_graph(coded.graph(), ()), OnnxCarrier)


def test_graphs_and_checkpoints(carrier, tmp_path: Path) -> None:
    graph = carrier.graph()
    assert OnnxCarrier(graph).with_trainable_graph(graph, ()).graph() is graph
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(SpecError, match="a bare checkpoint offers weights only"):
        open_checkpoint(tmp_path / "a.safetensors").with_trainable_graph(graph, ())
