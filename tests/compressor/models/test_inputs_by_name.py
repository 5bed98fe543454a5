"""Inputs that forward takes by ``*`` or ``**``, and outputs that are of a class of the user's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import compressor
from compressor.errors import ModelError
from compressor.models.torch.carrier import TorchCarrier
from tests.compressor.models.sample_modules import spec

pytestmark = pytest.mark.usefixtures("lowered_each_time")


class AnyName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, **columns: Tensor) -> Tensor:
        return self.head(columns["age"] - 2 * columns["price"])


class DenseAndOthers(AnyName):
    def forward(self, price: Tensor, **columns: Tensor) -> Tensor:
        return super().forward(price=price, **columns)


@pytest.mark.parametrize("kind", [AnyName, DenseAndOthers])
def test_inputs_of_any_name_are_taken_with_open_axes(kind: type[AnyName]) -> None:
    module = kind()
    carrier = TorchCarrier(module, [spec("price", "batch", 3), spec("age", "batch", 3)])
    assert [str(o) for o in carrier.outputs] == ["output float32[batch, 2]"]
    assert "forward" not in vars(module)
    rows = np.random.default_rng(0)
    batch = {n: rows.normal(size=(5, 3)).astype(np.float32) for n in ("age", "price")}
    (ours,) = carrier.runner().run(batch).values()
    (theirs,) = carrier.module_outputs(batch)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


class Rows(AnyName):
    def forward(self, *columns: Tensor) -> Tensor:
        return super().forward(price=columns[0], age=columns[1])


class RowAndOthers(AnyName):
    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        return super().forward(price=first, age=others[0])


@pytest.mark.parametrize("kind", [Rows, RowAndOthers])
def test_inputs_that_forward_takes_by_position_have_open_axes(kind: type[AnyName]) -> None:
    carrier = TorchCarrier(kind(), [spec("price", "batch", 3), spec("age", "batch", 3)])
    rows = np.random.default_rng(0)
    batch = {n: rows.normal(size=(5, 3)).astype(np.float32) for n in ("price", "age")}
    (ours,) = carrier.runner().run(batch).values()
    (theirs,) = carrier.module_outputs(batch)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


class Positional(nn.Module):
    def forward(self, image: Tensor, **others: Tensor) -> Tensor:
        return image + 1 if not others else image


def test_another_name_goes_by_position_where_forward_has_a_parameter_for_it() -> None:
    carrier = TorchCarrier(Positional(), [spec("x", "batch", 3)])
    (ours,) = carrier.runner().run({"x": np.zeros((2, 3), np.float32)}).values()
    assert ours.tolist() == [[1, 1, 1]] * 2


def test_a_loader_names_inputs_that_forward_takes_by_any_name() -> None:
    batches = [{"age": torch.randn(8, 3), "price": torch.randn(8, 3)} for _ in range(3)]
    result = compressor.quantize(AnyName(), batches)
    assert result.artifacts


@dataclass
class Answer:
    click: Tensor


class OwnClass(nn.Module):
    def forward(self, x: Tensor) -> Answer:
        return Answer(x + 1)


def test_a_class_that_pytorch_does_not_know_is_refused_with_the_remedy() -> None:
    with pytest.raises(ModelError) as caught:
        TorchCarrier(OwnClass(), [spec("x", "batch", 3)]).graph()
    assert str(caught.value).endswith(
        "Answer'> in output, which is not a known type); return a dictionary or a tuple, or "
        "register the class where it is defined, by torch.export.register_dataclass(CLASS)"
    )
