"""``compressor.run`` and what it returns: a path, a dictionary or a typed spec."""

from __future__ import annotations

import ast
import html
import json
import re
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compressor
import compressor.exporters
import compressor.passes
from compressor import CompressorError, RunResult, Spec, catalog
from compressor.errors import ExitCode, SpecError
from compressor.exporters import OnnxExporter, SafetensorsExporter
from compressor.files import file_sha256
from compressor.front.spec import checked
from compressor.lab.verify.verify import verify
from compressor.passes import Fuse, PruneStructured, QuantizeStatic
from compressor.run.metrics.class_metrics import ACCURACY
from compressor.run.metrics.metrics import Metric
from compressor.spec.keys import LimitKeys, ModelKeys
from compressor.types.options import Options
from tests.compressor.tiny_project import ONNX, REPORTS, Project, onnx_project, sample_images
from tests.paths import ROOT

PASSES = [
    {"pass": "fuse"},
    {
        "pass": "quantize-static",
        "weights": {"rounding": "nearest"},
        "activations": {"observer": "min-max"},
    },
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = onnx_project(tmp_path_factory.mktemp("front"))
    project.spec.update(passes=PASSES, exports=[{"format": "safetensors"}, {"format": "onnx"}])
    project.spec["limits"] = {"metric-drop": 8, "size-ratio": 3, "latency-ratio": None}
    return project


@pytest.fixture(scope="module")
def result(project: Project) -> RunResult:
    return compressor.run(project.path)


def typed(project: Project) -> Spec:
    """Write the project's spec with classes."""
    return Spec(
        name="tiny",
        model=ModelKeys(onnx=ONNX),
        data=project.spec["data"],
        passes=[
            Fuse(),
            QuantizeStatic.model_validate(
                {"weights": {"rounding": "nearest"}, "activations": {"observer": "min-max"}}
            ),
        ],
        exports=[SafetensorsExporter(), OnnxExporter()],
        limits=LimitKeys(metric_drop=8, size_ratio=3, latency_ratio=None),
    )


def test_run_is_the_function_though_a_folder_has_its_name():
    from compressor.run import options

    assert compressor.run.__name__ == "run"
    assert compressor.RunOptions is options.RunOptions


def test_nothing_is_printed(project: Project, capfd: pytest.CaptureFixture[str]):
    compressor.run(project.path)
    assert capfd.readouterr() == ("", "")


def test_a_dictionary_and_a_typed_spec_are_what_the_file_is(project: Project, result: RunResult):
    with chdir(project.folder):
        specs = [checked(project.spec), checked(typed(project)), checked(str(project.path))]
        assert specs[0].resolved == specs[1].resolved == specs[2].resolved
        assert specs[0].output == specs[1].output == specs[2].output == result.output
        again = compressor.run(typed(project))
    assert again.cached  # the same keys in the store, so the same bytes
    manifest = json.loads((result.output / "manifest.json").read_text())
    assert manifest["spec_file"] is None
    assert "spec.yaml" not in [entry["name"] for entry in manifest["inputs"]]


def test_a_typed_spec_is_written_as_a_file_would_be(project: Project):
    made = typed(project).to_dict()
    assert made["passes"] == PASSES
    assert made["exports"] == [{"format": "safetensors"}, {"format": "onnx"}]
    assert made["limits"] == project.spec["limits"]
    assert "seed" not in made
    target = PruneStructured.model_validate({"target": {"macs": 0.5}, "round-to": 4})
    made = Spec(name="a", model={}, exports=(), passes=[target]).to_dict()
    assert made["passes"] == [{"pass": "prune-structured", "target": {"macs": 0.5}, "round-to": 4}]


def test_settings_override_any_kind_of_spec(project: Project):
    with chdir(project.folder):
        for spec in (project.path, project.spec, typed(project), checked(project.path)):
            assert (
                checked(spec, ["passes.1.weights.bits=4"]).resolved["passes"][1]["weights"]["bits"]
                == 4
            )


def test_errors_are_the_librarys(project: Project):
    with pytest.raises(CompressorError, match=r"^spec in Python: pass 'fuze': is not known"):
        compressor.run({**project.spec, "passes": [{"pass": "fuze"}]})
    with pytest.raises(SpecError, match=r"spec 'absent\.yaml': does not exist"):
        compressor.run("absent.yaml")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compressor.run(5), "'spec' of run: is of type int; give str, PathLike, dict or"),
        (lambda: compressor.run("a", {"fresh": True}), "'options' of run: is of type dict; give R"),
        (lambda: compressor.run("a", settings="seed=1"), "'settings' of run: is of type str; give"),
        (lambda: compressor.run("a", settings=[5]), "item 0 of argument 'settings' of run: is of"),
        (lambda: compressor.run("a", progress=5), "'progress' of run: is of type int; give Progre"),
        (lambda: compressor.RunOptions(callbacks=5), "'callbacks' of RunOptions: is of type int"),
        (lambda: compressor.load(5), "'path' of load: is of type int; give str or PathLike"),
        (lambda: compressor.quantize(nn.Linear), "'model' of quantize: is the class Linear; give"),
        (lambda: compressor.quantize(None), "'model' of quantize: is None; give ModelKeys, dict"),
        (lambda: compressor.prune("m.onnx"), "'module' of prune: is of type str; give Module"),
        (lambda: compressor.prune(nn.ReLU(), macs="half"), "'macs' of prune: is of type str; give"),
        (lambda: compressor.prepare(nn.ReLU(), "qat"), "'passes' of prepare: is of type str; give"),
        (lambda: Spec(name="a", model={}, exports=Fuse()), "'exports' of Spec: is of type Fuse"),
    ],
)
def test_arguments_of_other_types_are_refused(call: Callable[[], Any], message: str):
    with pytest.raises(SpecError, match=message):
        call()


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_devices_are_names_or_pytorchs(result: RunResult, device: str | torch.device):
    assert compressor.load(result.output, device=device)(torch.zeros(1, 1, 8, 8))


