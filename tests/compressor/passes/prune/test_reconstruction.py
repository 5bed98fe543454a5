"""Layers that a removal changes, solved on calibration data to give what they gave."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from compressor.errors import DataError, ModelError
from compressor.graph.residuals import drop_blocks, residual_blocks
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.structured import reconstruction
from compressor.passes.prune.structured.structured import PruneStructured
from compressor.types.carrier import Carrier
from compressor.types.tensors import Array
from tests.compressor.passes.prune.structured_models import (
    CONTEXT,
    Given,
    Plain,
    Residual,
    carrier,
    data,
    declared,
    output,
    pruned,
    shapes,
)
from tests.compressor.passes.quantize.small_models import graph, noise

HALF = declared(target={"ratio": 0.5})
CUT = declared(target={"ratio": 0.5}, reconstruct=False)


@pytest.fixture(scope="module")
def residual() -> TorchCarrier:
    return carrier(Residual())


def lost(before: Carrier, after: Carrier, given: Given) -> float:
    """Return the squared error of the outputs, as a share of their variance."""
    wanted, have = (np.concatenate([output(m, b) for b in given.data]) for m in (before, after))
    return float(np.square(have - wanted).sum() / np.square(wanted - wanted.mean(0)).sum())


def cut_only(step: PruneStructured) -> PruneStructured:
    return step.model_copy(update={"reconstruct": False})


def fits(outcome) -> dict[str, tuple[float, float]]:
    return {
        x.name: x.details["reconstruction"] for x in outcome.layers if "reconstruction" in x.details
    }


def test_module_and_file_are_solved_alike_and_lose_less_than_what_is_cut(residual):
    given, unseen = data(6), data(3, seed=9)
    ours = pruned(HALF, residual, given)
    theirs = pruned(HALF, OnnxCarrier(residual.graph()), given)
    stored = theirs.carrier.tensors()
    for name, tensor in ours.carrier.tensors().items():
        if name in stored:
            assert torch.equal(tensor.read(), stored[name].read()), name
    solved = fits(ours)
    assert set(solved) == {"inner", "outer", "wide", "head"}
    assert all(after <= before for before, after in solved.values())
    cut = pruned(CUT, residual, given)
    assert shapes(cut.carrier) == shapes(ours.carrier)
    assert not fits(cut)
    assert lost(residual, ours.carrier, unseen) < 0.1 * lost(residual, cut.carrier, unseen)
    assert any(n.startswith("4 of 4 layers that a removal changes") for n in ours.notes)


def test_channels_that_others_can_replace_are_replaced():
    """Half of the hidden channels are half of the others: the outputs stay what they were."""
    module = Residual()
    model = carrier(module)
    with torch.no_grad():
        for tensor in (module.inner.weight, module.inner.bias, module.inner_norm.running_mean):
            tensor[6:] = tensor[:6]
        module.inner_norm.running_var[6:] = module.inner_norm.running_var[:6]
        for tensor in (module.inner_norm.weight, module.inner_norm.bias):
            tensor[6:] = 0.1 * tensor[:6]
        module.outer.weight[:, 6:] *= 0.1
    rules = [{"match": name, "skip": True} for name in ("stem", "wide")]
    step = declared(target={"ratio": 0.5}, layers=rules)
    outcome = pruned(step, model, data())
    stay = module.inner.weight[:6]
    assert torch.equal(outcome.carrier.tensors()["inner.weight"].read(), stay)
    assert lost(model, outcome.carrier, data(seed=5)) < 1e-5
    assert lost(model, pruned(cut_only(step), model, data()).carrier, data(seed=5)) > 1e-3


class Mixture(nn.Module):
    """Layers of all kinds that read channels: grouped, depthwise, 1-D, transposed, with one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv2d(8, 8, 1, bias=False)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.wider = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.line = nn.Conv1d(6, 4, 5, stride=2)
        self.single = nn.Conv1d(4, 1, 1)
        self.head = nn.Linear(1, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.depth(torch.relu(self.first(image))))
        x = torch.relu(self.grouped(torch.relu(self.point(x))))
        x = torch.relu(self.wider(x)).mean(2)
        return self.head(torch.relu(self.single(torch.relu(self.line(x)))).mean(2))


