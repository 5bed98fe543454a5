"""Compression in one call: a module, a loader, and a judged file; a smaller module."""

from __future__ import annotations

import gc
import inspect
import json
import pickle
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.prune import l1_unstructured
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import compressor
from compressor import RunResult, Spec
from compressor.calibration.sources.random_access import RandomAccess
from compressor.calibration.sources.user_functions import FactorySource, TransformedSource
from compressor.errors import DataError, ModelError, SpecError
from compressor.front.spec import checked
from compressor.models.torch.program_module import open_program_module, program_module_digest
from compressor.run.plan import make_plan
from compressor.run.training import RunTrainingData
from compressor.spec.user_code import load_symbol
from compressor.types.tensors import TensorSpec
from tests.compressor.tiny_project import ONNX as ONNX_FILE
from tests.compressor.tiny_project import onnx_project, sample_images, tiny_module

STATIC = {
    "pass": "quantize-static",
    "weights": {"rounding": "nearest"},
    "activations": {"observer": "min-max"},
}


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return tiny_module().train()


@pytest.fixture(scope="module")
def loader(module: nn.Module) -> DataLoader[Any]:
    images = torch.from_numpy(sample_images(1))
    module.eval()
    with torch.no_grad():
        labels = module(images).argmax(1)
    module.train()
    return DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)


def test_an_iterator_is_read_once_for_the_inputs_and_the_data(module: nn.Module):
    """It was used up where the module's inputs were read off, and the data had no batches."""
    images = torch.from_numpy(sample_images(1))
    batches = (images[i : i + 8] for i in range(0, 24, 8))
    spec = Spec(
        name="once",
        model=module,
        data={"calibration": batches},
        passes=[STATIC],
        exports=[{"format": "onnx"}],
    )
    plan = make_plan(checked(spec))
    read = [len(next(iter(batch.values()))) for batch in plan.data["calibration"].batches()]
    assert sum(read) == 24


def halved(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**batch, "image": batch["image"] / 2}


@pytest.fixture(scope="module")
def result(module: nn.Module, loader: DataLoader[Any]) -> RunResult:
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    result = compressor.quantize(module, loader, evaluate=loader, passes=[{"pass": "fuse"}, STATIC])
    assert module.training
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    return result


def test_a_module_and_a_loader_give_a_judged_file(result: RunResult, loader: DataLoader[Any]):
    metric = result.report["baseline"]["metric"]
    assert (metric["name"], metric["value"], metric["samples"]) == ("accuracy", 100.0, 48)
    (artifact,) = result.artifacts
    assert (artifact.format, artifact.metric_drop is None) == ("onnx", False)
    assert [c["ok"] for c in result.report["artifacts"][0]["checks"]] == [True, True]
    session = ort.InferenceSession(artifact.path, providers=["CPUExecutionProvider"])
    assert [(i.name, i.shape[1:]) for i in session.get_inputs()] == [("image", [1, 8, 8])]
    images, labels = loader.dataset.tensors
    right = session.run(None, {"image": images.numpy()})[0].argmax(1) == labels.numpy()
    assert artifact.metric == 100 * right.mean()


def test_manifest_and_report_say_what_no_file_repeats(result: RunResult, tmp_path: Path):
    folder = result.save(tmp_path / "edge")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [entry["key"] for entry in manifest["objects"]] == [
        "model.factory",
        "data.calibration.factory",
        "data.evaluation.factory",
    ]
    assert manifest["objects"][1]["type"] == "torch.utils.data.dataloader.DataLoader"
    assert manifest["spec"]["model"]["inputs"] == {
        "image": {"shape": ["batch", 1, 8, 8], "dtype": "float32"}
    }
    assert manifest["spec"]["output"] is None
    note = "only the program that made model.factory, data.calibration.factory, "
    assert note in (folder / "report.md").read_text().replace("\\", "")
    with pytest.raises(SpecError, match="was an object of a Python program, which no file holds"):
        load_symbol(manifest["spec"]["model"]["factory"], "model.factory")


