"""Channels removed from a module: sizes that follow, or a graph that takes its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compressor.errors import SpecError
from compressor.models.executor import GraphModule
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.matching import held_tensors
from compressor.models.torch.saved_module import Alterations
from compressor.models.torch.smaller_module import Agreement
from compressor.types.carrier import Capability
from compressor.types.layers import QuantizedTensor, Scheme, WeightCodes
from compressor.types.tensors import Batch, TensorSpec
from samples.cifar.model import resnet20
from tests.compressor.models.smaller_modules import (
    CHAIN,
    CHAIN_KEPT,
    CHAIN_SIZES,
    VECTOR,
    Chain,
    Configured,
    Free,
    Kept,
    Rigid,
    Shaped,
    at,
    cut,
    free_graph,
    heads,
    hidden_kept,
    lowered_cut,
    shaken,
    smaller,
    worst,
)

ROWS = {"x": np.linspace(-2, 2, 30, dtype=np.float32).reshape(5, 6)}


class Masked(nn.Module):
    """A mean over as many rows as are said to be there; of none, it is NaN."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        there = (torch.arange(x.shape[1]) < length - 1).float()[:, None]
        return self.last((x * there).sum(1) / there.sum())


def test_what_is_compared_on_samples_is_not_compared_on_made_up_lengths():
    """Of the lengths 0 and 1, all outputs are NaN, and any module would agree."""
    inputs = [TensorSpec("x", ("batch", 5, 6), "float32"), TensorSpec("length", (), "int64")]
    graph = TorchCarrier(Masked(), inputs).graph()
    sample = {"x": ROWS["x"][None], "length": np.array(4)}
    same, other = Masked().eval(), Masked(seed=1).eval()
    assert Agreement(graph, inputs).holds(other)
    assert Agreement(graph, inputs, sample).holds(same)
    assert not Agreement(graph, inputs, sample).holds(other)


def same(first: TorchCarrier, second: TorchCarrier, batch: Batch) -> None:
    """Check modules and graphs of two carriers against each other."""
    (wanted,) = first.runner().run(batch).values()
    for found in (second.runner().run(batch).values(), second.module_outputs(batch)):
        assert worst(next(iter(found)), wanted) < 1e-5


def test_sizes_of_convolutions_and_norms_follow() -> None:
    module = shaken(Chain())
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    graph = lowered_cut(module, CHAIN, CHAIN_KEPT, CHAIN_SIZES)
    given = {name: value.const_value for name, value in graph.graph.initializers.items()}
    carrier = TorchCarrier(module, CHAIN)
    after = carrier.with_channels(graph, CHAIN_KEPT)
    assert isinstance(after, TorchCarrier)
    assert not after.executes_graph
    assert after.offers == set(Capability)
    parts = dict(after.module.named_modules())
    for path, sizes in CHAIN_SIZES.items():
        assert {name: getattr(parts[path], name) for name in sizes} == sizes
    images = np.random.default_rng(1).normal(size=(3, 3, 8, 8)).astype(np.float32)
    want = cut(module, CHAIN_KEPT, CHAIN_SIZES)(torch.from_numpy(images)).detach().numpy()
    assert worst(after.module_outputs({"image": images})[0], want) < 1e-6
    assert worst(after.runner().run({"image": images})["output"], want) < 1e-5
    for name, tensor in carrier.module.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert carrier.module.grouped.groups == 4
    for name, value in graph.graph.initializers.items():
        assert value.const_value is given[name]


def test_tied_weights_and_buffers_are_cut_once() -> None:
    after = smaller(shaken(Free()), 1, 3, 4, 7)
    assert not after.executes_graph
    assert after.module.back.weight is after.module.down.weight
    assert after.module.shift.shape == (4,)
    assert after.module.norm.num_features == 4
    assert after.module.back.in_features == 4
    changed = after.with_weights({"down.weight": after.module.down.weight.detach() * 2})
    (found,) = changed.runner().run(ROWS).values()
    assert worst(changed.module_outputs(ROWS)[0], found) < 1e-5


