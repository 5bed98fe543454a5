"""Data that a run hands to a pass which runs models of its own: real, made up, and when missed."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.errors import ExitCode, SpecError
from compressor.graph.costs import batch_macs, model_macs
from compressor.progress import Silent
from compressor.run import workspace
from compressor.run.data import Data
from compressor.run.evaluate import RunSamples, made_up_batch
from compressor.run.store import Store
from compressor.run.workspace import Workspace
from compressor.types.tensors import TensorSpec
from tests.compressor.tiny_project import Project, sample_images

PRUNE = {"pass": "prune-structured", "target": {"ratio": 0.5}}
IMAGE = TensorSpec("image", ("batch", 1, 8, 8), "float32")


def test_made_up_inputs_have_the_models_shapes_and_types():
    inputs = (
        TensorSpec("tokens", ("batch", "length"), "int64"),
        TensorSpec("mask", ("batch", "length"), "bool"),
        TensorSpec("bias", (4, 2), "float16"),
    )
    made = made_up_batch(inputs, 6, seed=3)
    length = made["tokens"].shape[1]
    assert made["tokens"].shape == made["mask"].shape == (6, length)
    assert made["bias"].shape == (4, 2)
    assert {n: a.dtype.name for n, a in made.items()} == {s.name: s.dtype for s in inputs}
    assert set(np.unique(made["tokens"])) == {0, 1}
    again = made_up_batch(inputs, 6, seed=3)
    assert all((made[n] == again[n]).all() for n in made)
    assert (made_up_batch(inputs, 6, seed=4)["tokens"] != made["tokens"]).any()


def test_without_data_there_is_a_probe_and_no_batches():
    samples = RunSamples((IMAGE,), None, seed=0)
    assert samples.made_up
    assert samples.probe(5)["image"].shape == (5, 1, 8, 8)
    assert list(samples.batches()) == []


class Images:
    """Five images in batches."""

    def batches(self, batch: int, limit: int | None = None):
        images = sample_images(0, 5)[:limit]
        for start in range(0, len(images), batch):
            yield {"image": images[start : start + batch], "label": np.zeros(batch)}


def test_the_data_can_be_read_again_and_tell_how_far_they_are():
    done: list[int] = []
    data = Data("calibration", Images(), None, 2, "", "spec.yaml:1")  # type: ignore[arg-type]
    samples = RunSamples((IMAGE,), data, 0, done.append)
    first, second = ([b["image"] for b in samples.batches()] for _ in range(2))
    assert [len(b) for b in first] == [2, 2, 1]
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert done == [2, 4, 5] * 2
    assert (samples.probe(3)["image"] == sample_images(0, 5)[:3]).all()
    assert set(samples.probe(3)) == {"image"}
    fixed = RunSamples((TensorSpec("image", (8, 1, 8, 8), "float32"),), data, 0)
    assert (fixed.probe(2)["image"][5:] == sample_images(0, 5)[:3]).all(), "repeated to fit"


def test_a_run_hands_over_its_calibration_data(on_torch: Project):
    on_torch.spec["passes"] = [
        {**PRUNE, "reconstruct": False, "re-estimate": True, "sensitivity": True}
    ]
    on_torch.spec["exports"] = [{"format": "safetensors"}]
    assert on_torch.run().exit_code is ExitCode.DONE
    (step,) = on_torch.report()["passes"]
    notes = " ".join(step["notes"])
    assert "proved on calibration data" in notes
    assert "batch-norm statistics were re-estimated" in notes
    assert on_torch.run().cached


def test_a_run_without_data_proves_on_made_up_inputs(on_onnx: Project):
    on_onnx.spec["passes"] = [PRUNE]
    on_onnx.spec["data"] = {}
    on_onnx.run()
    (step,) = on_onnx.report()["passes"]
    assert "8 removed units were proved on random inputs" in " ".join(step["notes"])
    assert {x["name"]: x["scheme"] for x in step["layers"]} == {
        "conv1": "float32, 4 of 8 channels",
        "conv2": "float32, 4 of 8 channels",
        "fc": "float32, 4 of 8 inputs",
    }


@pytest.mark.slow
def test_other_data_make_another_result_only_where_they_count(on_torch: Project):
    on_torch.spec["exports"] = [{"format": "safetensors"}]
    cut = {**PRUNE, "reconstruct": False}
    for prune, counts in ((cut, False), ({**cut, "re-estimate": True}, True), (PRUNE, True)):
        on_torch.spec["passes"] = [prune]
        np.savez(on_torch.folder / "calib.npz", image=sample_images(2))
        on_torch.run()
        np.savez(on_torch.folder / "calib.npz", image=3 * sample_images(7))
        on_torch.run()
        (step,) = on_torch.report()["passes"]
        assert step["cached"] is not counts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"re-estimate": True}, "needs data to re-estimate batch-norm statistics"),
        ({"reconstruct": True}, "needs data to reconstruct layers"),
        ({"criterion": "taylor"}, "needs data to score by taylor"),
        ({"criterion": "activation"}, r"needs statistics of \d+ tensors"),
    ],
)
def test_missing_data_are_found_by_the_plan(on_torch: Project, options, message):
    on_torch.spec["passes"] = [{**PRUNE, **options}]
    del on_torch.spec["data"]["calibration"]
    with pytest.raises(SpecError, match=f"{message}.*there is no calibration data") as raised:
        on_torch.plan()
    assert raised.value.remedy == "add data.calibration"


def test_the_plan_says_how_many_channels_stay(on_torch: Project):
    on_torch.spec["passes"] = [PRUNE]
    plan = on_torch.plan()
    assert [row.actions for row in plan.rows] == [
        ("4 of 8 channels",),
        ("4 of 8 channels",),
        ("keep",),
    ]
    assert plan.passes[0].bytes < plan.bytes


@pytest.mark.parametrize(("most", "worth", "samples"), [(20, 9, 9), (6, 9, 6), (20, 1, 4)])
def test_layers_are_looked_at_on_as_many_samples_as_the_work_allows(
    most: int, worth: int, samples: int, on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    shared = Workspace(on_onnx.plan(), Store(on_onnx.store), Silent())
    work = batch_macs(shared.baseline, sample_batch(1))
    assert work == model_macs(shared.baseline) == batch_macs(shared.baseline, sample_batch(5)) / 5
    monkeypatch.setattr(workspace, "_LOOKED_AT_MACS", (worth + 0.5) * work)
    (batch,) = shared.looked_at(most)
    assert len(batch["image"]) == samples


def sample_batch(count: int) -> dict[str, np.ndarray]:
    return {"image": sample_images(0, count)}
