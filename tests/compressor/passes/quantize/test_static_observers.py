"""Observers in quantize-static and qat: with options of their own, and other packages'."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import Field, ValidationError
from torch import nn

from compressor.calibration.observers.ranges import RangeObserver
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.quantize.static.options import (
    ActivationOptions,
    StaticActivationOptions,
    StaticRule,
    range_observers,
)
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.train.qat.qat import Qat
from compressor.spec.schema import options_schema
from compressor.types.statistics import Range
from tests.compressor.passes.quantize.static_models import (
    IMAGE,
    ORT,
    Residual,
    data,
    outputs,
    quantized,
    shared,
    sqnr,
    statistics,
)
from tests.compressor.tiny_project import forget_catalog

Sums = tuple[float, int]


class Rms(RangeObserver[Sums]):
    """From ``-factor`` to ``factor`` root mean squares of the values."""

    name: ClassVar[str] = "rms"
    factor: float = Field(default=4.0, gt=0, description="half the range in root mean squares")

    def start(self) -> Sums:
        return 0.0, 0

    def update(self, state: Sums, values: torch.Tensor) -> Sums:
        return self.merge(state, (float(values.double().square().sum()), values.numel()))

    def merge(self, first: Sums, second: Sums) -> Sums:
        return first[0] + second[0], first[1] + second[1]

    def result(self, state: Sums) -> Range:
        reach = self.factor * (state[0] / state[1]) ** 0.5
        return self.spanning(-reach, reach)


@pytest.fixture
def rms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that adds two observers, one of which does not import."""
    info = tmp_path / "somebody_elses-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody-elses\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[compressor.observers]\nrms = {__name__}:Rms\nbroken = no_such_module:Observer\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    forget_catalog()
    yield
    forget_catalog()


EVERY = (StaticRule(match="*"),)


def options(observer: object) -> StaticActivationOptions:
    return StaticActivationOptions.model_validate({"observer": observer})


def scales(observer: object) -> dict[str, float]:
    """The scale of each activation that is quantized with an observer."""
    step = QuantizeStatic(activations=options(observer), layers=EVERY)
    graph = quantized(step, shared(Residual)).carrier.graph().graph
    found = {}
    for node in graph:
        if node.op_type == "QuantizeLinear":
            scale = node.inputs[1]
            assert scale is not None
            assert scale.const_value is not None
            found[scale.name or ""] = float(scale.const_value.numpy())
    return found


def test_an_observer_of_another_package_gives_the_ranges(rms: None):
    model = shared(Residual)
    step = QuantizeStatic(activations=options("rms"), layers=EVERY)
    assert {r.observer for r in step.survey(model, ORT).requests if "bits" in r.options} == {"rms"}
    batch = data(seed=7)[0]
    assert sqnr(outputs(model, batch), outputs(quantized(step, model).carrier, batch)) > 25


def test_its_own_options_stand_beside_its_name(rms: None):
    wide, narrow = scales({"name": "rms", "factor": 4.0}), scales({"name": "rms", "factor": 2.0})
    assert wide == scales("rms")
    assert wide == pytest.approx({name: 2 * scale for name, scale in narrow.items()})


def test_built_in_observers_take_their_options_too():
    chosen = options({"name": "moving-average", "constant": 0.5})
    step, model = QuantizeStatic(activations=chosen, layers=EVERY), shared(Residual)
    ranges = [r for r in step.survey(model, ORT).requests if "bits" in r.options]
    assert {r.options["constant"] for r in ranges} == {0.5}
    assert {r.key for r in ranges} <= statistics(step, model, ORT, data()).keys()
    assert chosen.model_dump()["observer"] == {"name": "moving-average", "constant": 0.5}
    assert options("mse").model_dump()["observer"] == "mse"


def test_qat_takes_it_as_well(rms: None):
    torch.manual_seed(0)
    model = TorchCarrier(nn.Sequential(nn.Conv2d(3, 4, 3)), [IMAGE])
    chosen = ActivationOptions.model_validate({"observer": {"name": "rms", "factor": 3.0}})
    step = Qat(epochs=1, activations=chosen)
    assert "QuantizeLinear" in {n.op_type for n in step.preview(model, ORT, {}).graph().graph}


@pytest.mark.parametrize(
    ("observer", "message"),
    [
        ("entropie", "did you mean 'entropy'"),
        ("rsm", "did you mean 'rms'"),
        ("second-moment", "there is: auto, entropy, extreme-value"),
        ({"name": "rms", "factr": 3.0}, "factr is not an option of rms: did you mean 'factor'"),
        ({"name": "rms", "factor": 0.0}, "factor: Input should be greater than 0"),
        ({"name": "rms", "bits": 4}, "bits is set by the pass"),
        ({"factor": 3.0}, "Field required"),
    ],
)
def test_what_is_no_observer_of_ranges_is_refused(rms: None, observer: Any, message: str):
    with pytest.raises(ValidationError, match=message):
        options(observer)


def test_the_schema_lists_the_observers_of_ranges(rms: None):
    built_in = ["min-max", "moving-average", "percentile", "entropy", "mse", "extreme-value"]
    assert range_observers() == [*built_in, "rms"]
    text, mapping = options_schema(ActivationOptions)["properties"]["observer"]["anyOf"]
    assert text == {"type": "string", "enum": [*built_in, "rms"]}
    named = options_schema(ActivationOptions)["$defs"][mapping["$ref"].rpartition("/")[2]]
    assert named["properties"]["name"]["enum"] == [*built_in, "rms"]