class Unregistered(Options):
    """An object where a spec wants the name of an observer."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"bits": 7}}, r"^QuantizeStatic\.weights\.bits: is 7; use 8, 4, 3 or 2$"),
        ({"weight": {"bits": 8}}, r"QuantizeStatic\.weight: is not a known key; did you mean 'wei"),
        ({"activations": {"exact_pixel": 1}}, r"pixel: is not a known key; .* 'exact_pixels'\?"),
        ({"activations": {"observer": Unregistered()}}, r"observer: is .*; it must be a valid str"),
        ({"bits": 8, "layers": 1}, r"layers: is 1; .*\n.*bits: is not a known key; write it as"),
    ],
)
def test_options_of_typed_passes_are_refused_as_those_of_files(
    options: dict[str, Any], message: str
):
    with pytest.raises(SpecError, match=message):
        QuantizeStatic(**options)


class Renamed(Fuse):
    """Has the name of the pass that it is made of."""


OWN_METRIC = Metric("own", np.subtract)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metric": OWN_METRIC}, "metric 'own': has no entry point, by which a spec finds it"),
        ({"metric": replace(ACCURACY, unit="")}, "'accuracy': is not what a spec finds by that"),
        ({"passes": [Renamed()]}, "pass 'fuse': is not what a spec finds by that name"),
        ({"metric": {"function": object()}}, "metric.function: is an object of object; give"),
        ({"config": {"type": torch.float16}}, r"model\.config\.type: is an object of dtype"),
        ({"config": {"act": nn.ReLU}}, r"model\.config\.act: is an object of type; give plain"),
    ],
)
def test_objects_that_no_spec_can_name_are_refused(given: dict[str, Any], message: str):
    model = {"factory": "torch.nn:Identity", "config": given.pop("config", {})}
    with pytest.raises(SpecError, match=message):
        checked(Spec(name="a", model=model, exports=[OnnxExporter()], **given))


def test_a_metric_that_a_spec_can_name_stands_for_its_name():
    model = {"factory": "torch.nn:Identity"}
    spec = Spec(name="a", model=model, exports=[OnnxExporter()], metric=ACCURACY)
    assert checked(spec).metric == "accuracy"


def test_the_result_is_a_value(project: Project, result: RunResult):
    assert (result.verdict, result.ok, result.exit_code) == ("passed", True, ExitCode.DONE)
    assert [a.format for a in result.artifacts] == ["safetensors", "onnx"]
    onnx = result.artifacts[1]
    report = project.report()
    entry = report["artifacts"][1]
    assert (onnx.path, onnx.bytes) == (result.output / "model.onnx", entry["bytes"])
    assert onnx.sha256 == file_sha256(onnx.path)
    assert onnx.metric == entry["metric"]["value"]
    assert (onnx.metric_drop, onnx.size_ratio) == (entry["metric_drop"], entry["size_ratio"])
    assert result.to_dict() == report
    result.to_dict()["artifacts"].clear()
    assert len(result.artifacts) == 2
    assert repr(result) == "<RunResult tiny: Passed: 4 limits and 4 checks held, model.onnx>"
    assert str(result).endswith(f"Report: {result.output}/report.html")


def test_a_notebook_shows_the_first_screen(result: RunResult):
    text = result._repr_html_()
    assert text.startswith('<iframe title="Report of tiny" srcdoc="')
    match = re.search(r'srcdoc="([^"]*)"', text)
    assert match is not None
    page, report = html.unescape(match[1]), (result.output / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "<script" not in page
    for part in ("verdict passed", "tiles", "<h2>Limits</h2>", "<h2>Before and after</h2>"):
        assert part in page
    shown = page[page.index("<header>") : page.index("<h2>Before and after</h2>")]
    assert shown.strip() in report


def test_artifacts_are_loaded_as_modules(result: RunResult):
    image = torch.from_numpy(sample_images(1, 2))
    outputs = [result.load(name)(image)["logits"] for name in (None, "onnx", "model.onnx")]
    assert torch.equal(outputs[1], outputs[2])
    assert np.allclose(outputs[0].numpy(), outputs[1].numpy(), atol=1e-5)
    with pytest.raises(
        SpecError, match="artifact 'onxx': is not an artifact of this run; did you mean 'onnx'"
    ):
        result.load("onxx")


def test_save_copies_what_the_run_left(result: RunResult, tmp_path: Path):
    folder = result.save(tmp_path / "edge")
    names = {"model.safetensors", "model.json", "model.onnx", "samples.npz", "manifest.json"}
    assert {p.name for p in folder.iterdir()} == {*names, *REPORTS}
    for path in folder.iterdir():
        assert path.read_bytes() == (result.output / path.name).read_bytes()
    assert verify(folder).ok
    (folder / "model.json").unlink()
    assert result.save(folder) == folder  # again, over what a save has left
    assert (folder / "model.json").is_file()
    assert result.save(result.output) == result.output


def test_save_leaves_other_peoples_folders_alone(result: RunResult, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SpecError, match="holds files that no run of compressor made"):
        result.save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    result.save(tmp_path, force=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(SpecError, match="is a file"):
        result.save(tmp_path / "notes.txt")


@pytest.mark.parametrize(("room", "kind"), [("passes", "pass"), ("exporters", "exporter")])
def test_classes_of_the_catalog_are_found_in_their_folder(room: str, kind: catalog.Kind):
    module = getattr(compressor, room)
    tree = ast.parse((ROOT / "compressor" / room / "__init__.py").read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    named = {
        f"{node.module}:{alias.asname}"
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert named == set(catalog.BUILT_IN[kind].values())
    for reference in named:
        name = reference.partition(":")[2]
        assert name in dir(module)
        assert getattr(module, name) is catalog.resolve(reference)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = module.Nothing


class Narrow(nn.Module):
    """Computes in bfloat16 what it takes in float32."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 6)).bfloat16()
        self.wide = wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(x.bfloat16())
        return outputs.float() if self.wide else outputs


