"""``early-exit`` as a pass: what it trains, promises, resumes, says and refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compressor.errors import CompressorError, SpecError
from compressor.graph.costs import macs
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.smaller_module import trainable_graph
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.train.early_exit import early_exit
from compressor.passes.train.early_exit.early_exit import EarlyExit
from compressor.passes.train.early_exit.heads import (
    FrozenTrunk,
    initial_parameters,
    with_heads,
)
from compressor.passes.train.early_exit.points import Batches, Exit, find_answer, find_points
from compressor.types.carrier import Capability, Carrier
from compressor.types.passes import Outcome, PassContext
from compressor.types.tensors import Array, Batch, TensorSpec
from tests.compressor.passes.quantize.static_models import ORT, statistics
from tests.compressor.passes.train.early_exit_graphs import Builder, residual_network
from tests.compressor.passes.train.small_training import SmallData, training
from tests.compressor.passes.train.test_finetune import Killed, ending_at

CONTEXT = PassContext(seed=3, metric="accuracy")
INPUTS = (TensorSpec("x", ("batch", 2, 6, 6), "float32"),)
EXITS = ({"after": "block1"}, {"after": "block2", "head": "norm-linear"})


class Net(nn.Module):
    """Two residual blocks and a head; sizes that take milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.block2 = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.block3 = nn.Conv2d(6, 6, 3, padding=1)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 2, 6, 6]`` to logits."""
        x = self.block1(x)
        x = torch.relu(x + self.block2(x))
        x = torch.relu(x + self.block3(x))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


@cache
def trained_network() -> TorchCarrier:
    """Return a network that knows its data."""
    torch.manual_seed(1)
    net, data = Net(), SmallData(200, noisy=False)
    optimizer = torch.optim.AdamW(net.parameters(), 0.02)
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch's own has no types
        optimizer.step()
    return TorchCarrier(net, INPUTS)


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_exit, "_SECONDS", 0.05)


@dataclass(frozen=True)
class Calibration:
    """Images that heads are not trained on."""

    count: int = 120
    made_up: bool = False

    @property
    def images(self) -> Array:
        """All of them."""
        return np.random.default_rng(8).normal(size=(self.count, 2, 6, 6)).astype(np.float32)

    def probe(self, count: int) -> Batch:
        """Return the first ones."""
        return {"x": self.images[:count]}

    def batches(self) -> Iterator[Batch]:
        """Yield all, 32 at a time."""
        for start in range(0, self.count, 32):
            yield {"x": self.images[start : start + 32]}


def applied(folder: Path, carrier: Carrier | None = None, **options: Any) -> Outcome:
    """Give the small network exits."""
    start = carrier or trained_network()
    kept = {k: options.pop(k) for k in ("data", "stage") if k in options}
    samples = options.pop("samples", Calibration())
    given = replace(
        training(folder, start, **kept),  # type: ignore[arg-type]  # any carrier will do
        samples=samples,
    )
    settings = {"exits": EXITS, "agreement": 90.0, "steps": 30, "learning_rate": 0.02, **options}
    return EarlyExit.model_validate(settings).apply_training(start, CONTEXT, {}, given)


def weights(carrier: Carrier) -> dict[str, Array]:
    held = carrier.graph().graph.initializers
    return {n: v.const_value.numpy() for n, v in held.items() if v.const_value is not None}


def outputs(carrier: Carrier) -> Array:
    (found,) = carrier.runner().run({"x": Calibration().images}).values()
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return what the pass makes of the network."""
    return applied(tmp_path_factory.mktemp("plain"))


def test_the_wanted_share_of_answers_is_the_full_networks(plain: Outcome) -> None:
    full, early = outputs(trained_network()), outputs(plain.carrier)
    same = full.argmax(1) == early.argmax(1)
    assert 90.0 <= 100 * same.mean() < 100
    assert not np.array_equal(full, early)


@pytest.mark.parametrize("confidence", ["entropy", "margin"])
def test_other_confidences_keep_to_the_agreement(tmp_path: Path, confidence: str) -> None:
    early = applied(tmp_path, confidence=confidence, agreement=95.0).carrier
    same = outputs(trained_network()).argmax(1) == outputs(early).argmax(1)
    assert 100 * same.mean() >= 95.0