def test_what_the_program_has_set_for_pytorch_does_not_act_inside():
    def quantized() -> str:
        passes = [{"pass": "quantize-static"}]
        return compressor.quantize(small, images, passes=passes).artifacts[0].sha256

    small, images = nn.Linear(8, 4), torch.zeros(4, 8)
    expected = quantized()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu"), torch.inference_mode(), torch.device("meta"):
            assert quantized() == expected
            assert torch.is_autocast_enabled("cpu")
            assert torch.is_inference_mode_enabled()
            assert torch.zeros(1).is_meta
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_temporary_folder_lasts_as_long_as_the_result(tmp_path: Path):
    path = onnx_project(tmp_path).folder / ONNX_FILE
    result = compressor.quantize(path, passes=[{"pass": "quantize-weights", "preset": "int8"}])
    folder = result.output
    assert result.verdict == "unknown"  # nothing was evaluated
    assert (folder / "report.html").is_file()
    assert str(folder) not in str(result)  # who reads that later finds nothing there
    del result
    gc.collect()
    assert not folder.exists()


def test_the_same_module_and_data_are_known_again(result: RunResult, loader: DataLoader[Any]):
    """Keys in the store are made of these, so that the same give the same bytes."""
    sources = {"calibration": {"factory": loader, "samples": 512}, "evaluation": loader}
    plan = make_plan(checked(Spec(name="a", model=tiny_module(), data=sources, exports=[ONNX])))
    identity = result.report["identity"]
    assert (plan.model.digest(), plan.data["evaluation"].digest) == (
        identity["model"],
        identity["data"],
    )


def test_a_change_that_only_the_graph_shows_is_another_module():
    inputs = (TensorSpec("image", ("batch", 8), "float32"),)
    digests = [
        program_module_digest(open_program_module(Scaled(factor), inputs, "model"))
        for factor in (2.0, 3.0)
    ]
    assert digests[0] != digests[1]


ONNX = {"format": "onnx"}


class Scaled(nn.Module):
    """Holds a number that neither its structure nor its weights show."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor
        self.fc = nn.Linear(8, 2)
        nn.init.ones_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, image: Tensor, scale: Tensor | None = None) -> dict[str, Any]:
        made = self.fc(image) * self.factor
        return {"all": made if scale is None else made * scale, "pair": (made, made.sum(1))}


def test_functions_and_modules_stand_where_a_file_has_names(
    module: nn.Module, loader: DataLoader[Any]
):
    value = {
        "version": 1,
        "name": "given",
        "model": module,
        "data": {
            "training": {"factory": loader, "transform": halved, "samples": 16},
            "evaluation": {"factory": loader, "transform": lambda batch: batch},
        },
        "metric": {"function": lambda outputs, target: outputs.argmax(1) == target},
        "passes": [{"pass": "distill", "teacher": tiny_module(), "loss": "cross-entropy"}],
        "exports": [ONNX],
    }
    value["model"] = {"factory": module, "inputs": {"image": {"shape": ["batch", 1, 8, 8]}}}
    spec = checked(value)
    resolved = spec.resolved
    assert resolved["data"]["training"]["transform"].endswith("test_compress:halved")
    assert resolved["metric"]["function"] == "in-memory:metric.function"
    assert resolved["passes"][0]["teacher"]["factory"] == "in-memory:passes.0.teacher.factory"
    plan = make_plan(spec)
    assert plan.metric is not None
    assert plan.data["evaluation"].target == "target"


@pytest.mark.parametrize(
    ("item", "names"),
    [
        ((torch.zeros(2, 8), torch.zeros(2)), ["image"]),
        ((torch.zeros(2, 8), torch.zeros(2, 1), torch.zeros(2)), ["image", "scale"]),
        (torch.zeros(2, 8), ["image"]),
        ({"scale": torch.zeros(2, 1), "image": torch.zeros(2, 8), "labels": [1, 0]}, None),
    ],
)
def test_inputs_are_read_off_the_first_batch(item: Any, names: list[str] | None):
    spec = Spec(name="a", model=Scaled(1.0), data={"calibration": [item]}, exports=[ONNX])
    assert list(checked(spec).resolved["model"]["inputs"]) == (names or ["image", "scale"])


class Difference(nn.Module):
    """Takes two inputs, one with a usual name of targets."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x - y