@pytest.mark.parametrize("wide", [False, True])
def test_a_module_that_computes_in_bfloat16(wide: bool) -> None:
    """Its graph, which rounds elsewhere, is as near as that type lets it be."""
    rows = np.random.default_rng(0).normal(size=(32, 24)).astype(np.float32)
    document = {
        "version": 1,
        "name": "narrow",
        "model": {"factory": Narrow(wide).eval(), "inputs": {"x": {"shape": ["batch", 24]}}},
        "data": {"calibration": [{"x": rows}], "evaluation": [{"x": rows}]},
        "metric": "mse",
        "passes": [{"pass": "fuse"}, {"pass": "cast", "dtype": "fp32"}],
        "exports": [{"format": "onnx"}],
    }
    (artifact,) = compressor.run(document).to_dict()["artifacts"]
    assert artifact["sqnr_db"] > 30


@pytest.mark.parametrize("training", ["finetune", "distill"])
def test_a_module_and_data_of_bfloat16(training: str) -> None:
    """The inputs of its first batch keep their type, also where training data are copied."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 24, generator=generator, dtype=torch.bfloat16)
    labels = (rows[:, 0] > 0).long()
    layers = nn.Linear(24, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)
    module = nn.Sequential(*layers).bfloat16()
    document = {
        "version": 1,
        "name": "narrow",
        "model": {"factory": module},
        "data": {
            "calibration": [(rows, labels)],
            "evaluation": [(rows, labels)],
            "training": [(rows, labels)],
        },
        "metric": "accuracy",
        "passes": [{"pass": training, "epochs": 1, "batch": 8}, {"pass": "cast", "dtype": "fp32"}],
        "exports": [{"format": "onnx"}],
    }
    (artifact,) = compressor.run(document).to_dict()["artifacts"]
    assert artifact["sqnr_db"] > 8  # the norm divides by deviations of 8 bits


def images_in_doubles() -> dict[str, Any]:
    """A spec of a convolution in float64, for which ONNX Runtime has no kernel."""
    torch.manual_seed(0)
    rows = torch.randn(32, 3, 8, 8, dtype=torch.float64)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    data = [(rows, torch.randint(0, 64, (32,)))]
    return {
        "version": 1,
        "name": "wide",
        "model": {"factory": module.double()},
        "data": {"calibration": data, "evaluation": data},
        "metric": "accuracy",
        "exports": [{"format": "onnx"}],
    }


def test_a_module_of_float64_with_a_convolution() -> None:
    removal = {"pass": "prune-structured", "target": {"macs": 0.8}}
    narrow = {"pass": "cast", "dtype": "fp32"}
    document = {**images_in_doubles(), "passes": [removal, narrow, {"pass": "quantize-static"}]}
    (artifact,) = compressor.run(document).to_dict()["artifacts"]
    assert artifact["latency_ratio"] is None
    assert artifact["latency_ratio_reason"].startswith("the float model ran in PyTorch")


def test_the_plan_refuses_files_of_float64_that_onnx_runtime_does_not_run() -> None:
    with pytest.raises(SpecError, match=r"computes in float64.*cast, dtype: fp32"):
        compressor.run({**images_in_doubles(), "passes": [{"pass": "fuse"}]})