def test_notes_and_layers_say_who_leaves_where(plain: Outcome) -> None:
    text = "\n".join(plain.notes)
    assert "loss " in text
    assert "of 120 calibration samples leave at exit " in text
    assert "get the full network's answer, 90 % are required" in text
    assert "million multiply-accumulates on average" in text
    assert "mean latency at batch 1 in ONNX Runtime, over " in text
    facts = [layer.details for layer in plain.layers]
    assert all(0 < f["threshold"] <= 1 and f["leave"] > 0 for f in facts)
    left = 100 - sum(f["leave"] for f in facts)
    assert f"{left:.1f} % go all the way" in text


def test_only_heads_are_trained(plain: Outcome) -> None:
    before, after = weights(trained_network()), weights(plain.carrier)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)
    assert any(name.startswith("exit1.") for name in after)


def test_the_networks_statistics_stay_while_heads_are_trained() -> None:
    start = trained_network()
    inner = trainable_graph(start.graph(), nn.Module(), ["fc.weight"])
    module = FrozenTrunk(inner, ["x"], ["output"])
    images = torch.from_numpy(Calibration().images)
    before = module.eval()(x=images)["output"]
    module.train()
    assert torch.equal(module(x=images)["output"], before)
    assert before.requires_grad
    np.testing.assert_allclose(before.detach().numpy(), outputs(start), atol=1e-5)


def test_training_makes_more_leave(plain: Outcome, tmp_path: Path) -> None:
    untrained = applied(tmp_path, steps=1, learning_rate=1e-9)
    shares = [sum(x.details["leave"] for x in o.layers) for o in (untrained, plain)]
    assert shares[1] > shares[0] + 10


def test_the_network_can_be_trained_with_its_heads(tmp_path: Path) -> None:
    outcome = applied(tmp_path, train="all", layers=({"match": "fc", "skip": True},))
    before, after = weights(trained_network()), weights(outcome.carrier)
    changed = {n for n in before if n in after and not np.array_equal(before[n], after[n])}
    assert {"block1.0.weight", "block1.1.running_mean", "block3.weight"} <= changed
    assert "fc.weight" not in changed


@pytest.mark.parametrize(
    ("train", "how"),
    [
        ("all", "killed"),
        ("heads", "interrupted"),
        pytest.param("heads", "killed", marks=pytest.mark.slow),
        pytest.param("all", "interrupted", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_training_ends_in_the_same_bytes(
    tmp_path: Path, train: str, how: str
) -> None:
    options: dict[str, Any] = {"steps": 9, "train": train, "save_every": 4, "agreement": 80.0}
    whole = applied(tmp_path / "whole", **options)
    with pytest.raises(Killed if how == "killed" else KeyboardInterrupt):
        applied(tmp_path / "broken", **options, stage=ending_at(6, how))
    resumed = applied(tmp_path / "broken", **options)
    saved = 4 if how == "killed" else 6
    assert f"resumed from the state saved after step {saved}" in resumed.notes
    for folder, outcome in (("a", whole), ("b", resumed)):
        (tmp_path / folder).mkdir()
        outcome.carrier.save(tmp_path / folder)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_graphs_without_a_module_get_exits_too(tmp_path: Path) -> None:
    exits = ({"after": "b1"}, {"after": "b2"})
    outcome = applied(tmp_path, residual_network(1), exits=exits, agreement=70.0)
    assert isinstance(outcome.carrier, OnnxCarrier)
    chosen = EarlyExit.model_validate({"exits": exits, "train": "all"})
    assert Capability.TRAIN in chosen.required - residual_network(1).offers


def test_heads_read_the_codes_that_a_pooling_reads() -> None:
    """An exit between a quantized layer and its pooling was refused, with advice about cast."""
    torch.manual_seed(2)
    first, second, third = (
        nn.Conv2d(2, 16, 3, padding=1),
        nn.Conv2d(16, 32, 3),
        nn.Conv2d(32, 32, 2),
    )
    layers = [first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2), third]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 3))
    carrier = Fuse().apply(TorchCarrier(net, INPUTS), CONTEXT, {}).carrier
    declared = QuantizeStatic.model_validate({"layers": ({"match": "*"},)})
    found = statistics(declared, carrier, ORT, list(Calibration().batches()))
    quantized = declared.apply(carrier, ORT, found).carrier
    answers = []
    for model in (carrier.graph(), quantized.graph()):
        batches = Batches(model)
        answer = find_answer(model, batches)
        points = find_points(model, [Exit(after="2")], batches, answer)
        start = initial_parameters(points[0], 3, seed=0)
        headed = with_heads(model, points, answer, [start])
        runner = carrier.with_graph(headed.model).runner()
        answers.append(list(runner.run(Calibration().probe(50)).values())[-1])
        codes = {n.outputs[0].name for n in model.graph if n.op_type == "QuantizeLinear"}
    assert points[0].value in codes
    exact, ours = answers
    assert np.square(exact - ours).sum() < 1e-3 * np.square(exact).sum()


