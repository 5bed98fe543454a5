"""Carriers of what is only planned: sizes, and nothing that has to be read or run."""

from __future__ import annotations

from typing import NoReturn

import onnx_ir as ir
import pytest
import torch
from torch import nn

from compressor.graph.channels.analysis import analyse
from compressor.graph.channels.slicing import remove_channels
from compressor.graph.costs import layer_bytes, model_bytes, model_parameters
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch import carrier as torch_carrier
from compressor.models.torch import smaller_module as agreement
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.carrier import Capability, Carrier
from compressor.types.tensors import TensorSpec
from tests.compressor.models.smaller_modules import (
    CHAIN,
    CHAIN_KEPT,
    CHAIN_SIZES,
    VECTOR,
    Chain,
    Free,
    Kept,
    Rigid,
    hidden_kept,
    lowered_cut,
    shaken,
)

HIDDEN = hidden_kept(1, 3, 4, 7)


def unreadable(graph: ir.Model) -> ir.Model:
    """Return a copy of a graph whose float initializers must not be read."""

    def read() -> NoReturn:
        raise AssertionError("a weight was read")

    copy = graph.clone()
    for value in copy.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        if tensor.dtype.is_floating_point():
            shape = ir.Shape(tensor.shape)
            value.const_value = ir.LazyTensor(read, tensor.dtype, shape, name=value.name)
    return copy


def sizes(carrier: Carrier) -> object:
    return (
        carrier.kind,
        carrier.offers,
        carrier.inputs,
        [(layer.name, layer.kind, layer.shape, layer.dtype) for layer in carrier.layers()],
        {n: tuple(v.const_value.shape) for n, v in carrier.graph().graph.initializers.items()},
        layer_bytes(carrier),
        model_bytes(carrier),
        model_parameters(carrier),
    )


def hidden_graph() -> ir.Model:
    return lowered_cut(shaken(Free()), VECTOR, HIDDEN, {})


@pytest.mark.parametrize(
    ("module", "inputs", "kept"),
    [(Chain, CHAIN, CHAIN_KEPT), (Free, VECTOR, HIDDEN), (Rigid, VECTOR, HIDDEN)],
    ids=["chain", "adapted", "its graph executed"],
)
def test_a_planned_module_has_the_sizes_of_the_real_one(
    module: type[nn.Module],
    inputs: tuple[TensorSpec, ...],
    kept: Kept,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = (
        lowered_cut(shaken(Chain()), CHAIN, CHAIN_KEPT, CHAIN_SIZES)
        if module is Chain
        else hidden_graph()
    )
    carrier = TorchCarrier(shaken(module()), inputs)
    real = carrier.with_channels(graph, kept)

    def run(*_: object) -> NoReturn:
        raise AssertionError("something was run")

    monkeypatch.setattr(agreement, "runner_of", run)
    monkeypatch.setattr(torch_carrier, "runner_of", run)
    monkeypatch.setattr(agreement, "run_module", run)
    planned = carrier.with_channels(unreadable(graph), kept, planned=True)
    assert isinstance(planned, TorchCarrier)
    assert sizes(planned) == sizes(real)
    held = {t.untyped_storage().data_ptr() for t in carrier.module.state_dict().values()}
    for tensor in planned.module.state_dict().values():
        assert tensor.untyped_storage().data_ptr() in held  # nothing was copied
    for name, stored in planned.tensors().items():
        assert stored.shape == tuple(planned.module.state_dict()[name].shape)
    if not (isinstance(real, TorchCarrier) and real.executes_graph):
        assert {n: t.shape for n, t in planned.tensors().items()} == {
            n: t.shape for n, t in real.tensors().items()
        }


def test_a_graph_that_cannot_take_a_modules_place_is_tried_for_planning_too() -> None:
    """Whether training can follow has to be known when the spec is planned."""
    graph = hidden_graph().clone()
    (relu,) = [node for node in graph.graph if node.op_type == "Relu"]
    relu.op_type, relu.domain = "Normalizer", "ai.onnx.ml"
    graph.opset_imports["ai.onnx.ml"] = 1
    planned = TorchCarrier(shaken(Rigid()), VECTOR).with_channels(graph, HIDDEN, planned=True)
    assert isinstance(planned, OnnxCarrier)
    assert Capability.TRAIN not in planned.offers


def test_planning_goes_on_from_what_is_planned() -> None:
    """One removal after the other, as ``compress plan`` of two passes does it."""
    module = shaken(Free())
    carrier: Carrier = TorchCarrier(module, VECTOR)
    graph = carrier.graph()
    assert isinstance(carrier, TorchCarrier)
    last: list[int] = []
    for _ in range(2):
        found = analyse(graph)
        removed = found.channels.removable.copy()
        for group in found.channels.groups:
            removed[group.units[len(group.units) // 2 :]] = False
        smaller, kept = remove_channels(graph, found, removed)
        carrier = carrier.with_channels(smaller, kept, planned=True)
        graph = carrier.graph()
        last.append(model_parameters(carrier))
    assert last[1] < last[0] < sum(p.numel() for p in module.parameters())
    assert Capability.TRAIN in carrier.offers


def test_an_onnx_graph_without_channels_is_read_late() -> None:
    """To remove channels reads no parameter; the smaller one is made when it is asked for."""
    wide = nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 6))
    graph = TorchCarrier(shaken(wide), VECTOR).graph()
    found = analyse(graph)
    removed = found.channels.removable.copy()
    for group in found.channels.groups:
        removed[group.units[:200]] = False
    reads: list[str] = []
    for name, value in graph.graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        if len(tensor.shape) > 1:  # a kilobyte or less is read where ONNX infers shapes
            value.const_value = _counted(tensor, name, reads)
    smaller, kept = remove_channels(graph, found, removed)
    planned = OnnxCarrier(graph).with_channels(smaller, kept, planned=True)
    assert model_bytes(planned) < model_bytes(OnnxCarrier(graph))
    assert reads == []
    name, axes = "0.weight", kept["0.weight"]
    array = planned.tensors()[name].read()
    assert reads == [name]
    whole = graph.graph.initializers[name].const_value
    assert whole is not None
    wanted = torch.from_numpy(whole.numpy().copy())
    for axis, positions in axes.items():
        wanted = wanted.index_select(axis, torch.as_tensor(positions))
    assert torch.equal(array, wanted)


def _counted(tensor: ir.TensorProtocol, name: str, reads: list[str]) -> ir.LazyTensor:
    def read() -> ir.TensorProtocol:
        reads.append(name)
        return tensor

    return ir.LazyTensor(read, tensor.dtype, ir.Shape(tensor.shape), name=name)
