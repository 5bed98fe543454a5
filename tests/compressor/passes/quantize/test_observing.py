"""`observer: auto` of quantize-static: which ranges are chosen, by what, and what is said of it."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static import judging, observing, replayed
from compressor.passes.quantize.static.options import CANDIDATES, StaticActivationOptions
from compressor.passes.quantize.static.replayed import MOST_SAMPLES, spread
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.train.qat.qat import Qat
from compressor.run.evaluate import CachingRunner
from compressor.types.carrier import Carrier, Runner
from compressor.types.passes import Outcome
from compressor.types.tensors import Batch, Feed, TensorSpec
from tests.compressor.passes.quantize.static_models import ORT, Given, statistics

ROW = TensorSpec("x", ("batch", 16), "float32")
EVERY = {"layers": ({"match": "*"},), "prepare": "none", "first_last": "same"}


class Two(nn.Module):
    """Two outputs, the second some times as large as the first."""

    def __init__(self, times: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 8)
        self.times = times

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.first(x))
        return hidden.sum(1, keepdim=True), self.second(hidden) * self.times


class Joined(Two):
    """The same in one output, as detectors join boxes and scores."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = torch.relu(self.first(x))
        return torch.cat([hidden.clamp(0.1, 1.0), self.second(hidden) * self.times], 1)


@cache
def network(times: float = 1.0, spec: TensorSpec = ROW, kind: type[Two] = Two) -> Carrier:
    torch.manual_seed(0)
    return Fuse().apply(TorchCarrier(kind(times), [spec]), ORT, {}).carrier