def test_a_width_written_into_forward_leaves_the_graph() -> None:
    module = shaken(Rigid())
    after = smaller(module, 1, 3, 4, 7)
    assert after.executes_graph
    assert after.kind == "torch"
    assert Capability.TRAIN in after.offers
    assert isinstance(after.module, GraphModule)
    parameters = dict(after.module.named_parameters(remove_duplicate=False))
    assert parameters.keys() <= dict(module.named_parameters(remove_duplicate=False)).keys()
    assert {"up.weight", "up.bias", "norm.weight"} <= parameters.keys()
    assert {"norm.running_mean", "shift"} <= dict(after.module.named_buffers()).keys()
    same(smaller(shaken(Free()), 1, 3, 4, 7), after, ROWS)


def test_the_graph_of_a_carrier_follows_its_training() -> None:
    after = smaller(shaken(Rigid()), 1, 3, 4, 7)
    module = after.module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.from_numpy(ROWS["x"]))["output"].square().mean().backward()
    optimizer.step()
    module.eval()
    (found,) = after.runner().run(ROWS).values()
    assert worst(after.module_outputs(ROWS)[0], found) < 1e-5


class Attention(nn.Module):
    """Self-attention of PyTorch, which wants as many channels inside as outside."""

    def __init__(self, width: int = 12, count: int = 3) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, count, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


class ByHand(Attention):
    """The same with any number of heads of four channels."""

    def forward(self, x: Tensor) -> Tensor:
        own = self.attention
        joined = nn.functional.linear(x, own.in_proj_weight, own.in_proj_bias)
        q, k, v = joined.unflatten(-1, (3, -1, 4)).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(2, 3) / 2).softmax(-1) @ v
        return own.out_proj(mixed.transpose(1, 2).flatten(2))


TOKENS = (TensorSpec("x", ("batch", "time", 12), "float32"),)


def test_heads_of_a_multihead_attention() -> None:
    module, other = shaken(Attention()), shaken(ByHand())
    kept: Kept = {
        "attention.in_proj_weight": {0: heads([0, 2], 4, 3, 12)},
        "attention.in_proj_bias": {0: heads([0, 2], 4, 3, 12)},
        "attention.out_proj.weight": {1: heads([0, 2], 4)},
    }
    graph = lowered_cut(other, TOKENS, kept, {})
    after = TorchCarrier(module, TOKENS).with_channels(graph, kept)
    assert isinstance(after, TorchCarrier)
    assert after.executes_graph
    batch = {"x": np.random.default_rng(2).normal(size=(2, 5, 12)).astype(np.float32)}
    same(after, after, batch)


def padded_resnet(first: int, last: int) -> tuple[nn.Module, Kept, dict[str, dict[str, int]]]:
    """Return ResNet-20 and removals where its second stage widens 16 channels by 8 on each side.

    Of the new channels ``first`` stay in front and ``last`` behind; the old ones stay all. Between
    the two convolutions of that block, 20 channels stay.
    """
    module = shaken(resnet20())
    positions = at(*range(8 - first, 24 + last))
    kept: dict[str, dict[int, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]] = {}
    for block in range(3):
        start = f"layer2.{block}."
        kept[start + "conv2.weight"] = {0: positions}
        for name in ("weight", "bias", "running_mean", "running_var"):
            kept[f"{start}bn2.{name}"] = {0: positions}
        if block:
            kept[start + "conv1.weight"] = {1: positions}
    inner = at(*range(3, 23))
    kept["layer2.0.conv1.weight"] = {0: inner}
    kept["layer2.0.conv2.weight"][1] = inner
    for name in ("weight", "bias", "running_mean", "running_var"):
        kept[f"layer2.0.bn1.{name}"] = {0: inner}
    kept["layer3.0.conv1.weight"] = {1: positions}
    # The third stage's shortcut has 16 zeros in front, the 32 that now are fewer, and 16 behind.
    wide = np.concatenate([np.arange(16), positions + 16, np.arange(48, 64)])
    for block in range(3):
        start = f"layer3.{block}."
        kept[start + "conv2.weight"] = {0: wide}
        for name in ("weight", "bias", "running_mean", "running_var"):
            kept[f"{start}bn2.{name}"] = {0: wide}
        if block:
            kept[start + "conv1.weight"] = {1: wide}
    kept["linear.weight"] = {1: wide}
    return module, kept, {"layer2.0.shortcut": {"before": first, "after": last}}


