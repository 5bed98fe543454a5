"""Modules and the graphs they are lowered to compute the same, at other sizes too."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnxscript
import pytest
import torch
from onnxscript import TracedOnnxFunction
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from compressor.errors import ModelError, SpecError
from compressor.graph.costs import macs, parameters
from compressor.models.onnx.ort_runner import graph_runner
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.lowering import OPSET, example_inputs, lower
from tests.compressor.models.sample_modules import PLANS, batch_of, lowered, spec

pytestmark = pytest.mark.usefixtures("lowered_each_time")
TRACES = "do_not_emit_stack_traces"


def test_garbage_is_collected_after_but_not_while_a_module_is_lowered():
    seen: list[bool] = []

    class Watched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(gc.isenabled())
            return x + 1

    TorchCarrier(Watched(), [spec("x", "batch", 3)]).graph()
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_no_source_of_the_exporters_functions_is_parsed(monkeypatch: pytest.MonkeyPatch):
    parsed = property(Mock(side_effect=AssertionError("parsed")))
    monkeypatch.setattr(TracedOnnxFunction, "function_ir", parsed)
    assert TorchCarrier(nn.Linear(3, 2), [spec("x", "batch", 3)]).layers()
    assert vars(TracedOnnxFunction)["function_ir"] is parsed, "as before"


@pytest.mark.skipif(not hasattr(torch.fx.config, TRACES), reason="PyTorch always notes them")
def test_no_lines_of_code_are_noted_for_operators():
    model = lower(nn.Linear(3, 2), [spec("x", "batch", 3)])
    assert not any(node.metadata_props.get("pkg.torch.onnx.stack_trace") for node in model.graph)
    assert not getattr(torch.fx.config, TRACES), "as before"


def test_more_than_the_domain_of_an_exporters_function_is_parsed():
    graphs: list[Any] = []

    class Watched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            graphs.append(TracedOnnxFunction(onnxscript.opset18, written).function_ir.inputs)
            return x + 1

    def written(x: Any) -> Any:
        return onnxscript.opset18.Identity(x)

    TorchCarrier(Watched(), [spec("x", "batch", 3)]).graph()
    assert {value.name for inputs in graphs for value in inputs} == {"x"}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    "lengths",
    [
        {"batch": 1, "n": 1, "time": 3, "height": 32, "width": 48},
        {"batch": 4, "n": 7, "time": 11, "height": 65, "width": 33},
    ],
)
def test_module_and_graph_agree(name: str, lengths: dict[str, int]):
    carrier = lowered(name)
    batch = batch_of(carrier, lengths)
    ours = list(carrier.runner().run(batch).values())
    theirs = carrier.module_outputs(batch)
    assert len(ours) == len(theirs) == len(carrier.outputs)
    for have, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


def test_inputs_outputs_and_opset():
    block, pair = lowered("block"), lowered("pair")
    assert block.graph().opset_imports[""] == OPSET
    assert [str(o) for o in block.outputs] == ["output float32[batch, time, 20]"]
    assert [v.name for v in pair.graph().graph.inputs] == ["left", "right"]
    assert [str(o) for o in pair.outputs] == [
        "output_0 float32[n, 5]",
        "output_1 float32[n, 5]",
        "output_2 float32[n]",
    ]
    names = [i.name for i in lowered("pair by position").graph().graph.inputs]
    assert names == ["x", "y"]


class _Heads(torch.nn.Module):
    def __init__(self, keys: Sequence[Any]):
        super().__init__()
        self.keys, self.linear = keys, torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[Any, torch.Tensor | None]:
        scores = self.linear(x)
        values = iter((scores, scores.sum(dim=1)))
        return {k: None if k == "loss=None" else next(values) for k in self.keys}


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (("logits", "value"), ["logits", "value"]),
        (("logits",), ["logits"]),
        (("loss=None", "logits", "value"), ["logits", "value"]),
        ((1, 2), ["output_0", "output_1"]),
        (("x", "value"), ["output_0", "value"]),  # an input has that name
    ],
)
def test_outputs_of_a_dictionary_have_its_keys(keys: Sequence[Any], names: list[str]):
    carrier = TorchCarrier(_Heads(keys), [spec("x", "batch", 3)])
    assert [o.name for o in carrier.outputs] == names
    batch = {"x": np.ones((4, 3), np.float32)}
    assert list(carrier.runner().run(batch)) == names


@pytest.mark.parametrize("name", ["convolutions", "block", "pair", "tokens"])
def test_weights_keep_their_names_and_are_shared(name: str):
    carrier = lowered(name)
    state = carrier.module.state_dict()
    for layer in carrier.layers():
        assert torch.equal(carrier.weight(layer), state[layer.weight])
        assert layer.bias is None or layer.bias in state
        tensor = carrier.graph().graph.initializers[layer.weight].const_value
        assert tensor is not None
        assert tensor.raw.data_ptr() == state[layer.weight].data_ptr()


def test_layers_are_those_that_one_would_name():
    assert [(la.name, la.kind, la.groups) for la in lowered("convolutions").layers()] == [
        ("stem", "Conv", 1),
        ("depthwise", "Conv", 8),
        ("up", "ConvTranspose", 2),
        ("down.0", "Conv", 1),
        ("down.1", "Conv", 1),
        ("down.2", "Conv", 1),
        ("head", "Gemm", 1),
    ]
    block = [(la.name, la.kind, la.transposed) for la in lowered("block").layers()]
    assert [name for name, _, _ in block[1:]] == ["qkv", "out", "up", "down"]
    assert block[0][1] == "Gather"  # the tied table belongs to its first reader
    assert all(kind == "MatMul" for _, kind, _ in block[1:])
    assert not any(turned for *_, turned in block)  # Linear stores rows as output channels


@pytest.mark.parametrize("name", ["convolutions", "block", "pair", "tokens"])
def test_parameters_and_macs(name: str):
    carrier = lowered(name)
    own = sum(p.numel() for p in carrier.module.parameters())
    masks = sum(b.numel() for n, b in carrier.module.named_buffers() if n == "mask")
    assert parameters(carrier.graph()) == own + masks
    # Dynamic axes count as 1: one token, one pixel.
    wanted = {
        "block": 16 * 48 + 16 * 16 + 2 * 16 * 64 + 20 * 16 + 4 * (4 + 4),
        "pair": 4 * 5 + 3 * 5,
        "tokens": 6 * 5 + 5 * 3,
    }
    if name in wanted:
        assert macs(carrier.graph()) == wanted[name]


def test_the_module_is_left_in_evaluation_mode_and_as_it_was():
    carrier = lowered("convolutions")
    assert not carrier.module.training
    assert carrier.module.norm.num_batches_tracked == 0


def test_examples_of_every_axis_differ():
    made = example_inputs(
        [spec("a", "n", "t", 3), spec("b", "n", 1, "h", "w", dtype="int64"), spec("c", 5)]
    )
    lengths = {n: tuple(t.shape) for n, t in made.items()}
    n, t = lengths["a"][:2]
    assert lengths["b"][0] == n
    assert len({1, n, t, *lengths["b"][2:]}) == 5
    assert min(lengths["b"][2:]) >= 64
    assert (made["b"].dtype, lengths["c"]) == (torch.int64, (5,))


def test_examples_have_more_positions_than_a_chunk():
    tokens = [spec("a", "n", "t", dtype="int64"), spec("b", "n", "m", 4)]
    made = {n: tuple(t.shape) for n, t in example_inputs(tokens, chunk=8).items()}
    assert made == {"a": (2, 13), "b": (2, 16, 4)}


def test_examples_of_waveforms_are_longer_than_windows():
    made = example_inputs([spec("a", "n", "t"), spec("b", "n", 7), spec("c", "n", "m", 4)])
    assert {n: tuple(t.shape) for n, t in made.items()} == {
        "a": (2, 8005),
        "b": (2, 7),
        "c": (2, 8, 4),
    }


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x.sum() > 0 else x


def test_what_cannot_be_lowered_is_told_and_nothing_else(capfd: pytest.CaptureFixture[str]):
    carrier = TorchCarrier(Branching(), [spec("x", "n", 4)])
    with pytest.raises(ModelError) as caught:
        carrier.graph()
    message = str(caught.value)
    assert message.startswith("module Branching: cannot be lowered to a graph (")
    assert "let forward compute all branches and choose with torch.where" in message
    assert "\n" not in message
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("functional", [True, False])
def test_a_forward_that_differentiates_is_told_of_that(functional: bool):
    class Forces(Branching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if functional:
                return torch.func.grad(lambda p: self.a(p).tanh().sum())(x)
            x.requires_grad_(True)
            return torch.autograd.grad(self.a(x).tanh().sum(), x)[0]

    with pytest.raises(ModelError, match=r"may compute gradients.*the energy, alone"):
        TorchCarrier(Forces(), [spec("x", "n", 4)]).graph()


def test_an_input_that_is_left_out_while_it_is_traced():
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            if mask is None and not torch.compiler.is_compiling():
                mask = torch.ones_like(x)
            return x * mask[:, :1]  # type: ignore[index]

    with pytest.raises(ModelError, match="name it there, such as attention_mask"):
        TorchCarrier(Masked(), [spec("x", "n", 4)]).graph()


def test_an_operator_that_the_exporter_cannot_write():
    class Rotation(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turned = torch.view_as_complex(x).cumsum(0)
            return torch.view_as_real(turned)

    with pytest.raises(ModelError, match=r"aten\.cumsum.*real and imaginary parts in place"):
        TorchCarrier(Rotation(), [spec("x", "n", 2)]).graph()


@pytest.mark.parametrize(
    ("width", "operator"), [(6, "linalg_matrix_exp"), (4, "linalg_householder_product")]
)
def test_a_parametrization_that_the_exporter_cannot_write(width: int, operator: str) -> None:
    """The advice was about complex numbers in forward, where there are none."""
    module = nn.Sequential(nn.Linear(4, 6), parametrizations.orthogonal(nn.Linear(6, width)))
    inputs = [spec("x", "n", 4)]
    with pytest.raises(
        ModelError,
        match=rf"aten\.{operator}.*the parametrization of '1\.weight' calls it.*"
        r"remove_parametrizations\(network\.1, 'weight'\)",
    ):
        TorchCarrier(module, inputs).graph()
    parametrize.remove_parametrizations(module[1], "weight")
    assert len(TorchCarrier(module, inputs).layers()) == 2


def test_an_operator_of_forward_is_not_one_of_a_parametrization() -> None:
    class Exponent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = parametrizations.weight_norm(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(self.layer(x))

    with pytest.raises(ModelError, match="use another one in forward") as caught:
        TorchCarrier(Exponent(), [spec("x", "n", 4, 4)]).graph()
    assert "complex" not in str(caught.value)


def test_an_axis_that_the_network_fixes():
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(ModelError, match="an axis that the network fixes needs its number"):
        TorchCarrier(module, [spec("x", "n", 2, "t")]).graph()


def test_a_batch_that_the_network_fixes_is_named():
    """The library's message breaks before it names the axis."""

    class Each(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([part[:1].sum(1) for part in x])

    with pytest.raises(ModelError, match=r"\['x'\]\.shape\[0\].*; give the axis its number"):
        TorchCarrier(Each(), [spec("x", "n", 3, 4)]).graph()
    assert TorchCarrier(Each(), [spec("x", 2, 3, 4)]).graph()


class Ramp(nn.Module):
    """Weighs half of the positions, whose number linspace takes as a number of Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x[..., ::2]
        return half * torch.linspace(0, 1, half.shape[-1])


def test_a_size_of_the_example_that_the_graph_holds():
    """A run ended in a message of the runtime about shapes."""
    message = r"follows from 'time' of model.inputs built into its graph, as 35; give the axis its"
    with pytest.raises(ModelError, match=message):
        TorchCarrier(Ramp(), [spec("x", "n", 3, "time")]).graph()
    assert TorchCarrier(Ramp(), [spec("x", "n", 3, 40)]).graph()


@pytest.mark.parametrize("multiple", [2, 8, 7 * 32])
def test_a_size_that_has_to_be_a_multiple_is_free(multiple: int):
    class Folded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            padded = nn.functional.pad(x, (0, -x.shape[-1] % multiple))
            return padded[..., ::2].unflatten(-1, (-1, multiple // 2)).sum(-1)

    assert TorchCarrier(Folded(), [spec("x", "n", 3, "time")]).graph()


def test_an_axis_of_several_inputs_is_free():
    """As whisper folds the batch of its sound into heads by that of its tokens."""

    class Folded(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.reshape(y.shape[0], -1, 4).sum(1) + y

    inputs = [spec("x", "n", 6, 4), spec("y", "n", 4)]
    assert TorchCarrier(Folded(), inputs).graph()


def test_a_size_that_has_a_bound_is_free():
    """As MPT cuts the biases of the last positions out of a table."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.table = nn.Embedding(9, 4), nn.Parameter(torch.ones(1, 64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, left = self.words(x), max(0, 64 - x.shape[1])
            return h @ h.mT + self.table[:, left:, left:]

    assert TorchCarrier(Biased(), [spec("x", "n", "time", dtype="int64")]).graph()


def test_a_length_that_is_an_attribute():
    class Generated(nn.Module):
        def forward(self, x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(1, -1, 8)
            return nn.functional.conv1d(rows, kernel.reshape(-1, 1, 3), groups=2 * x.shape[0])

    inputs = [spec("x", "n", 2, 8), spec("kernel", "n", 2, 3)]
    with pytest.raises(ModelError, match="such as the batch about the groups of a convolution"):
        TorchCarrier(Generated(), inputs).graph()


def test_too_many_inputs():
    with pytest.raises(SpecError, match="names 2 inputs, but forward of Linear takes 1; its param"):
        TorchCarrier(nn.Linear(2, 2), [spec("x", "n", 2), spec("y", "n", 2)]).graph()


def test_logging_and_warnings_are_as_before():
    filters, level = list(warnings.filters), logging.root.manager.disable
    TorchCarrier(nn.Linear(3, 2), [spec("input", "n", 3)]).graph()
    assert (list(warnings.filters), logging.root.manager.disable) == (filters, level)


@pytest.mark.parametrize("channels", [1, 2, 40])
def test_windows_of_dynamic_lengths_fit(channels: int):
    """A waveform, or channels over time, is lowered with lengths above usual kernels."""
    module = nn.Sequential(nn.Conv1d(channels, 4, 16, 8), nn.ReLU(), nn.Conv1d(4, 2, 1)).eval()
    inputs = [spec("x", "batch", channels, "time")]
    x = np.random.default_rng(0).standard_normal((3, channels, 50), np.float32)
    (got,) = graph_runner(lower(module, inputs)).run({"x": x}).values()
    np.testing.assert_allclose(got, module(torch.from_numpy(x)).detach(), rtol=1e-4, atol=1e-5)
