"""The torch graph executor as a module: names, memory, devices, gradients and errors."""

from __future__ import annotations

import copy
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import helper, numpy_helper
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from compressor.errors import ModelError
from compressor.models.executor import GraphModule
from compressor.models.executor.node import Operator
from tests.compressor.models.executor.linear_graphs import graph_of, linear_graph


class _Untouchable(torch.Tensor):
    """A tensor that may be passed around but not read."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} read a tensor on construction")


def _untouchable(*shape: int) -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(_Untouchable, shape)  # type: ignore[attr-defined]


def test_inputs_and_outputs() -> None:
    module = GraphModule(linear_graph())
    assert module.input_names == ("x",)
    assert module.output_names == ("y",)
    x = torch.randn(2, 3)
    by_name, by_position = module(x=x), module(x)
    assert list(by_name) == ["y"]
    torch.testing.assert_close(by_name["y"], by_position["y"], rtol=0, atol=0)


def test_state_dict_has_the_names_of_the_graph() -> None:
    module = GraphModule(linear_graph())
    assert list(module.state_dict()) == ["block.0/w", "block.0"]
    assert [name for name, _ in module.named_buffers()] == ["block.0/w", "block.0"]
    assert module.get_buffer("block.0").shape == (4,)
    with pytest.raises(AttributeError, match=r"block\.1"):
        module.get_buffer("block.1")


def test_load_state_dict_assigns_and_leaves_the_model_alone() -> None:
    model = linear_graph()
    module, other = GraphModule(model), GraphModule(linear_graph())
    before = model.graph.initializers["block.0"].const_value.numpy().copy()
    state = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    module.load_state_dict(state)
    assert module.get_buffer("block.0") is state["block.0"]
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    assert not module(x)["y"].any()
    assert other(x)["y"].any()
    after = model.graph.initializers["block.0"].const_value.numpy()
    np.testing.assert_array_equal(before, after)


def test_load_state_dict_refuses_what_does_not_fit() -> None:
    module = GraphModule(linear_graph())
    state = dict(module.state_dict())
    with pytest.raises(ModelError, match="'other': is not in the graph"):
        module.load_state_dict(state | {"other": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"'block.0': is missing"):
        module.load_state_dict({"block.0/w": state["block.0/w"]})
    with pytest.raises(ModelError, match=r"has shape \[2\], the graph says \[4\]"):
        module.load_state_dict(state | {"block.0": torch.zeros(2)})
    with pytest.raises(ValueError, match="assign=True"):
        module.load_state_dict(state, assign=False)
    missing, unexpected = module.load_state_dict({"a": torch.zeros(1)}, strict=False)
    assert (missing, unexpected) == (["block.0/w", "block.0"], ["a"])


@pytest.mark.parametrize("trained", [False, True])
def test_a_state_is_loaded_by_a_module_around_it(trained: bool) -> None:
    model = linear_graph()
    weights = model.graph.initializers
    parameters = {
        name: torch.nn.Parameter(torch.tensor(value.const_value.numpy()))
        for name, value in weights.items()
        if trained
    }
    inner = GraphModule(model, parameters=parameters, keeps_constants=True)
    around = torch.nn.Sequential(inner).eval()
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    before = {name: value.const_value.numpy().copy() for name, value in weights.items()}
    assert around(x)["y"].any()
    state = {name: torch.zeros_like(value) for name, value in around.state_dict().items()}
    around.load_state_dict(state)
    assert not around(x)["y"].any()
    for name, parameter in parameters.items():  # an optimizer holds them
        assert inner.get_parameter(name) is parameter
    for name, value in weights.items():
        np.testing.assert_array_equal(value.const_value.numpy(), before[name])
    with pytest.raises(RuntimeError, match=r'Unexpected key.*: "0\.other\.name"'):
        around.load_state_dict({**state, "0.other.name": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"'block\.0' has shape \[2\], and not \[4\]"):
        around.load_state_dict({**state, "0.block.0": torch.zeros(2)})
    with pytest.raises(RuntimeError, match=r'Missing key.*: "0\.block\.0"'):
        around.load_state_dict({"0.block.0/w": state["0.block.0/w"]})


def test_given_tensors_are_kept_and_not_read() -> None:
    weight = _untouchable(3, 4)
    module = GraphModule(linear_graph(), {"block.0/w": weight, "not in the graph": _untouchable(1)})
    assert module.get_buffer("block.0/w") is weight


def test_tensors_of_a_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"block.0/w": torch.ones(3, 4), "block.0": torch.zeros(4)}, path)
    tensors = load_file(path)
    module = GraphModule(linear_graph(), tensors)
    assert module.get_buffer("block.0/w").data_ptr() == tensors["block.0/w"].data_ptr()
    torch.testing.assert_close(module(torch.ones(1, 3))["y"], torch.full((1, 4), 3.0))


def test_values_of_the_model_are_shared() -> None:
    value = np.arange(4, dtype=np.float32)
    model = linear_graph()
    model.graph.initializers["block.0"].const_value = ir.Tensor(value)
    assert GraphModule(model).get_buffer("block.0").data_ptr() == value.ctypes.data


def test_external_data_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    ir.save(linear_graph(), path, external_data="model.data", size_threshold_bytes=0)
    module = GraphModule(ir.load(path))
    x = torch.randn(2, 3)
    torch.testing.assert_close(module(x), GraphModule(linear_graph())(x))


def test_a_tensor_of_another_shape_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'block.0': .* shape \[5\], the graph says \[4\]"):
        GraphModule(linear_graph(), {"block.0": torch.zeros(5)})


def test_an_initializer_can_be_replaced_in_one_call() -> None:
    module = GraphModule(linear_graph())
    x = torch.randn(2, 3)
    before = module(x)["y"]
    changed = module(x, **{"block.0": torch.full((4,), 100.0)})["y"]
    assert (changed > before + 50).all()
    torch.testing.assert_close(module(x)["y"], before, rtol=0, atol=0)


def test_gradients() -> None:
    module = GraphModule(linear_graph())
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    weight = module.get_buffer("block.0/w").double().requires_grad_()
    bias = module.get_buffer("block.0").double().requires_grad_()

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return module(x, **{"block.0/w": weight, "block.0": bias})["y"]

    assert torch.autograd.gradcheck(run, (x, weight, bias))


def test_inputs_are_not_written_to() -> None:
    x = torch.randn(2, 3)
    copied = x.clone()
    GraphModule(linear_graph())(x)
    torch.testing.assert_close(x, copied, rtol=0, atol=0)


class _Alive(TorchDispatchMode):
    """Counts how many results of operators are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._results: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._results.append(weakref.ref(result))
        self.most = max(self.most, sum(ref() is not None for ref in self._results))
        return result


