"""`observer: auto` of quantize-static: which ranges are chosen, by what, and what is said of it."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compressor.calibration.collect import collect_statistics
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static import observing
from compressor.passes.quantize.static.observing import MOST_SAMPLES, best, exceeding, spread
from compressor.passes.quantize.static.options import CANDIDATES, StaticActivationOptions
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.train.qat.qat import Qat
from compressor.types.carrier import Carrier
from compressor.types.passes import Outcome
from compressor.types.statistics import Request
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


@cache
def network(times: float = 1.0, spec: TensorSpec = ROW) -> Carrier:
    torch.manual_seed(0)
    return Fuse().apply(TorchCarrier(Two(times), [spec]), ORT, {}).carrier


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

    def collect(
        carrier: Carrier, requests: list[Request], some: Iterable[Batch] | None = None
    ) -> dict[str, object]:
        return collect_statistics(carrier, batches if some is None else some, requests)

    context = replace(ORT, samples=Given(batches), collect=collect)
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


def test_outputs_count_alike_whatever_their_size():
    batches = rare()
    notes = [applied(network(times), batches).notes for times in (1.0, 1024.0)]
    assert notes[0] == notes[1]


def test_batches_of_a_fixed_size_and_whole_feeds_are_run_as_they_are():
    fixed = network(spec=TensorSpec("x", (8, 16), "float32"))
    assert "on 64 calibration samples" in applied(fixed, rare()).notes[-1]
    feeds: list[Batch] = [Feed(batch) for batch in rare()]
    assert applied(network(), feeds).notes[-1].startswith("observer ")


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


@pytest.mark.parametrize(("samples", "ranged"), [(16, 12), (15, 0)])
def test_few_samples_are_held_back_from_ranges_that_later_ones_would_exceed(
    samples: int, ranged: int
):
    """But not fewer than four: then ranges of all samples are judged."""
    model, batches = network(), rare(samples=samples)
    step = QuantizeStatic.model_validate(EVERY)
    given_ranges, others = statistics(step, model, ORT, batches), list[float]()

    def collect(
        carrier: Carrier, requests: list[Request], some: Iterable[Batch] | None = None
    ) -> dict[str, object]:
        assert some is not None
        rest = list(some)
        others.extend(float(x) for batch in rest for x in batch["x"][:, 0])
        return collect_statistics(carrier, rest, requests)

    context = replace(ORT, samples=Given(batches), collect=collect)
    notes = step.apply(model, context, given_ranges).notes
    assert len(others) == ranged
    assert max(others, default=0) < 5 < batches[0]["x"].max()
    assert notes[-1].startswith("observer ")
    assert f"on {samples} calibration samples" in notes[-1]


@pytest.mark.parametrize(
    ("limit", "most", "samples"), [("_MOST_MACS", 1.0, 16), ("_MOST_BYTES", 640, 8)]
)
def test_the_work_and_the_memory_are_bounded(
    limit: str, most: float, samples: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(observing, limit, most)
    assert f"on {samples} calibration samples" in applied(network(), rare()).notes[-1]


@given(st.integers(1, 5), st.integers(2, 9), st.integers(1, 3))
def test_the_first_of_equal_errors_stays(observers: int, samples: int, outputs: int):
    one = np.random.default_rng(samples).random((1, samples, outputs))
    assert best(np.repeat(one, observers, 0)) == (0, 0.0)


def test_a_gain_that_hangs_on_one_sample_is_none():
    errors = np.ones((3, 10, 1))
    errors[1, :, 0] = 1.1
    errors[1, 0, 0] = 0.0  # 1.0 less in one sample, 0.1 more in the others: -0.9 + 1.0
    assert best(errors)[0] == 0
    errors[2, :, 0] = 0.5
    assert best(errors) == (2, pytest.approx(10 * np.log10(2)))


def test_outputs_without_a_number_do_not_count():
    errors = np.ones((2, 4, 2))
    errors[1] = 0.5
    errors[0, 0, 1] = np.nan
    assert best(errors) == (1, pytest.approx(10 * np.log10(2)))
    assert best(errors[:, :, 1:]) == (0, 0.0)


@given(st.integers(1, 300), st.integers(1, 70))
def test_samples_are_spread_over_the_data(count: int, size: int):
    values = np.arange(count)
    batches = [{"x": values[i : i + size]} for i in range(0, count, size)]
    kept, seen = spread(batches, whole=False)
    places = [int(sample["x"][0]) for sample in kept]
    assert seen == count
    assert min(count, MOST_SAMPLES // 2) <= len(places) <= MOST_SAMPLES
    assert places == list(range(0, count, places[1] if len(places) > 1 else count))


def test_the_more_samples_the_less_is_exceeded():
    assert exceeding(1, 1) == pytest.approx(0.5)
    assert exceeding(50, 50) > 0.5 > exceeding(50, 500) > exceeding(10, 500)
    assert exceeding(0, 3) == 0.0
