"""An artifact, its source and the float model: what is measured between the three."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from compressor.errors import ArtifactError, DataError
from compressor.graph.output_parts import OutputParts
from compressor.run.evaluate import CachingRunner
from compressor.run.verdicts.fidelity import Trio
from compressor.types.tensors import Array, Batch, TensorSpec

ANY = TensorSpec("y", ("n", "m"), "float32")
IMAGES = [{"x": np.arange(*ends)[:, None]} for ends in ((0.0, 3.0), (3.0, 5.0), (5.0, 7.0))]


class Model:
    """Writes of each sample what a function makes of its number."""

    runtime = "made"

    def __init__(self, *functions: Any):
        self._functions = functions

    def run(self, batch: Batch) -> Batch:
        return {f"y{i}": np.asarray(f(batch["x"])) for i, f in enumerate(self._functions)}


def wave(x: Array) -> Array:
    return np.sin(x + np.arange(1, 5)).astype(np.float32)


def off_by(share: float) -> Any:
    return lambda x: wave(x) * np.float32(1 + share)


def trio(
    artifact: Any, source: Any, exact: Any, declared: Any = (ANY,), parts: OutputParts = ()
) -> Trio:
    runners = [CachingRunner(lambda m=m: m) for m in (artifact, source, exact)]
    return Trio("model.onnx", *runners, declared, parts)


def compared(artifact: Any, source: Any, exact: Any, size: int = 8) -> dict[str, Any]:
    return trio(*map(Model, (artifact, source, exact))).compare(IMAGES, size)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_distance_from_the_source_and_from_the_float_model(size: int) -> None:
    """A hundredth off the source is 40 dB; the farthest value of all batches is off the float."""
    found = compared(off_by(0.1211), off_by(0.11), wave, size)
    assert found["sqnr_db"] == pytest.approx(40.0, abs=0.01)
    assert found["check"]["ok"] is True
    found = compared(off_by(0.05), off_by(0.01), wave, size)
    largest = max(np.abs(wave(batch["x"])).max() for batch in IMAGES)
    assert found["max_abs_diff"] == pytest.approx(0.05 * largest, rel=1e-4)
    assert found["equal"] is False
    assert found["check"]["ok"] is False  # five times as far from the float model as its source


def test_an_artifact_that_only_rounds_as_float32_does_is_equal() -> None:
    for same in (off_by(0.01), off_by(0.01 + 2e-7)):
        found = compared(same, off_by(0.01), wave)
        assert found["equal"] is True
        assert found["check"]["ok"] is True
    assert compared(off_by(0.01), off_by(0.01), wave)["sqnr_db"] is None
    assert compared(off_by(0.01 + 1e-4), off_by(0.01), wave)["equal"] is False


def test_one_batch_that_differs_is_enough() -> None:
    for place in (0.0, 6.0):
        found = compared(lambda x, p=place: wave(x) * np.where(x == p, 1.5, 1.0), wave, wave)
        assert found["equal"] is False


def test_labels_alone_are_not_called_equal() -> None:
    """They hide by how much they were missed."""
    labels = TensorSpec("y", ("n",), "int64")
    found = trio(*[Model(lambda x: (x[:, 0] > 2).astype(np.int64))] * 3, declared=(labels,))
    assert found.compare(IMAGES, 8)["equal"] is False


def test_each_sample_counts_once_by_the_power_of_each_output() -> None:
    """Worse in few of many samples is chance; in each of many it is not."""
    many = [{"x": np.arange(float(i), i + 8.0)[:, None]} for i in range(0, 64, 8)]

    def verdict(worse: int) -> dict[str, Any]:
        artifact = Model(lambda x: wave(x) * np.where(x < worse, 1.2, 1.0).astype(np.float32))
        models = trio(artifact, Model(off_by(0.1)), Model(wave))
        check: dict[str, Any] = models.compare(many, 8)["check"]
        return check

    assert verdict(64)["ok"] is False
    assert verdict(2)["ok"] is True


def test_rows_that_one_of_two_models_has_are_compared_with_zeros() -> None:
    def rows(count: int) -> Any:
        return lambda _: np.ones((count, 2), np.float32)

    boxes = TensorSpec("y", ("count", 2), "float32")
    batch: list[Batch] = [{"x": np.zeros((1, 1))}]
    found = trio(Model(rows(3)), Model(rows(2)), Model(rows(4)), (boxes,)).compare(batch, 8)
    assert found["sqnr_db"] == pytest.approx(10 * math.log10(2))  # a row more than two
    assert found["max_abs_diff"] == 1.0


def test_parts_of_an_output_count_alike() -> None:
    """Scores that are a hundredth off show beside boxes that are a thousand times as large."""
    parts: OutputParts = [((slice(None), slice(0, 2)), (slice(None), slice(2, 4)))]

    def joined(share: float) -> Model:
        return Model(lambda x: wave(x) * np.float32([1000, 1000, 1 + share, 1 + share]))

    models = [joined(share) for share in (0.01, 0.0, 0.0)]
    assert trio(*models, parts=parts).compare(IMAGES, 8)["sqnr_db"] == pytest.approx(43.0, abs=0.1)
    assert (trio(*models).compare(IMAGES, 8)["sqnr_db"] or 200) > 90


def test_models_are_closed_when_they_have_been_compared() -> None:
    opened: list[str] = []
    runners = [
        CachingRunner(lambda n=n: opened.append(n) or Model(wave))  # type: ignore[func-returns-value]
        for n in ("artifact", "source", "float")
    ]
    models = Trio("model.onnx", *runners, (ANY,))
    models.compare(IMAGES, 8)
    assert opened == ["artifact", "source", "float"]
    for runner in runners:
        runner.run({"x": np.full((1, 1), 9.0)})
    assert opened == ["artifact", "source", "float"] * 2


@pytest.mark.parametrize(
    ("artifact", "declared", "refused"),
    [
        (lambda x: wave(x)[:, :3], (ANY,), False),  # a size that the source leaves open
        (lambda x: wave(x)[:, :3], (TensorSpec("y", ("n", 4), "float32"),), True),
        (lambda x: wave(x)[..., None], (ANY,), True),
        (wave, (TensorSpec("y", ("n", 7), "float32"),), False),  # as the source has it
    ],
)
def test_outputs_of_other_shapes_are_refused(artifact: Any, declared: Any, refused: bool) -> None:
    models = trio(Model(artifact), Model(wave), Model(wave), declared)
    if not refused:
        models.compare(IMAGES, 8)
        return
    shape = list(artifact(IMAGES[0]["x"]).shape)
    with pytest.raises(ArtifactError) as caught:
        models.compare(IMAGES, 8)
    assert str(caught.value) == (
        f"artifact 'model.onnx': returns outputs of shape [{shape}], but the model it was exported "
        "from [[3, 4]]; report it, with the spec; leave out this export until then"
    )


def test_another_number_of_outputs_is_refused() -> None:
    for artifact in (Model(wave, wave), Model()):
        with pytest.raises(ArtifactError, match="returns outputs of shape"):
            trio(artifact, Model(wave), Model(wave)).compare(IMAGES, 8)


def test_outputs_that_are_not_finite_are_refused_with_their_sample() -> None:
    """The place in its batch was added to the number of batches before."""
    models = trio(Model(lambda x: wave(x) / np.float32(x != 6.0)), Model(wave), Model(wave))
    with np.errstate(divide="ignore"), pytest.raises(DataError, match="infinite for sample 6"):
        models.compare(IMAGES, 8)


def test_an_output_of_no_sample_counts_as_one() -> None:
    whole = TensorSpec("y", (), "float32")
    models = [Model(lambda _, s=s: np.float32(s)) for s in (1.1, 1.1, 1.0)]
    found = trio(*models, declared=(whole,)).compare(IMAGES, 8)
    assert found["equal"] is True
    assert found["max_abs_diff"] == pytest.approx(0.1)