def test_the_shortcut_of_the_sample_network() -> None:
    image = (TensorSpec("image", ("batch", 3, 32, 32), "float32"),)
    module, kept, sizes = padded_resnet(3, 5)
    graph = lowered_cut(module, image, kept, sizes)
    carrier = TorchCarrier(module, image)
    after = carrier.with_channels(graph, kept)
    assert isinstance(after, TorchCarrier)
    assert not after.executes_graph
    shortcut = after.module.layer2[0].shortcut
    assert (shortcut.before, shortcut.after) == (3, 5)
    batch = {"image": np.random.default_rng(3).normal(size=(2, 3, 32, 32)).astype(np.float32)}
    same(after, after, batch)


@pytest.mark.parametrize("kind", [Free, Rigid, Configured])
def test_removals_in_a_row_come_back_as_they_were_saved(kind: type[Free], tmp_path: Path) -> None:
    module = shaken(kind())
    once = smaller(module, 1, 3, 4, 7)
    kept = hidden_kept(0, 3)
    graph = free_graph(1, 7)
    twice = once.with_channels(graph, kept)
    assert isinstance(twice, TorchCarrier)
    assert twice.executes_graph == (kind is Rigid)
    last = twice.with_weights({"up.bias": torch.tensor([0.5, -0.25])})

    folders = [tmp_path / name for name in ("first", "again", "restored")]
    for folder in folders:
        folder.mkdir()
    last.save(folders[0])
    last.save(folders[1])
    # Restoring comes before the weights are read, when all results of a run are known already.
    base = TorchCarrier(kind(), VECTOR)
    restored = base.restore(folders[0])
    assert isinstance(restored, TorchCarrier)
    restored.save(folders[2])
    names = sorted(path.name for path in folders[0].iterdir())
    for folder in folders[1:]:
        assert sorted(path.name for path in folder.iterdir()) == names
        for name in names[: None if kind is Rigid else -1]:
            assert (folder / name).read_bytes() == (folders[0] / name).read_bytes()

    torch.save(module.state_dict(), tmp_path / "w.pt")
    base.load(tmp_path / "w.pt")
    assert restored.executes_graph == last.executes_graph
    assert restored.layers() == last.layers()
    for name, value in restored.graph().graph.initializers.items():
        assert value.shape == last.graph().graph.initializers[name].shape
    if kind is not Rigid:
        assert restored.module.get_submodule("up").out_features == 2
        assert restored.module.get_submodule("norm").num_features == 2
    same(last, restored, ROWS)
    for name, tensor in held_tensors(last.module).items():
        assert torch.equal(held_tensors(restored.module)[name], tensor), name


def test_later_sizes_come_on_top_of_earlier_ones() -> None:
    first = Alterations().adding(["a"])
    assert not first.channels_removed
    second = first.adding(["b"], {"x": {"one": 1, "two": 2}, "y": {"one": 1}})
    third = second.adding(["a", "c"], {"x": {"two": 3}, "z": {}})
    assert third.tensors == {"a", "b", "c"}
    assert third.attributes == {"x": {"one": 1, "two": 3}, "y": {"one": 1}, "z": {}}
    assert third.channels_removed
    assert first.adding(["b"], {}).channels_removed


def test_a_width_in_a_configuration_follows() -> None:
    module = shaken(Configured())
    after = smaller(module, 1, 3, 4, 7)
    assert not after.executes_graph
    inner = after.module.get_submodule("shape.0")
    assert isinstance(inner, Shaped)
    assert vars(inner.config) == {"hidden_size": 4, "pair_token_id": 2}
    assert isinstance(module, Configured)
    assert module.config.hidden_size == 8  # the source stays as it was


class Scaled(Free):
    """A number that only happens to be the hidden width."""

    factor: int

    def __init__(self) -> None:
        super().__init__()
        self.factor = 8

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * (self.factor / 8)