def rare(samples: int = 64, every: int = 8, size: float = 30.0) -> list[Batch]:
    """Normal values, and in one of some samples a large one, which makes most of the outputs."""
    random = np.random.default_rng(0)
    values = random.standard_normal((samples, 16)).astype(np.float32)
    values[::every, 0] = size
    return [{"x": part} for part in np.array_split(values, max(1, samples // 8))]


def applied(
    model: Carrier, batches: list[Batch], observer: str | None = None, bits: int = 8
) -> Outcome:
    options: dict[str, object] = {"bits": bits}
    if observer is not None:
        options["observer"] = observer
    step = QuantizeStatic.model_validate({"activations": options, **EVERY})

    context = replace(ORT, samples=Given(batches))
    return step.apply(model, context, statistics(step, model, ORT, batches))


def content(outcome: Outcome) -> bytes:
    return ir.to_proto(outcome.carrier.graph()).SerializeToString(deterministic=True)


def error(model: Carrier, outcome: Outcome, batches: list[Batch]) -> float:
    """The mean over outputs of the squared error over the signal, in dB."""
    runner, other = model.runner(), outcome.carrier.runner()
    pairs = [
        (np.asarray(a, np.float64), b)
        for batch in batches
        for a, b in zip(runner.run(batch).values(), other.run(batch).values(), strict=True)
    ]
    sums = [
        sum(np.square(a - b).sum() for a, b in pairs[i::2])
        / sum(np.square(a).sum() for a, _ in pairs[i::2])
        for i in range(2)
    ]
    return float(10 * np.log10(sums).mean())


@pytest.mark.parametrize("bits", [8, 4])
def test_the_observer_with_the_least_error_of_outputs_is_chosen(bits: int):
    model, batches = network(), rare()
    each = {name: applied(model, batches, name, bits) for name in CANDIDATES}
    errors = {name: error(model, outcome, batches) for name, outcome in each.items()}
    chosen = applied(model, batches, bits=bits)
    names = [name for name, outcome in each.items() if content(outcome) == content(chosen)]
    assert min(errors.values()) == pytest.approx(min(errors[name] for name in names), abs=0.3)
    assert chosen.notes[-1].startswith(f"observer {names[0]}: on 64 calibration samples")


class Alarm(nn.Module):
    """An output that the first input alone decides once it is large."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 8)
        nn.init.normal_(self.last.weight, std=0.1)
        with torch.no_grad():
            self.last.weight[:, 0] = 30.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


def test_what_is_rare_and_decides_is_not_clipped():
    torch.manual_seed(0)
    spec = TensorSpec("x", ("batch", 64), "float32")
    model = Fuse().apply(TorchCarrier(Alarm(), [spec]), ORT, {}).carrier
    values = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    values[::32, 0] = 12.0  # two of 4,096: for their sake mse makes no step of the others coarser
    chosen = applied(model, [{"x": values}], bits=4)
    assert content(chosen) == content(applied(model, [{"x": values}], "min-max", bits=4))
    assert chosen.notes[-1].startswith("observer min-max: on 64 calibration samples, the outputs'")
    assert chosen.notes[-1].endswith("dB less than with mse")


class Gated(nn.Module):
    """A sum behind a layer, with a ReLU that only a layer of floats reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(x + self.first(x)))


def test_a_gate_that_stays_a_float_is_looked_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replayed, "_RARELY", 0.0)  # samples are held back
    torch.manual_seed(0)
    spec = TensorSpec("x", ("batch", 4, 6, 6), "float32")
    model = Fuse().apply(TorchCarrier(Gated(), [spec]), ORT, {}).carrier
    values = np.random.default_rng(0).standard_normal((64, 4, 6, 6)).astype(np.float32)
    rules = {**EVERY, "layers": ({"match": "last", "skip": True}, {"match": "*"})}
    step = QuantizeStatic.model_validate(rules)
    batches: list[Batch] = [{"x": values}]
    found = statistics(step, model, ORT, batches)
    gates = {key for key in found if ">0]" in key}
    outcome = step.apply(model, replace(ORT, samples=Given(batches)), found)
    assert gates
    assert outcome.notes[-1].startswith("observer ")


def test_the_same_twice():
    model, batches = network(), rare()
    assert content(applied(model, batches)) == content(applied(model, batches))


def test_without_samples_it_is_the_first():
    model, batches = network(), rare()
    step = QuantizeStatic.model_validate(EVERY)
    plain = step.apply(model, ORT, statistics(step, model, ORT, batches))
    assert content(plain) == content(applied(model, batches, CANDIDATES[0]))
    assert plain.notes == ()


def test_one_sample_chooses_nothing():
    model, batches = network(), rare(samples=1)
    chosen = applied(model, batches)
    assert content(chosen) == content(applied(model, batches, CANDIDATES[0]))
    assert all("1 calibration sample," in note for note in chosen.notes)


@pytest.mark.parametrize("kind", [Two, Joined])
def test_outputs_and_their_parts_count_alike_whatever_their_size(kind: type[Two]):
    batches = normal(64)
    notes = [applied(network(times, kind=kind), batches).notes for times in (1.0, 1024.0)]
    assert notes[0] == notes[1]


def test_batches_of_a_fixed_size_and_whole_feeds_are_run_as_they_are():
    fixed = network(spec=TensorSpec("x", (8, 16), "float32"))
    assert "on 64 calibration samples" in applied(fixed, rare()).notes[-1]
    feeds: list[Batch] = [Feed(batch) for batch in rare()]
    assert applied(network(), feeds).notes[-1].startswith("observer ")
    some: list[Batch] = [Feed(normal(rows)[0]) for rows in range(1, 17)]  # a quarter is held back
    assert "on 16 calibration samples" in applied(network(), some).notes[-1]


@pytest.mark.parametrize("kind", [dict, Feed])
def test_a_single_sample_scales_channels(kind: type[Batch]):
    torch.manual_seed(0)
    uneven = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    with torch.no_grad():
        uneven[0].weight[::4] *= 100.0
    model = Fuse().apply(TorchCarrier(uneven, [ROW]), ORT, {}).carrier
    step = QuantizeStatic.model_validate({"layers": ({"match": "*"},)})
    batches: list[Batch] = [kind(normal(1)[0])]
    context = replace(ORT, samples=Given(batches))
    outcome = step.apply(model, context, statistics(step, model, ORT, batches))
    assert any("equalized_db" in layer.details for layer in outcome.layers)


def test_the_plan_says_what_it_chooses_from():
    step = QuantizeStatic.model_validate(EVERY)
    survey = step.survey(network(), ORT)
    assert any(note.startswith("observer auto: mse, min-max") for note in survey.notes)
    assert {r.observer for r in survey.requests if "bits" in r.options} == set(CANDIDATES)
    assert step.replays == "to choose the observer"
    given_one = QuantizeStatic.model_validate({"activations": {"observer": "mse"}, **EVERY})
    assert not any("observer" in note for note in given_one.survey(network(), ORT).notes)
    assert given_one.replays == ""


def test_qat_has_no_auto():
    assert StaticActivationOptions().observer == "auto"
    assert Qat(epochs=1).activations.observer == "mse"
    with pytest.raises(ValueError, match=r"activations.observer"):
        Qat.model_validate({"epochs": 1, "activations": {"observer": "auto"}})
    with pytest.raises(ValueError, match="did you mean 'auto'"):
        StaticActivationOptions.model_validate({"observer": "aut"})


def normal(samples: int) -> list[Batch]:
    random = np.random.default_rng(0)
    return [{"x": random.standard_normal((samples, 16)).astype(np.float32)}]


@pytest.mark.parametrize(("samples", "chosen"), [(16, "extreme-value"), (15, "min-max")])
def test_few_samples_are_held_back_from_ranges_that_later_ones_would_exceed(
    samples: int, chosen: str
):
    """But not fewer than four: then ranges of all samples are judged."""
    note = applied(network(), normal(samples)).notes[-1]
    assert note.startswith(f"observer {chosen}: on {samples} calibration samples")


@pytest.mark.parametrize(("heavy", "chosen"), [(0.0, "mse"), (1.0, "extreme-value")])
def test_where_tails_are_heavy_the_greater_half_is_judged_by_the_ranges_of_the_lesser(
    heavy: float, chosen: str, monkeypatch: pytest.MonkeyPatch
):
    batches = normal(16)
    batches[0]["x"][:, 0] = np.linspace(2, 8, 16)
    monkeypatch.setattr(observing, "heavy_tails", lambda peaks: heavy * (peaks.shape == (16, 2)))
    assert applied(network(), batches).notes[-1].startswith(f"observer {chosen}: ")


@pytest.mark.parametrize(("heavy", "chosen", "gain"), [(0.1, 1, 0.7), (0.5, 0, None)])
def test_kinds_of_samples_count_by_their_shares_whatever_their_number(
    heavy: float, chosen: int, gain: float | None, monkeypatch: pytest.MonkeyPatch
):
    """Half the error on any samples, four times it on the greatest: 0.85 in all, or 2.25.

    Others, which are worse by less than a decibel, are dropped once both kinds were seen.
    """
    runs = list[tuple[int, int]]()

    def errors(_: Any, __: Any, codes: Any, batches: Any) -> Any:
        count = sum(len(batch["x"]) for batch in batches)
        runs.append((count, len(codes)))
        each = np.full((len(codes), count, 1), 1.2)
        each[0] = 1.0
        each[1:2] = 0.5 if count == 4 else 4.0  # a quarter of 16 samples, or of the greater 8
        return each, np.ones((count, 1))

    monkeypatch.setattr(observing, "heavy_tails", lambda _: heavy)
    monkeypatch.setattr(observing, "output_errors", errors)
    note = applied(network(), normal(16)).notes[-1]
    assert [count for count, _ in runs[:2]] == [4, 2]
    assert runs[0][1] == runs[1][1] > runs[2][1]
    assert note.startswith(f"observer {CANDIDATES[chosen]}: ")
    assert gain is None or f"is {gain} dB less" in note


@pytest.mark.parametrize(("heavy", "macs"), [(0.0, 16e9), (1.0, 16e9), (0.5, 1.0)])
def test_the_float_model_is_closed_before_samples_are_judged(
    heavy: float, macs: float, monkeypatch: pytest.MonkeyPatch
):
    """What it gave is remembered as far as memory is given, and is the same where it is not."""
    opened = list[int]()

    class Watched(CachingRunner):
        def __init__(self, opener: Callable[[], Runner], most: int):
            super().__init__(lambda: (opened.append(most), opener())[1], most)

    monkeypatch.setattr(replayed, "CachingRunner", Watched)
    monkeypatch.setattr(observing, "heavy_tails", lambda _: heavy)
    monkeypatch.setattr(replayed, "_MOST_MACS", macs)
    first = applied(network(), normal(16))
    assert not opened
    monkeypatch.setattr(replayed, "_MOST_OUTPUTS", 0)
    again = applied(network(), normal(16))
    assert opened == [0]
    assert (content(again), again.notes) == (content(first), first.notes)


def test_samples_that_take_long_are_run_once_each(monkeypatch: pytest.MonkeyPatch):
    """What is known of each is kept, as far as memory is given; the choice is the same without."""
    runs = list[int]()

    class Counted:
        def __init__(self, runner: Runner):
            self._runner = runner

        def run(self, batch: Batch) -> Batch:
            runs.append(len(batch["x"]))
            return self._runner.run(batch)

    opened = replayed.Replayed.__dict__["runner"].func
    counted = cached_property(lambda samples: Counted(opened(samples)))
    counted.__set_name__(replayed.Replayed, "runner")
    monkeypatch.setattr(replayed.Replayed, "runner", counted)
    monkeypatch.setattr(observing, "heavy_tails", lambda _: 0.5)
    monkeypatch.setattr(replayed, "_MOST_MACS", 1.0)
    first = applied(network(), normal(16))
    assert runs == [1] * 16
    monkeypatch.setattr(replayed, "_HISTOGRAM", 1 << 40)
    again = applied(network(), normal(16))
    assert len(runs) > 32
    assert (content(again), again.notes) == (content(first), first.notes)


def test_what_is_known_of_no_other_sample_does_not_stop_the_choice():
    """Behind a gate that opens for a single sample, the others show nothing."""
    batches = normal(16)
    batches[0]["x"][1:] = 0.0
    assert "on 16 calibration samples" in applied(network(), batches).notes[-1]


def test_what_was_dropped_is_run_no_more(monkeypatch: pytest.MonkeyPatch):
    runs = list[int]()
    measured = observing.output_errors

    def counted(*given: Any) -> Any:
        runs.append(len(given[2]))
        return measured(*given)

    monkeypatch.setattr(observing, "output_errors", counted)
    every = applied(network(), rare(every=2)).notes
    assert runs[0] > runs[-1]
    for name, never in {"_CLEARLY": 1000.0, "_STEADILY": 1000.0, "_WORTH": -1000.0}.items():
        monkeypatch.setattr(judging, name, never)
    assert applied(network(), rare(every=2)).notes == every
    assert runs[-4:] == [runs[0]] * 4


@pytest.mark.parametrize(
    ("limit", "most", "samples"), [("_MOST_MACS", 1.0, 8), ("_MOST_BYTES", 640, 8)]
)
def test_the_work_and_the_memory_are_bounded(
    limit: str, most: float, samples: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replayed, limit, most)
    assert f"on {samples} calibration samples" in applied(network(), rare()).notes[-1]


@given(st.integers(1, 300), st.integers(1, 70))
def test_samples_are_spread_over_the_data(count: int, size: int):
    values = np.arange(count)
    batches = [{"x": values[i : i + size]} for i in range(0, count, size)]
    kept, seen = spread(batches, whole=False)
    places = [int(sample["x"][0]) for sample in kept]
    assert seen == count
    assert min(count, MOST_SAMPLES // 2) <= len(places) <= MOST_SAMPLES
    assert places == list(range(0, count, places[1] if len(places) > 1 else count))