def test_dead_values_are_freed() -> None:
    length = 20
    names = ["x", *(f"v{i}" for i in range(length))]
    chain = [helper.make_node("Exp", [a], [b]) for a, b in pairwise(names)]
    module = GraphModule(graph_of(chain, {}))
    x = torch.zeros(1, 3)
    with _Alive() as alive:
        module(x)
    assert alive.most == 2


def test_shapes_stay_on_the_cpu() -> None:
    """The meta device has no values, so a shape that went there could not be read."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["batch"], axis=0),
        helper.make_node("Concat", ["batch", "rest"], ["target"], axis=0),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Reshape", ["h", "target"], ["r"]),
        helper.make_node("ConstantOfShape", ["target"], ["zeros"]),
        helper.make_node("Add", ["r", "zeros"], ["y"]),
    ]
    weights = {
        "zero": np.array([0]),
        "rest": np.array([2, 2]),
        "w": np.zeros((3, 4), np.float32),
    }
    module = GraphModule(graph_of(nodes, weights)).to("meta")
    assert module.get_buffer("w").is_meta
    assert module.get_buffer("rest").is_cpu
    result = module(torch.empty(5, 3, device="meta"))["y"]
    assert result.is_meta
    assert result.shape == (5, 2, 2)


def test_half_precision_module() -> None:
    module = GraphModule(linear_graph()).to(torch.bfloat16)
    assert module(torch.randn(2, 3, dtype=torch.bfloat16))["y"].dtype == torch.bfloat16


def test_copies_are_independent() -> None:
    module = GraphModule(linear_graph())
    copied = copy.deepcopy(module)
    copied.get_buffer("block.0").fill_(1e6)
    assert module(torch.zeros(1, 3))["y"].max() < 1e5


def test_functions_are_inlined_and_the_model_is_not_changed() -> None:
    function = helper.make_function(
        "mine",
        "Double",
        ["a"],
        ["b"],
        [helper.make_node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 21)],
    )
    proto = ir.to_proto(graph_of([helper.make_node("Double", ["x"], ["y"], domain="mine")], {}))
    proto.functions.append(function)
    model = ir.from_proto(proto)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    result = GraphModule(model)(torch.ones(1, 3))["y"]
    torch.testing.assert_close(result, torch.full((1, 3), 2.0))
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_nodes_are_put_in_order_and_the_model_is_not_changed() -> None:
    model = linear_graph()
    nodes = list(model.graph)
    x = torch.randn(2, 3)
    expected = GraphModule(model)(x)
    model.graph.remove(nodes[0])
    model.graph.insert_after(nodes[2], nodes[0])
    torch.testing.assert_close(GraphModule(model)(x), expected)
    assert list(model.graph) == [nodes[1], nodes[2], nodes[0]]


def test_constants_move_with_the_module_but_are_no_state() -> None:
    value = numpy_helper.from_array(np.ones(3, np.float32))
    nodes = [
        helper.make_node("Constant", [], ["one"], value=value),
        helper.make_node("Add", ["x", "one"], ["y"]),
    ]
    module = GraphModule(graph_of(nodes, {}))
    assert not module.state_dict()
    assert module.to("meta")(torch.empty(1, 3, device="meta"))["y"].is_meta


def test_further_operators_beside_its_own() -> None:
    """Attributes are read like those of any operator; in training another function may run."""
    scaled = Operator(
        lambda x, *, factor=2.0: x * factor, train=lambda x, *, factor=2.0: x * factor + 1
    )
    nodes = [
        helper.make_node("Scaled", ["x"], ["s"], domain="mine", factor=3.0),
        helper.make_node("Add", ["s", "b"], ["y"]),
    ]
    model = graph_of(nodes, {"b": np.zeros(3, np.float32)})
    bias = torch.nn.Parameter(torch.zeros(3))
    module = GraphModule(model, parameters={"b": bias}, operators={("mine", "Scaled"): scaled})
    x = torch.ones(2, 3)
    assert torch.equal(module.eval()(x)["y"].detach(), 3 * x)
    assert torch.equal(module.train()(x)["y"].detach(), 3 * x + 1)
    with pytest.raises(ModelError, match=r"mine.Scaled, opset 1\): the operator is not supported"):
        GraphModule(model)
    nodes[0].attribute[0].name = "share"
    with pytest.raises(ModelError, match="attribute 'share' is not supported"):
        GraphModule(graph_of(nodes, {}), operators={("mine", "Scaled"): scaled})


def test_the_square_of_a_norm_is_a_product() -> None:
    node = helper.make_node("Pow", ["x", "two"], ["y"])
    module = GraphModule(graph_of([node], {"two": np.float32(2)}))
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = module(x)["y"]
    # A power of a tensor differs in last bits, and takes more than ten times as long.
    assert torch.equal(y, x * x)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
    exponent = torch.nn.Parameter(torch.tensor(2.0))
    trained = GraphModule(graph_of([node], {"two": np.float32(2)}), parameters={"two": exponent})
    trained.train()(x)["y"].sum().backward()
    assert exponent.grad is not None