def test_what_forward_needs_is_an_input_whatever_its_name():
    batch = {"x": torch.ones(2, 3), "y": torch.zeros(2, 3), "label": torch.tensor([0, 1])}
    spec = Spec(name="a", model=Difference(), data={"evaluation": [batch]}, exports=[ONNX])
    plan = make_plan(checked(spec))
    assert [spec.name for spec in plan.model.carrier.inputs] == ["x", "y"]
    assert plan.data["evaluation"].target == "label"


@pytest.mark.parametrize(
    "wrap", [partial(torch.compile, backend="eager"), nn.DataParallel, AveragedModel]
)
def test_what_only_calls_a_module_is_taken_off(wrap: Callable[[nn.Module], nn.Module]):
    data = {"calibration": torch.zeros(2, 1, 8, 8)}
    made = checked(Spec(name="a", model=wrap(tiny_module()), data=data, exports=[ONNX]))
    assert list(made.resolved["model"]["inputs"]) == ["image"]
    assert next(type(given).__name__ for given in made.objects.values()) == "TinyNet"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_refused():
    with pytest.raises(SpecError, match=r"is TorchScript.*; give the module that was scripted"):
        compressor.quantize(torch.jit.script(nn.Linear(4, 3)), torch.zeros(2, 4))


class Counting(nn.Linear):
    """Writes a buffer and keeps what it returned."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = super().forward(x)
        return self.last


def test_the_programs_module_stays_as_it_is_and_may_hold_what_it_computed():
    module = nn.Sequential(Counting(), nn.Linear(8, 4))
    l1_unstructured(module[1], "weight", 0.5)
    x = torch.randn(4, 8)
    expected = module(x)
    smaller = compressor.prune(module, x, passes=[{"pass": "prune-magnitude", "sparsity": 0.6}])
    copy = open_program_module(module, [TensorSpec("x", ("batch", 8), "float32")], "model")
    assert torch.equal(copy.module(x), expected)
    assert smaller(x).shape == (4, 4)
    assert module[0].calls == 1
    assert copy.module[0].weight is module[0].weight


def test_what_cannot_be_used_is_an_error_of_the_library(loader: DataLoader[Any]):
    with pytest.raises(SpecError, match="a module does not know its own inputs; give data"):
        compressor.quantize(tiny_module())
    with pytest.raises(DataError, match="is a int, which holds no batches"):
        compressor.quantize(tiny_module(), 5)
    with pytest.raises(DataError, match="has 'scale' as a single number; give an axis of samples"):
        compressor.quantize(Scaled(1.0), [{"image": torch.zeros(2, 8), "scale": torch.tensor(0.5)}])
    for place in ("calib.npz", Path("calib.npz")):
        with pytest.raises(DataError, match=r"(Path|str), not data; name a file as a spec does"):
            compressor.quantize(tiny_module(), place)
    with pytest.raises(SpecError, match="forward of TinyNet takes nothing of the first batch"):
        compressor.quantize(tiny_module(), [{"pixels": torch.zeros(1, 1, 8, 8)}])
    broken = tiny_module()
    with torch.no_grad():
        broken.fc.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"tensor 'fc\.weight' holds 1 values that are NaN"):
        compressor.quantize(broken, loader)
    with pytest.raises(SpecError, match="leave a graph or codes, and no module that trains"):
        compressor.prune(tiny_module(), loader, passes=[{"pass": "fuse"}])


def test_a_pruned_module_is_one_again(module: nn.Module, loader: DataLoader[Any]):
    smaller = compressor.prune(module, loader, macs=0.5)
    assert type(smaller) is type(module)
    assert smaller.training
    count, whole = (sum(p.numel() for p in m.parameters()) for m in (smaller, module))
    assert count < 0.7 * whole
    assert not {p.data_ptr() for p in smaller.parameters()} & {
        p.data_ptr() for p in module.parameters()
    }
    images, labels = loader.dataset.tensors
    nn.functional.cross_entropy(smaller(images), labels).backward()
    assert all(p.grad is not None for p in smaller.parameters())


def test_a_module_in_float16_is_pruned(module: nn.Module, loader: DataLoader[Any]):
    """Runtimes round halves at other places, which was taken for another function."""
    images, labels = loader.dataset.tensors
    narrow = deepcopy(module).half()
    smaller = compressor.prune(narrow, (images.half(), labels), macs=0.5)
    assert type(smaller) is type(module)
    assert {p.dtype for p in smaller.parameters()} == {torch.float16}


class Fixed(nn.Module):
    """Sizes stand in ``forward``, so that no attribute can be adapted."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = torch.relu(self.first(x)).reshape(-1, 16)
        return {"all": self.last(hidden), "pair": (hidden.sum(1), [x])}


