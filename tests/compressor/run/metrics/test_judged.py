"""What a metric compares with, and outputs that no metric can judge."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compressor.errors import DataError
from compressor.run.metrics import judged
from compressor.run.metrics.class_metrics import ACCURACY, AGREEMENT
from compressor.run.metrics.judged import (
    check_finite,
    judged_outputs,
    judged_parts,
    target_of,
)
from compressor.run.metrics.metrics import MSE
from compressor.types.carrier import Capability
from compressor.types.tensors import Batch, Feed

EXPECTED: Batch = {"y": np.zeros((2, 3))}
OWN = replace(MSE, code=print)


def test_labels_are_the_target_where_there_are_some_and_the_metric_wants_them() -> None:
    batch: Batch = {"x": np.ones((2, 3)), "label": np.array([1, 2])}
    assert target_of(batch, "label", EXPECTED, ACCURACY) is batch["label"]
    assert target_of(batch, "label", EXPECTED, AGREEMENT) is EXPECTED
    assert target_of(batch, None, EXPECTED, ACCURACY) is EXPECTED
    several: Batch = {"label.box": np.ones(2), "label.kind": np.zeros(2)}
    assert sorted(target_of(several, "label", EXPECTED, OWN)) == ["box", "kind"]


def test_the_labels_of_a_feed_are_those_of_one_sample() -> None:
    """The user's own metric gets them as they are, as it gets the outputs."""
    feed = Feed(x=np.ones((2, 3)), label=np.array([1, 2]))
    assert target_of(feed, "label", EXPECTED, ACCURACY).tolist() == [[1, 2]]
    assert target_of(feed, "label", EXPECTED, OWN).tolist() == [1, 2]
    outputs: Batch = {"y": np.ones((2, 3))}
    assert judged_outputs(feed, outputs, ACCURACY)["y"].shape == (1, 2, 3)
    assert judged_outputs(feed, outputs, OWN) is outputs


@pytest.mark.parametrize(
    ("feeds", "recurrence", "offers", "known"),
    [
        (False, None, {Capability.GRAPH}, True),
        (True, None, {Capability.GRAPH}, False),
        (False, "state", {Capability.GRAPH}, False),
        (False, None, {Capability.RUN}, False),
    ],
)
def test_parts_of_outputs_are_known_of_graphs_whose_outputs_have_samples(
    monkeypatch: pytest.MonkeyPatch, feeds: bool, recurrence: Any, offers: Any, known: bool
) -> None:
    monkeypatch.setattr(judged, "output_parts", lambda graph: (graph,))
    carrier: Any = SimpleNamespace(offers=offers, graph=lambda: "graph")
    data: Any = SimpleNamespace(feeds=feeds, recurrence=recurrence)
    assert judged_parts(carrier, data) == (("graph",) if known else ())


def refusal(outputs: Batch, *given: Any, **named: Any) -> str:
    with pytest.raises(DataError) as caught:
        check_finite(outputs, *given, **named)
    return str(caught.value)


def broken(*shape: int, at: tuple[int, ...], value: float = np.nan) -> np.ndarray:
    made = np.ones(shape)
    made[at] = value
    return made


def test_an_output_that_is_not_finite_names_its_first_sample() -> None:
    outputs = {"a": np.ones((3, 2)), "b": broken(3, 2, at=(1, 1), value=np.inf)}
    assert refusal(outputs, 10, 3) == (
        "output 'b': is NaN or infinite for sample 11; look at that sample, and at passes that "
        "narrow the range (cast to fp16)"
    )
    assert refusal(outputs, 10, 3, exact=True).endswith(
        "look at that sample, and at the model: it is the float one that gives it"
    )
    assert "for sample 7;" in refusal({"y": broken(2, 2, at=(1, 1))}, 7, 1)  # of one sample
    assert "for sample 7;" in refusal({"y": np.array(np.nan)}, 7, 1)
    assert "for samples 7 to 9;" in refusal({"y": broken(2, 2, at=(1, 1))}, 7, 3)
    assert "for samples 7 to 9;" in refusal({"y": np.array(np.nan)}, 7, 3)


def test_finite_and_whole_numbers_are_let_through() -> None:
    check_finite({"a": np.ones((3, 2)), "b": np.arange(3), "c": np.array(["", "a", "b"])}, 0, 3)
    assert "output 'y'" in refusal({"b": np.arange(3), "y": broken(3, at=(0,))}, 0, 3)


def test_an_input_that_is_not_finite_is_at_fault() -> None:
    """Of the same sample; what another sample holds made no output infinite."""
    outputs = {"y": broken(3, 2, at=(1, 0))}
    image = broken(3, 4, at=(1, 2))
    assert refusal(outputs, 10, 3, {"ids": np.arange(3), "image": image}) == (
        "input 'image': is NaN or infinite for sample 11; look at that sample in the file (from 0, "
        "of those that are used), and after its transform"
    )
    for other in (
        broken(3, 4, at=(0, 2)),
        broken(3, 4, at=(2, 2)),
        broken(4, at=(1,)),
        np.array(np.nan),
    ):
        assert refusal(outputs, 10, 3, {"image": other}).startswith("output 'y'")
    whole = {"y": broken(2, 2, at=(1, 1))}  # of no sample alone: any of its inputs may be it
    assert refusal(whole, 10, 3, {"image": image}).startswith(
        "input 'image': is NaN or infinite for samples 10 to 12"
    )
