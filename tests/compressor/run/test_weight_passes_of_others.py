"""Passes of other packages: what their function does with a weight reaches no model but theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from compressor import Spec
from compressor.errors import DataError, SpecError
from compressor.extension import WeightPass, WeightRows
from compressor.front.spec import checked
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.passes import PassContext
from compressor.types.tensors import TensorSpec
from tests.compressor.tiny_project import tiny_module

IMAGE = TensorSpec("image", ("batch", 1, 8, 8), "float32")


class Own(WeightPass):
    """Change weights by what a test says."""

    name: ClassVar[str] = "own"
    does: ClassVar[Callable[[WeightRows], Any]]

    def change(self, rows: WeightRows, *_: Any) -> Any:
        """Call it."""
        return type(self).does(rows)


def applied(does: Callable[[WeightRows], Any]) -> tuple[TorchCarrier, TorchCarrier]:
    Own.does = staticmethod(does)
    before = TorchCarrier(tiny_module(), [IMAGE])
    after = Own().apply(before, PassContext(), {}).carrier
    assert isinstance(after, TorchCarrier)
    return before, after


def test_what_writes_into_its_rows_changes_no_other_model() -> None:
    before, after = applied(lambda rows: rows.matrix.mul_(0.5))
    untouched = TorchCarrier(tiny_module(), [IMAGE])
    for layer in before.layers():
        assert torch.equal(before.weight(layer), untouched.weight(layer))
        assert torch.equal(after.weight(layer), 0.5 * untouched.weight(layer))


def broken(_: WeightRows) -> Any:
    raise KeyError("boom")


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (broken, r"pass 'own' on layer '.*': raised KeyError: 'boom'; correct the function"),
        (lambda rows: rows.matrix[:, :-1], r"returned shape \[.*\] for rows \[.*\]; return a"),
        (lambda rows: rows.matrix * float("nan"), r"returned NaN or infinity; return a finite"),
        (lambda rows: rows.matrix.numpy(), r"returned a ndarray; return a finite tensor"),
    ],
    ids=["raises", "shape", "nan", "numpy"],
)
def test_what_cannot_be_a_weight_names_pass_and_layer(
    does: Callable[[WeightRows], Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        applied(does)


def test_an_error_of_ours_stays_as_it_is() -> None:
    def refuses(_: WeightRows) -> Any:
        raise SpecError("own", "does not fit", "leave it out")

    with pytest.raises(SpecError, match="does not fit"):
        applied(refuses)


def test_a_pass_without_an_entry_point_names_the_place_for_it() -> None:
    spec = Spec(name="own", model=tiny_module(), passes=[Own()], exports=[{"format": "onnx"}])
    with pytest.raises(SpecError, match=r"'own': has no entry point.* under compressor\.passes"):
        checked(spec)