def test_the_plan_knows_the_model_as_it_is_at_most(plain: Outcome) -> None:
    chosen = EarlyExit.model_validate({"exits": EXITS})
    start = trained_network()
    survey = chosen.survey(start, CONTEXT)
    assert chosen.labelled
    assert chosen.replays
    assert chosen.estimated  # an exit that no sample takes is left out
    actions = {row.name: row.action for row in survey.layers}
    assert actions["block1.0"] == "exit 1 follows, head 54 x 3"  # 6 channels, 3 by 3 parts
    assert actions["fc"] == "keep"
    planned = chosen.preview(start, CONTEXT, {})
    names = [layer.name for layer in planned.layers()]
    assert [n for n in names if not n.startswith("exit")] == [x.name for x in start.layers()]
    assert macs(planned.graph()) >= macs(plain.carrier.graph()) > macs(start.graph())
    assert not EarlyExit.model_validate({"exits": EXITS, "alpha": 0.0}).labelled


def test_nobody_leaving_is_an_error_that_says_what_would_help(tmp_path: Path) -> None:
    class Contrary(SmallData):
        """Labels that have nothing to do with the images, for a head that learns them alone."""

        def batch(self, rows: Any, seed: Any) -> Batch:
            """Return other labels."""
            found = dict(super().batch(rows, seed))
            return {**found, "label": (found["label"] + 1) % 3}

    with pytest.raises(CompressorError) as caught:
        applied(tmp_path, data=Contrary(), alpha=1.0, agreement=100.0)
    assert "lets none of 120 calibration samples leave early with agreement 100" in str(
        caught.value
    )
    assert "train longer" in str(caught.value)


def several_outputs() -> OnnxCarrier:
    model = residual_network(1).graph().clone()
    model.graph.outputs.append(next(iter(model.graph)).outputs[0])
    return OnnxCarrier(model)


def pictures() -> OnnxCarrier:
    made = Builder(0)
    made.add("Relu", [made.conv("x", "b1", 2, 2)], "y")
    return made.carrier({"x": ["batch", 2, 6, 6]}, made.conv("y", "b2", 2, 2), rank=4)


def fixed_batch() -> TorchCarrier:
    return TorchCarrier(Net(), (TensorSpec("x", (4, 2, 6, 6), "float32"),))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exits": ()}, "at least 1 item"),
        ({"agreement": 101.0}, "less than or equal to 100"),
        ({"agreement": 0.0}, "greater than 0"),
        (
            {"exits": ({"after": "blok1"},)},
            "is 'blok1', which is not a layer; did you mean 'block1'",
        ),
        ({"exits": EXITS[::-1]}, "list exits in the order of execution"),
        ({"exits": (EXITS[0], EXITS[0])}, "name each place once"),
        ({"layers": ({"match": "fc", "skip": True},)}, "layers needs train: all"),
        ({"prune": {"target": 0.5}}, "prune needs train: all"),
        ({"loss": "hinge"}, "set cross-entropy"),
        ({"carrier": several_outputs, "exits": ({"after": "b1"},)}, "classifier with one output"),
        ({"carrier": pictures, "exits": ({"after": "b1"},)}, "classifier with one output"),
        ({"carrier": fixed_batch}, "takes 4 samples at a time"),
    ],
)
def test_what_cannot_have_exits_is_refused_when_it_is_planned(
    options: Mapping[str, Any], message: str
) -> None:
    given = dict(options)
    carrier = given.pop("carrier", trained_network)()
    with pytest.raises((ValueError, SpecError), match=message):
        EarlyExit.model_validate({"exits": EXITS, **given}).survey(carrier, CONTEXT)


def test_thresholds_need_calibration_data(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no calibration data; add data\.calibration"):
        applied(tmp_path, samples=Calibration(made_up=True))
    with pytest.raises(CompressorError, match="has no samples"):
        applied(tmp_path, samples=Calibration(count=0))