class Twins(nn.Module):
    """One backbone that is called twice, as in siamese networks."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.backbone(image).mean((2, 3)) - self.backbone(image.flip(3)).mean((2, 3))


def test_a_module_that_is_called_twice_is_to_be_pruned_alone() -> None:
    survey = HALF.survey(carrier(Twins()), replace(CONTEXT, shapes={"image": (8, 3, 10, 10)}))
    (note,) = [n for n in survey.notes if "is not solved" in n]
    assert note == (
        "where inputs of 'backbone.2' go, what remains is not solved: its weight is read at "
        "several places; if a module is called several times, as in siamese networks, compress it "
        "alone"
    )


def test_layers_of_all_kinds_are_solved_or_named():
    model = carrier(Mixture())
    survey = HALF.survey(model, replace(CONTEXT, shapes={"image": (8, 3, 10, 10)}))
    (note,) = [n for n in survey.notes if "is not solved" in n]
    assert note.startswith("where inputs of 'wider' go, what remains is not solved: ConvTranspose")
    assert survey.memory > 8 * 36**2
    outcome = pruned(HALF, model, data())
    assert set(fits(outcome)) == {"point", "grouped", "line", "single", "head"}
    assert all(after <= before for before, after in fits(outcome).values())
    assert np.isfinite(output(outcome.carrier, data().data[0])).all()


class Attention(nn.Module):
    """A transformer's block behind patches: heads, and a hidden layer, each added to a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(30, 16)
        self.norm = nn.LayerNorm(16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Linear(16, 16, bias=False)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.embed(image.permute(0, 2, 1, 3).flatten(2))
        y = self.norm(x)
        q, k, v = (
            f(y).unflatten(2, (4, 4)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        mixed = (q @ k.transpose(2, 3) / 2).softmax(3) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(x.mean(1))


def test_heads_and_hidden_widths_of_a_transformer_are_and_what_reads_them_are_solved():
    model = carrier(Attention())
    step = declared(target={"ratio": 0.5}, layers=[{"match": "embed", "skip": True}])
    given, unseen = data(8), data(3, seed=9)
    outcome = pruned(step, model, given)
    assert shapes(outcome.carrier)["query"] == (8, 16)
    assert set(fits(outcome)) == {"out", "up", "down", "head"}
    cut = pruned(cut_only(step), model, given)
    assert lost(model, outcome.carrier, unseen) < 0.3 * lost(model, cut.carrier, unseen)


def test_a_single_sample_is_judged_on_other_places(residual):
    """No second sample says how far a weight may move, but the other half of the first does."""
    batch = data(1).data[0]["image"][:1]
    given, unseen = Given(({"image": batch},)), data(3, seed=9)
    ours, cut = (pruned(step, residual, given) for step in (HALF, CUT))
    assert any("were solved on 1 calibration samples" in note for note in ours.notes)
    head = ours.carrier.tensors()["head.weight"].read()
    assert torch.equal(head, cut.carrier.tensors()["head.weight"].read()), "it reads one place"
    assert lost(residual, ours.carrier, unseen) < 0.1 * lost(residual, cut.carrier, unseen)


def test_fewer_samples_than_columns_and_dead_channels_do_no_harm(residual):
    module = Residual()
    model = TorchCarrier(module.eval(), carrier(module).inputs)
    with torch.no_grad():
        module.inner_norm.weight[::2] = 0.0
        module.inner_norm.bias[::2] = -1.0
    tiny = Given(({"image": data().data[0]["image"][:2]},))
    outcome = pruned(HALF, model, tiny)
    assert all(after <= before for before, after in fits(outcome).values())
    assert all(torch.isfinite(t.read()).all() for t in outcome.carrier.tensors().values())


def test_what_a_relu_cuts_off_does_not_count(monkeypatch):
    model, given, unseen = carrier(Plain()), data(16), data(4, seed=9)
    again = pruned(HALF, model, given)
    monkeypatch.setattr(reconstruction, "_ROUNDS", 0)
    once = pruned(HALF, model, given)
    assert lost(model, again.carrier, unseen) < 0.96 * lost(model, once.carrier, unseen)
    assert fits(again)["second"][1] < 0.9 * fits(once)["second"][1]


def test_what_is_kept_for_another_round_changes_nothing(monkeypatch):
    model, given = carrier(Plain()), data(6)
    runs: list[int] = []
    run = reconstruction._Walk._run

    def counted(walk, place, *rest):
        runs[-1] += place
        return run(walk, place, *rest)

    monkeypatch.setattr(reconstruction._Walk, "_run", counted)
    found = []
    for most in (1 << 30, 200_000, 0):  # all of it, some batches and then none, none
        monkeypatch.setattr(reconstruction, "HELD", most)
        runs.append(0)
        found.append(pruned(HALF, model, given))
    assert runs[0] < runs[1] == runs[2]
    for other in found[1:]:
        assert fits(other) == fits(found[0])
        np.testing.assert_array_equal(
            output(other.carrier, given.data[0]), output(found[0].carrier, given.data[0])
        )


class Chain(nn.Module):
    """Blocks that are added to a stream, the second of them with or without a ReLU behind it."""

    def __init__(self, *, rectified: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(12, 16, 1) for _ in range(4))
        self.down = nn.ModuleList(nn.Conv2d(16, 12, 1) for _ in range(4))
        self.head = nn.Linear(12, 4)
        self.rectified = rectified

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(image))
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
            x = torch.relu(x) if self.rectified else x
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("gone", [(1,), (1, 2), (3,)])
@pytest.mark.parametrize("rectified", [False, True])
def test_the_layer_before_a_dropped_block_makes_up_for_it(rectified, gone):
    model, given, unseen = carrier(Chain(rectified=rectified)), data(6), data(3, seed=9)
    graph = model.graph()
    dropped = [residual_blocks(graph)[i] for i in gone]
    smaller = drop_blocks(graph, dropped)
    cut = model.with_graph(smaller)
    found = {}
    for blocks in ([], dropped):
        graphs, batches = (graph, smaller), given.batches()
        after, solved = reconstruction.reconstructed(
            cut, graphs, {}, blocks, batches, required=True
        )
        found[len(blocks)] = lost(model, after, unseen)
    ahead = {f"down.{gone[0] - 1}", *(f"up.{i}" for i in range(4) if i > gone[-1]), "head"}
    assert ahead <= set(solved.fits)
    assert not any(name.endswith(".0") for name in solved.fits.keys() - {"down.0"})
    assert found[0] == lost(model, cut, unseen)
    assert found[len(dropped)] < 0.5 * found[0]


def test_values_that_are_not_finite_are_an_error():
    image: Array = data().data[0]["image"].copy()
    image[3] = np.inf
    good = data(1).data[0]
    given = Given((good, {"image": image}))
    with pytest.raises(DataError, match="is not finite on the calibration data"):
        pruned(HALF, carrier(Plain()), given)


def test_without_data_nothing_is_solved_and_the_plan_says_what_needs_them(residual):
    outcome = HALF.apply(residual, CONTEXT, {})
    assert not fits(outcome)
    assert not HALF.survey(residual, CONTEXT).memory
    assert declared(target={"ratio": 0.5}, reconstruct=True).replays == "to reconstruct layers"
    assert not HALF.replays
    assert HALF.replays_given


def test_sensitivity_is_the_scope_where_there_are_data(residual):
    step = declared(target={"macs": 0.6}, reconstruct=False)
    named = step.model_copy(update={"scope": "sensitivity"})
    with_data, said = (pruned(s, residual, data()).carrier for s in (step, named))
    assert shapes(with_data) == shapes(said)
    ranked = step.model_copy(update={"scope": "global"})
    assert shapes(pruned(step, residual).carrier) == shapes(pruned(ranked, residual).carrier)


def test_what_the_runtime_does_not_run_is_cut_unless_solving_was_asked_for(residual, monkeypatch):
    def refused(*_, **__):
        raise ModelError("the block", "has no kernel", "")

    monkeypatch.setattr(reconstruction, "runner_of", refused)
    outcome = pruned(HALF, residual, data(1))
    (note,) = [n for n in outcome.notes if "was solved" in n]
    assert note.endswith("was solved: the block has no kernel")
    with pytest.raises(ModelError, match="has no kernel"):
        pruned(HALF.model_copy(update={"reconstruct": True}), residual, data(1))


class Mixing(nn.Module):
    """A perceptron that mixes places, each of whose rows is a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.up, self.down = nn.Linear(25, 12), nn.Linear(12, 25)
        self.head = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image).flatten(2)  # [batch, channels, places]
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(x.mean(2))


def test_a_layer_whose_rows_are_channels_that_go_is_cut_only():
    """It gives fewer rows than it gave, which were compared one by one: a RuntimeError."""
    model = carrier(Mixing())
    outcome = pruned(HALF, model, data(4))
    found = shapes(outcome.carrier)
    assert found["stem"][0] < 8, found
    assert found["down"][1] < 12, found
    assert "head" in fits(outcome)
    assert "down" not in fits(outcome)


def test_what_is_added_may_be_an_input_that_only_later_blocks_read():
    network = graph(
        """g (float[N, 6] x) => (float[N, 6] y) {
            n = Tanh (x)
            a = MatMul (n, first.weight)
            b = Relu (a)
            c = MatMul (b, second.weight)
            d = Add (x, c)
            e = MatMul (d, third.weight)
            f = Relu (e)
            g = MatMul (f, fourth.weight)
            h = Add (n, g)
            i = MatMul (h, fifth.weight)
            y = Add (i, x)
        }""",
        {"first.weight": noise(6, 8), "second.weight": noise(8, 6), "third.weight": noise(6, 8)}
        | {"fourth.weight": noise(8, 6), "fifth.weight": noise(6, 6)},
    )
    outcome = pruned(HALF, network, Given([{"x": noise(32, 6, seed=7)}]))
    assert {"second", "fourth"} <= fits(outcome).keys()