def test_a_number_that_is_no_size_stays() -> None:
    after = smaller(shaken(Scaled()), 1, 3, 4, 7)
    assert not after.executes_graph
    assert isinstance(after.module, Scaled)
    assert after.module.factor == 8
    assert after.module.up.out_features == 4


class Bare(nn.Module):
    """Products with parameters of its own: no attribute says a size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(6, 8))
        self.second = nn.Parameter(torch.zeros(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.first) @ self.second


def test_a_module_without_sizes(tmp_path: Path) -> None:
    module = shaken(Bare())
    kept: Kept = {"first": {1: at(0, 5, 6)}, "second": {0: at(0, 5, 6)}}
    carrier = TorchCarrier(module, VECTOR)
    after = carrier.with_channels(lowered_cut(module, VECTOR, kept, {}), kept)
    assert isinstance(after, TorchCarrier)
    assert not after.executes_graph
    after.save(tmp_path)
    restored = carrier.restore(tmp_path)
    assert isinstance(restored, TorchCarrier)
    assert restored.graph().graph.initializers["first"].shape == (6, 3)
    same(after, restored, ROWS)


def test_a_smaller_module_can_be_stored_as_codes(tmp_path: Path) -> None:
    scheme = Scheme(8, granularity="channel")

    def rounded(matrix: Tensor) -> QuantizedTensor:
        scale = matrix.abs().amax(1, keepdim=True) / 127
        codes = (matrix / scale).round().to(torch.int8)
        return QuantizedTensor(codes, scale, torch.zeros_like(codes[:, :1]), scheme)

    module = shaken(Free())
    after = smaller(module, 1, 3, 4, 7)
    layer = next(x for x in after.layers() if x.weight == "up.weight")
    coded = after.with_codes({layer.weight: WeightCodes(layer, scheme, rounded)})
    coded.save(tmp_path)
    restored = TorchCarrier(module, VECTOR).restore(tmp_path)
    for name, values in coded.runner().run(ROWS).items():
        np.testing.assert_array_equal(restored.runner().run(ROWS)[name], values)
    with pytest.raises(
        SpecError,
        match=r"removal of channels: weight 'up.weight' is stored as codes already; "
        "prune before quantizing",
    ):
        coded.with_channels(after.graph(), {})


def test_positions_and_graph_have_to_agree() -> None:
    module = shaken(Free())
    graph = free_graph(1, 7)
    with pytest.raises(ValueError, match=r"'up\.weight' is \[2, 6\] in the smaller .*\[3, 6\] by"):
        TorchCarrier(module, VECTOR).with_channels(graph, hidden_kept(1, 3, 7))


def test_a_graph_that_computes_something_else_is_executed() -> None:
    """What the graph says holds, even where the module would run."""
    module = shaken(Free())
    kept = hidden_kept(1, 3, 4, 7)
    graph = free_graph(1, 3, 4, 7).clone()
    (relu,) = [node for node in graph.graph if node.op_type == "Relu"]
    relu.op_type = "Abs"
    after = TorchCarrier(module, VECTOR).with_channels(graph, kept)
    assert isinstance(after, TorchCarrier)
    assert after.executes_graph
    same(after, after, ROWS)


def test_an_operator_that_only_onnx_runtime_has_leaves_the_graph_alone() -> None:
    module = shaken(Rigid())
    kept = hidden_kept(1, 3, 4, 7)
    graph = free_graph(1, 3, 4, 7).clone()
    (relu,) = [node for node in graph.graph if node.op_type == "Relu"]
    relu.op_type, relu.domain = "Normalizer", "ai.onnx.ml"
    graph.opset_imports["ai.onnx.ml"] = 1
    after = TorchCarrier(module, VECTOR).with_channels(graph, kept)
    assert isinstance(after, OnnxCarrier)
    assert after.runner().run(ROWS)["output"].shape == (5, 6)


def test_other_carriers() -> None:
    graph = free_graph(1, 3, 4, 7)
    assert OnnxCarrier(graph).with_channels(graph, {}).graph() is graph
