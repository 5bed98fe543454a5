"""Layers are rounded on several threads: codes, outcomes and errors are those of one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compressor.models.threads import on_threads
from compressor.passes.quantize.static.rounding import FloatWeight, round_weights
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.layers import Layer, QuantizedTensor
from compressor.types.passes import Outcome
from compressor.types.tensors import TensorSpec
from tests.compressor.passes.quantize import weight_only_models as weight_only
from tests.compressor.passes.quantize.static_models import carrier, data, quantized

ROWS = TensorSpec("image", ("batch", 64, 256), "float32")


class Wide(nn.Module):
    """Layers of which two read the same, so wide that torch divides their products by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 384)
        self.left, self.right = nn.Linear(384, 512), nn.Linear(384, 512)
        self.last = nn.Linear(512, 64)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.first(image))
        result: torch.Tensor = self.last(torch.relu(self.left(inner)) * self.right(inner))
        return result


def tensors(outcome: Outcome) -> dict[str, bytes]:
    """Return what a quantized graph stores."""
    return {
        name: value.const_value.numpy().tobytes()
        for name, value in outcome.carrier.graph().graph.initializers.items()
        if value.const_value is not None
    }


@pytest.fixture(scope="module", params=[4, 8])
def on_each(request: pytest.FixtureRequest) -> list[Outcome]:
    """Calibrated and quantized on one, two and three threads."""
    declared = QuantizeStatic.model_validate(
        {"layers": [{"match": "*"}], "weights": {"bits": request.param}}, strict=False
    )
    outcomes = []
    for count in (1, 2, 3):
        with on_threads(count):
            outcomes.append(quantized(declared, carrier(Wide(), ROWS), spec=ROWS))
    return outcomes


@pytest.fixture(scope="module")
def weights_alone(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """Rounded by GPTQ on one, two and three threads."""
    outcomes = []
    for count in (1, 2, 3):
        with on_threads(count):
            declared = weight_only.weights(method="gptq", bits=4, group=32)
            folder = tmp_path_factory.mktemp("feed")
            model = carrier(Wide(), ROWS)
            outcomes.append(weight_only.quantized(declared, model, folder, data(ROWS)))
    return outcomes


def test_what_is_written_depends_on_no_number_of_threads(on_each: list[Outcome]):
    written = [tensors(outcome) for outcome in on_each]
    assert written[0] == written[1] == written[2]


def test_codes_of_weights_alone_depend_on_no_number_of_threads(weights_alone: list[Outcome]):
    assert len(weights_alone[0].layers) == 4
    assert weights_alone[0].layers == weights_alone[1].layers == weights_alone[2].layers
    written = [tensors(outcome) for outcome in weights_alone]
    assert written[0] == written[1] == written[2]


def test_outcomes_depend_on_no_number_of_threads(on_each: list[Outcome]):
    assert len(on_each[0].layers) == 4
    assert on_each[0].layers == on_each[1].layers == on_each[2].layers


def test_the_error_of_the_first_layer_in_the_model_is_raised():
    def failing(name: str) -> FloatWeight:
        def codes() -> QuantizedTensor:
            raise ValueError(name)

        layer = Layer(name, "MatMul", name, (2, 3))
        return FloatWeight(layer, lambda: torch.zeros(2, 3), codes)

    with on_threads(3), pytest.raises(ValueError, match=r"^second$"):
        list(round_weights([failing("second"), failing("third")]))