@pytest.mark.parametrize(
    "work",
    [
        lambda m, data: compressor.prune(m, data, macs=0.7),
        lambda m, data: compressor.quantize(m, data, passes=[STATIC]),
        lambda m, data: compressor.prepare(m, [{"pass": "qat", "loss": "mse", "steps": 1}], data),
    ],
)
def test_the_programs_random_numbers_stay(
    module: nn.Module, loader: DataLoader[Any], work: Callable[[nn.Module, Any], Any]
):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    work(module, loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_that_executes_its_graph_returns_what_the_module_did():
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    smaller = compressor.prune(Fixed().eval(), data, macs=0.6)
    assert not isinstance(smaller, Fixed)
    assert not smaller.training
    made = smaller(data)
    assert made.keys() == {"all", "pair"}
    assert (made["all"].shape, made["pair"][0].shape) == ((64, 4), (64,))
    assert torch.equal(made["pair"][1][0], data)
    assert sum(p.numel() for p in smaller.parameters()) < 150
    made["all"].sum().backward()
    parameters = inspect.signature(smaller.forward).parameters
    assert [*parameters] == [*inspect.signature(Fixed().forward).parameters]
    assert made["all"].equal(smaller(**dict.fromkeys(parameters, data))["all"])
    with pytest.raises(ModelError, match=r"executes a graph.*all passes in one call"):
        compressor.quantize(smaller, data)


def test_processes_that_prepare_data_need_no_loader(tmp_path: Path):
    given = FactorySource(lambda: [{"image": sample_images(1)}], "data.training")
    source = TransformedSource(given, halved, "halved")
    access = RandomAccess(source, tmp_path)
    data = RunTrainingData(None, source.digest(), "here", access, tmp_path)
    there = pickle.loads(pickle.dumps(data))
    rows = np.array([5, 0])
    assert np.array_equal(there.batch(rows, (0,))["image"], sample_images(1)[rows] / 2)
    assert (there.samples, there.target) == (48, None)


def test_a_programs_feeds_may_be_a_list():
    feeds = [{"image": sample_images(1)[:n]} for n in (1, 3)]
    data = {"calibration": {"factory": feeds, "samples": "feeds"}}
    model = {"factory": tiny_module(), "inputs": {"image": {"shape": ["batch", 1, 8, 8]}}}
    plan = make_plan(checked(Spec(name="a", model=model, data=data, exports=[ONNX])))
    assert [len(batch["image"]) for batch in plan.data["calibration"].batches()] == [1, 3]
