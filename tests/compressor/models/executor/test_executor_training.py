"""Graphs that are trained: the same steps as the module they were lowered from."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional

from compressor.models.executor import GraphModule
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.matching import held_tensors
from compressor.models.torch.smaller_module import trainable_graph
from compressor.types.tensors import TensorSpec
from tests.compressor.models.smaller_modules import shaken


class Vision(nn.Module):
    """Convolutions, batch norms with their own momentum, pooling, padding and concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6, momentum=0.3)
        self.second = nn.Conv2d(6, 6, 3, padding=1, groups=3)
        self.bare = nn.BatchNorm2d(12, affine=False)
        self.up = nn.ConvTranspose2d(12, 4, 2, stride=2)
        self.slope, self.group = nn.PReLU(4), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = functional.max_pool2d(torch.relu(self.norm(self.first(image))), 2)
        x = self.bare(torch.cat([x, functional.silu(self.second(x))], 1))
        x = self.group(self.slope(self.up(functional.avg_pool2d(x, 2))))
        x = functional.pad(x[:, :, ::2], (1, 0, 0, 1)) * torch.sigmoid(x.mean((2, 3), True))
        result: Tensor = self.head(x.mean((2, 3)))
        return result


class Text(nn.Module):
    """Embeddings, a layer norm, attention, a gated MLP and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm, self.rms = nn.LayerNorm(8), nn.RMSNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.rms(x)
        x = x + self.down(functional.gelu(self.gate(y)) * self.up(y))
        result: Tensor = self.head(x).mean(1)
        return result


CASES: dict[str, tuple[type[nn.Module], TensorSpec]] = {
    "vision": (Vision, TensorSpec("image", ("batch", 3, 8, 8), "float32")),
    "text": (Text, TensorSpec("ids", ("batch", 6), "int64")),
}


def sample(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "text":
        return torch.randint(0, 11, (4, 6), generator=generator), torch.tensor([1, 2, 3, 4])
    return torch.randn(4, 3, 8, 8, generator=generator), torch.tensor([1, 0, 3, 4])


def steps(module: nn.Module, inputs: Tensor, labels: Tensor) -> list[float]:
    """Train for a few steps and return the losses."""
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        result = module(inputs)
        logits = result["output"] if isinstance(result, dict) else result
        loss = functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@cache
def lowered(name: str) -> TorchCarrier:
    build, spec = CASES[name]
    return TorchCarrier(shaken(build()), [spec])


@pytest.fixture(params=list(CASES))
def pair(request: pytest.FixtureRequest) -> tuple[str, nn.Module, GraphModule]:
    carrier = lowered(request.param)
    return request.param, carrier.module, trainable_graph(carrier.graph(), carrier.module)


def test_training_is_the_same(pair: tuple[str, nn.Module, GraphModule]) -> None:
    name, module, graph = pair
    module, untrained = deepcopy(module), deepcopy(graph)
    inputs, labels = sample(name)
    wanted = steps(module, inputs, labels)
    assert wanted[-1] < wanted[0]
    assert steps(graph, inputs, labels) == pytest.approx(wanted, rel=1e-4)
    held, found = held_tensors(module), dict(graph.state_dict())
    shared = [key for key in held if key in found]
    assert {key for key, _ in graph.named_parameters()} <= set(shared)
    assert len(list(graph.parameters())) == len(list(module.parameters()))
    for key in shared:
        torch.testing.assert_close(found[key], held[key], rtol=1e-3, atol=1e-5)
        assert not torch.equal(found[key], untrained.state_dict()[key]), key
    evaluated = graph.eval()(inputs)["output"]
    torch.testing.assert_close(evaluated, module.eval()(inputs), rtol=1e-3, atol=1e-4)
    if name == "vision":
        assert not torch.allclose(graph.train()(inputs)["output"], evaluated, atol=1e-3)


def test_values_of_the_graph_are_not_trained(pair: tuple[str, nn.Module, GraphModule]) -> None:
    name, module, graph = pair
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    steps(graph, *sample(name))
    for key, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[key])


def test_parameters_under_names_with_dots(pair: tuple[str, nn.Module, GraphModule]) -> None:
    _, _, graph = pair
    name, parameter = next(iter(graph.named_parameters()))
    assert graph.get_parameter(name) is parameter
    with pytest.raises(AttributeError, match="no parameter 'nothing'"):
        graph.get_parameter("nothing")
    with pytest.raises(AttributeError, match="no initializer"):
        graph.get_buffer(name)
    halves = graph.to(torch.float64)
    assert halves.get_parameter(name).dtype == torch.float64
    assert isinstance(halves.get_parameter(name), nn.Parameter)
    value = torch.full_like(parameter, 2.0, dtype=torch.float32)
    graph.load_state_dict({name: value}, strict=False)
    assert graph.get_parameter(name).dtype == torch.float64
    assert graph.get_parameter(name).requires_grad
    assert float(graph.get_parameter(name).detach().mean()) == 2.0


def test_frozen_parameters_stay_frozen() -> None:
    module = deepcopy(lowered("vision").module)
    module.get_submodule("first").requires_grad_(False)
    graph = trainable_graph(lowered("vision").graph(), module)
    assert not graph.get_parameter("first.weight").requires_grad
    assert graph.get_parameter("head.weight").requires_grad


def test_without_parameters_training_mode_changes_nothing() -> None:
    graph = GraphModule(lowered("vision").graph())
    image, _ = sample("vision")
    before = {key: tensor.clone() for key, tensor in graph.state_dict().items()}
    with torch.no_grad():
        torch.testing.assert_close(graph.train()(image), graph.eval()(image), rtol=0, atol=0)
    for key, tensor in graph.state_dict().items():
        assert torch.equal(tensor, before[key])


def test_a_tied_parameter_is_replaced_under_all_names() -> None:
    table = nn.Parameter(torch.ones(4, 4))
    module = GraphModule(two_products(), parameters={"a": table, "b": table})
    assert len(list(module.parameters())) == 1
    module.load_state_dict({"a": torch.full((4, 4), 2.0)}, strict=False)
    assert module.get_parameter("b") is module.get_parameter("a")
    assert float(module(torch.ones(1, 4))["y"].detach()[0, 0]) == 64.0
    assert float(table.detach()[0, 0]) == 1.0


class Tied(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4, 4))
        self.b = self.a


def test_what_is_tied_in_the_network_is_tied_in_its_graph() -> None:
    graph = trainable_graph(two_products(), Tied())
    assert graph.get_parameter("a") is graph.get_parameter("b")


def two_products() -> ir.Model:
    """Return y = x a b, ``a`` and ``b`` of four by four."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("MatMul", ["h", "b"], ["y"]),
    ]
    values = [numpy_helper.from_array(np.ones((4, 4), np.float32), name) for name in "ab"]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 4]) for n in "xy"]
    graph = helper.make_graph(nodes, "products", ends[:1], ends[1:], values)
    opset = [helper.make_opsetid("", 21)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opset))
