"""Tensors that are computed when they are used, and constants that are kept."""

from __future__ import annotations

import pickle
import threading
from copy import deepcopy
from io import BytesIO

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from compressor.errors import ModelError
from compressor.models.executor import GraphModule
from compressor.models.executor.ops import OPERATORS
from compressor.models.lazy_tensor import LazyTensor
from tests.compressor.exporters.hand_made import Builder, entry, quantized


class Counted:
    """Counts how often its tensor is computed."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.calls = 0

    def __call__(self) -> Tensor:
        self.calls += 1
        return self.tensor.clone()

    def lazy(self) -> LazyTensor:
        return LazyTensor(self, self.tensor.shape, self.tensor.dtype)


@pytest.fixture
def counted() -> Counted:
    return Counted(torch.arange(6.0).view(2, 3))


def test_what_is_known_without_computing(counted: Counted) -> None:
    x = counted.lazy()
    assert (x.shape, x.dtype, x.device, x.numel(), x.dim()) == (
        (2, 3),
        torch.float32,
        torch.device("cpu"),
        6,
        2,
    )
    assert repr(x) == "LazyTensor(shape=[2, 3], dtype=torch.float32)"
    assert type(x.detach()) is LazyTensor
    assert deepcopy(x) is x
    assert x.to("cpu") is x
    assert counted.calls == 0


def test_operators_take_it_like_any_other(counted: Counted) -> None:
    x, plain = counted.lazy(), counted.tensor
    assert torch.equal(x + 1, plain + 1)
    assert torch.equal(torch.cat([x, x]), torch.cat([plain, plain]))
    assert torch.equal(x[1], plain[1])
    assert type(x.clone()) is Tensor
    assert torch.equal(x.clone(), plain)
    assert x.to(torch.float16).dtype == torch.float16
    assert x.tolist() == plain.tolist()
    np.testing.assert_array_equal(x.numpy(), plain.numpy())
    np.testing.assert_array_equal(np.asarray(x), plain.numpy())
    assert torch.equal(torch.from_dlpack(x), plain)
    assert x.sum().item() == 15


def test_it_is_stored_as_an_ordinary_tensor(counted: Counted) -> None:
    buffer = BytesIO()
    torch.save({"w": counted.lazy()}, buffer)
    buffer.seek(0)
    stored = torch.load(buffer, weights_only=True)["w"]
    assert type(stored) is Tensor
    assert torch.equal(stored, counted.tensor)


def test_it_cannot_be_written_to(counted: Counted) -> None:
    x = counted.lazy()
    with pytest.raises(RuntimeError, match="cannot be written to; clone it"):
        x.add_(1)
    with pytest.raises(RuntimeError, match="cannot be written to; clone it"):
        torch.add(counted.tensor, 1, out=x)
    for unusable in (x.data_ptr, x.untyped_storage):
        with pytest.raises(RuntimeError, match="clone it"):
            unusable()


def two_branches() -> ir.Model:
    """A model that multiplies with one of two weights, as its second input says."""
    made = Builder()
    x, flag = entry(features=3), ir.val("flag", ir.DataType.BOOL, [])
    weights = [made.constant(name, np.zeros((3, 2), np.float32)) for name in ("a", "b")]
    bodies = []
    for weight in weights:
        inner = ir.node("MatMul", [x, weight])
        inner.outputs[0].name = f"by_{weight.name}"
        bodies.append(ir.Graph([], inner.outputs, nodes=[inner], name=f"with_{weight.name}"))
    value = made.node("If", [flag], "y", then_branch=bodies[0], else_branch=bodies[1])
    return made.model([x, flag], value, 2)


def test_a_branch_that_is_not_taken_computes_nothing() -> None:
    a, b = Counted(torch.ones(3, 2)), Counted(2 * torch.ones(3, 2))
    module = GraphModule(two_branches(), {"a": a.lazy(), "b": b.lazy()})
    x = torch.ones(1, 3)
    assert module(x, torch.tensor(True))["output"].tolist() == [[3, 3]]
    assert (a.calls, b.calls) == (1, 0)
    assert module(x, torch.tensor(False))["output"].tolist() == [[6, 6]]
    assert (a.calls, b.calls) == (1, 1)


@pytest.fixture
def weights() -> dict[str, Counted]:
    graph = quantized(ir.DataType.INT4, None, blocks=True).graph()
    plain = GraphModule(graph).state_dict()
    return {name: Counted(plain[name]) for name in ("first.weight", "second.weight")}


def module_of(weights: dict[str, Counted], *, keeps: bool = False) -> GraphModule:
    graph = quantized(ir.DataType.INT4, None, blocks=True).graph()
    lazy = {name: tensor.lazy() for name, tensor in weights.items()}
    return GraphModule(graph, lazy, keeps_constants=keeps).eval()


def test_each_call_decodes_once_or_the_first_one_alone(weights: dict[str, Counted]) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    module = module_of(weights)
    first = module(x)["output"]
    module(x)
    assert [w.calls for w in weights.values()] == [2, 2]
    kept = module_of(weights, keeps=True)
    for _ in range(3):
        assert torch.equal(kept(x)["output"], first)
    assert [w.calls for w in weights.values()] == [3, 3]


def test_constants_are_computed_again_when_they_changed(weights: dict[str, Counted]) -> None:
    x = torch.ones(1, 64)
    module = module_of(weights, keeps=True)
    before = module(x)["output"]
    bias = module.state_dict()["second.bias"]
    torch.testing.assert_close(module(x, **{"second.bias": bias + 1})["output"], before + 1)
    zero = torch.zeros_like(module.state_dict()["second.weight_scale"])
    tried = module(x, **{"second.weight_scale": zero})["output"]
    assert torch.equal(tried, bias.expand(1, -1))
    assert torch.equal(module(x)["output"], before)
    module.load_state_dict({"second.weight_scale": zero}, strict=False)
    assert torch.equal(module(x)["output"], tried)
    module.to(torch.float64)
    assert module(x.double())["output"].dtype == torch.float64


def test_copies_are_independent(weights: dict[str, Counted]) -> None:
    x = torch.ones(1, 64)
    module = module_of(weights, keeps=True)
    before = module(x)["output"]
    copy = deepcopy(module)
    copy.load_state_dict({"second.bias": torch.zeros(10)}, strict=False)
    assert not torch.equal(copy(x)["output"], before)
    assert torch.equal(module(x)["output"], before)
    copy.get_buffer("first.bias").zero_()
    assert module.get_buffer("first.bias").abs().sum() > 0


def test_many_threads_compute_constants_once(weights: dict[str, Counted]) -> None:
    module, x = module_of(weights, keeps=True), torch.ones(1, 64)
    expected = module_of(weights)(x)["output"]
    results: list[Tensor] = []
    barrier = threading.Barrier(8)

    def run() -> None:
        barrier.wait()
        results.append(module(x)["output"])

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(torch.equal(result, expected) for result in results)
    assert [w.calls for w in weights.values()] == [2, 2]


def test_a_graph_is_not_pickled(weights: dict[str, Counted]) -> None:
    with pytest.raises(TypeError, match=r"pickle its state_dict\(\), .* call compressor.load"):
        pickle.dumps(module_of(weights))


def test_no_operator_is_random() -> None:
    """Otherwise what one computes of constants could not be kept."""
    names = {name for _, name in OPERATORS}
    assert not names & {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"}
    assert not names & {"RandomUniform", "RandomUniformLike"}


def test_a_deferred_graph_is_read_by_the_first_call() -> None:
    graph = quantized().graph()
    reads = []

    def read() -> ir.Model:
        reads.append(1)
        return graph

    plain = GraphModule(graph)
    module = GraphModule.deferred(read, plain.state_dict(), ["x"], ["output"]).eval()
    assert (module.input_names, module.output_names) == (("x",), ("output",))
    assert module.state_dict().keys() == plain.state_dict().keys()
    copy = deepcopy(module)
    assert not reads
    x = torch.ones(2, 64)
    assert torch.equal(module(x)["output"], plain(x)["output"])
    module(x)
    assert len(reads) == 1
    assert torch.equal(copy.to(torch.float64).float()(x)["output"], plain(x)["output"])


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(["x", "x"], ["output"]), ([], ["output"]), (["y"], ["output"]), (["x"], ["other"])],
)
def test_a_deferred_graph_must_have_the_listed_inputs_and_outputs(
    inputs: list[str], outputs: list[str]
) -> None:
    graph = quantized().graph()
    tensors = GraphModule(graph).state_dict()
    module = GraphModule.deferred(lambda: graph, tensors, inputs, outputs).eval()
    with pytest.raises(ModelError, match="other inputs or outputs than were listed"):
        module(**dict.fromkeys(inputs, torch.ones(2, 64)))
