"""Planning: what it finds before heavy work, and what it predicts."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.calibration.sources.user_functions import FactorySource
from compressor.errors import ModelError, SpecError
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch import carrier as torch_carrier
from compressor.models.torch import matching
from compressor.models.torch.carrier import TorchCarrier
from compressor.report.pages.plan import plan_page
from compressor.report.terminal import plain_text
from compressor.run.data import Data
from compressor.run.memory import peak_memory
from compressor.run.plan import make_plan
from compressor.spec.load import load_spec
from tests.compressor.graph.channels.channel_graphs import graph
from tests.compressor.run.plan_refusals import line_of, refusal
from tests.compressor.tiny_project import (
    CHECKPOINT,
    Project,
    torch_project,
)
from tests.paths import ROOT

GOLDEN = Path(__file__).parent / "golden" / "plan_digits.txt"
STATIC = {
    "pass": "quantize-static",
    "weights": {"rounding": "nearest"},
    "activations": {"observer": "min-max"},
    "layers": [{"match": "*"}],
}


def test_the_plan_of_the_sample_is_as_agreed(spine: None):
    text = plain_text(plan_page(make_plan(load_spec(ROOT / "samples/digits/spec.yaml"))))
    fresh = GOLDEN.with_suffix(".new")
    if text != GOLDEN.read_text(encoding="utf-8"):
        fresh.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8"), f"if it is meant, rename {fresh.name}"
    fresh.unlink(missing_ok=True)


def test_counts(on_onnx: Project):
    plan = on_onnx.plan()
    assert plan.parameters == 72 + 8 + 576 + 8 + 32 + 4
    assert plan.bytes == 4 * plan.parameters
    assert plan.macs == 64 * (72 + 576) + 32
    assert [(r.name, r.kind, r.bytes_before, r.actions) for r in plan.rows] == [
        ("conv1", "Conv", 4 * (72 + 8), ()),
        ("conv2", "Conv", 4 * (576 + 8), ()),
        ("fc", "Gemm", 4 * (32 + 4), ()),
    ]
    assert not on_onnx.output.exists()


def test_each_pass_sees_the_model_as_the_one_before_leaves_it(on_onnx: Project):
    on_onnx.spec["passes"] = [{"pass": "fuse"}, STATIC]
    plan = on_onnx.plan()
    fuse, static = plan.passes
    assert static.bytes < fuse.bytes <= plan.bytes
    # Codes, scales and zero points: conv1 72 + 8 * 4, its int32 bias 8 * 4 with its scale ...
    assert all(row.bytes_after < row.bytes_before for row in plan.rows if row.name != "conv1")
    assert len(static.requests) >= 3
    assert len(plan.rows[0].actions) == 2


def test_memory_counts_the_library_of_the_model(on_torch: Project):
    carrier = on_torch.plan().model.carrier
    assert isinstance(carrier, TorchCarrier)
    own = peak_memory(carrier, {}, [])
    carrier.module.__class__.__module__ = "transformers.models.tiny"
    assert peak_memory(carrier, {}, []) - own == pytest.approx(300e6)


def test_memory_depends_on_the_batch_and_not_on_the_number_of_samples(on_onnx: Project):
    on_onnx.spec["passes"] = [STATIC]
    before = on_onnx.plan()
    assert before.peak_memory == on_onnx.plan("data.calibration.samples=3").peak_memory
    assert before.peak_memory == on_onnx.plan().peak_memory
    larger = on_onnx.plan("data.calibration.batch=48").peak_memory
    # One batch of each observed tensor, held twice: 32 more samples of them.
    grown = (larger - before.peak_memory) / (2 * 4 * 32)
    assert grown >= 64 + 8 * 64 + 8 * 64
    assert grown == int(grown)


@pytest.mark.parametrize("noted", [True, False])
def test_memory_counts_values_whose_axes_follow_from_those_of_the_data(noted: bool):
    """Exporters leave inner axes open, or give them names of their own."""
    window = "kernel_shape = [3, 3], strides = [2, 2]"
    model = graph(
        f"""(float[n, 3, h, w] x) => (float[n, k, a, b] y) {{
            v = Conv<{window}>(x, first) u = Conv<{window}>(v, middle) y = Conv(u, last)
        }}""",
        {"first": (4, 3, 3, 3), "middle": (256, 4, 3, 3), "last": (1, 256, 1, 1)},
        noted=noted,
    )
    images = np.zeros((2, 3, 203, 303), np.float32)
    source = FactorySource(lambda: [{"x": images}], "m:make")
    data = {"evaluation": Data("evaluation", source, None, 2, "", "")}
    carrier = OnnxCarrier(model)
    grown = peak_memory(carrier, data, []) - peak_memory(carrier, {}, [])
    assert grown == pytest.approx(7 * 2 * 4 * 256 * 50 * 75, rel=1e-3)


def test_weights_are_not_read(on_torch: Project, monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []
    read = matching.read_weights

    def watch(path: Path, *, headers_only: bool = False) -> dict[str, torch.Tensor]:
        asked.append(headers_only)
        return read(path, headers_only=headers_only)

    for module in (matching, torch_carrier):
        monkeypatch.setattr(module, "read_weights", watch)
    on_torch.spec["passes"] = [{"pass": "fuse"}, STATIC]
    plan = on_torch.plan()
    assert asked == [True]
    # The plan's model has the factory's own weights still, whatever the file holds.
    assert plan.model.checkpoint == on_torch.folder / CHECKPOINT


def test_a_checkpoint_of_nan_passes_the_plan_and_fails_the_run(tmp_path: Path, spine: None):
    project = torch_project(tmp_path / "project", ".safetensors")
    checkpoint = project.folder / "tiny.safetensors"
    tensors = load_file(checkpoint)
    tensors["conv2.weight"][3, 1] = torch.nan
    tensors["conv2.bias"][0] = torch.inf
    save_file(tensors, checkpoint)
    project.spec["passes"] = [{"pass": "fuse"}]
    assert project.plan().parameters == 72 + 16 + 576 + 8 + 32 + 4
    with pytest.raises(ModelError) as caught:
        project.run()
    message = str(caught.value).replace(str(project.folder), "FOLDER")
    # Tensors of a safetensors file come in the order of their names.
    assert message == (
        f"{line_of(project, 'tiny.safetensors')}: checkpoint 'FOLDER/tiny.safetensors': "
        "tensor 'conv2.bias' holds 1 values that are NaN or infinite; "
        "the training diverged or the file is damaged; use an earlier checkpoint"
    )
    assert project.leftovers() == []


def test_a_rule_that_matches_no_layer(on_onnx: Project):
    on_onnx.spec["passes"] = [{"pass": "fuse"}, {**STATIC, "layers": [{"match": "conv3"}]}]
    opened = line_of(on_onnx, '"pass": "fuse"')
    message = refusal(on_onnx)
    assert message.endswith(": layer rule 'conv3': matches no layer; did you mean 'conv2'?")
    assert int(message.split(":")[1]) == int(opened.split(":")[1]) + 2  # where the next one starts


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (STATIC, "it is quantized already"),
        ({"pass": "quantize-dynamic", "convolutions": True}, "its weight is int8"),
        ({"pass": "quantize-weights", "preset": "int8"}, "its weight is int8 already"),
        ({"pass": "cast"}, "its weight is int8 already"),
        ({"pass": "cluster"}, "its weight is int8 already"),
    ],
    ids=lambda value: value.get("pass", "") if isinstance(value, dict) else "",
)
def test_what_is_quantized_already_is_not_quantized_again(
    on_onnx: Project, step: dict[str, Any], reason: str
):
    on_onnx.spec["passes"] = [{"pass": "fuse"}, STATIC, step]
    assert refusal(on_onnx).endswith(
        f": pass '{step['pass']}': touches no layer: 3 of 3: {reason}; change its rules or "
        "options, remove it, or put {pass: cast, dtype: fp32} (which makes a quantized model one "
        "of floats) before it"
    )


def test_rules_that_leave_what_is_quantized_already(on_onnx: Project):
    first = {**STATIC, "layers": [{"match": "fc", "skip": True}, {"match": "*"}]}
    rest = {**STATIC, "layers": [{"match": "f*", "skip": True}]}
    on_onnx.spec["passes"] = [{"pass": "fuse"}, first, rest]
    assert refusal(on_onnx).endswith(
        ": pass 'quantize-static': touches no layer: 2 of 3: it is quantized already; 1 of 3: "
        "skipped by the rule 'f*'; change its rules or options, remove it, or put {pass: cast, "
        "dtype: fp32} (which makes a quantized model one of floats) before it"
    )
    on_onnx.spec["passes"][-1] = STATIC
    assert [r.actions[-1] for r in on_onnx.plan().rows] == ["keep", "keep", "int8/channel x uint8"]


def test_training_after_a_graph_pass(on_torch: Project):
    on_torch.spec["passes"] = [{"pass": "learn"}, {"pass": "fuse"}]
    assert [p.name for p in on_torch.plan().passes] == ["learn", "fuse"]
    on_torch.spec["passes"].reverse()
    message = refusal(on_torch)
    assert message.endswith(
        ": pass 'learn': needs train; at this point the model offers graph, run, weights only; "
        "move it before 'fuse', which leaves a graph in place of the module"
    )


def test_training_an_onnx_file(on_onnx: Project):
    on_onnx.spec["passes"] = [{"pass": "learn"}]
    assert "pass 'learn': needs train; " in refusal(on_onnx)


def test_statistics_without_calibration_data(on_onnx: Project):
    on_onnx.spec["passes"] = [STATIC]
    del on_onnx.spec["data"]["calibration"]
    assert ": pass 'quantize-static': needs statistics of " in (message := refusal(on_onnx))
    assert message.endswith("there is no calibration data; add data.calibration")


def test_a_metric_limit_without_evaluation_data(on_onnx: Project):
    del on_onnx.spec["data"]["evaluation"]
    on_onnx.spec["limits"]["metric-drop"] = 1.0
    assert refusal(on_onnx) == (
        f"{line_of(on_onnx, 'metric-drop')}: limits.metric-drop: cannot be judged without "
        "data.evaluation; add data.evaluation, or remove the limit"
    )
    on_onnx.spec["limits"]["metric-drop"] = None
    assert on_onnx.plan().metric is None


def test_two_exports_that_would_write_the_same_file(on_onnx: Project):
    on_onnx.spec["exports"] = [{"format": "onnx"}, {"format": "onnx", "opset": 18}]
    message = refusal(on_onnx)
    assert ": exports.1: is a second 'onnx'; both would write the same file; " in message


def test_a_bare_checkpoint_wants_safetensors(on_torch: Project):
    on_torch.spec["model"] = {"checkpoint": CHECKPOINT}
    assert refusal(on_torch).startswith(
        f"{line_of(on_torch, CHECKPOINT)}: checkpoint 'FOLDER/tiny.pt': is not a .safetensors file"
    )


@pytest.fixture
def on_checkpoint(tmp_path: Path) -> Project:
    project = torch_project(tmp_path, ".safetensors")
    project.spec["model"] = {"checkpoint": "tiny.safetensors"}
    step = {"pass": "quantize-weights", "bits": 8, "layers": [{"match": "conv*", "skip": True}]}
    project.spec["passes"] = [step]
    project.spec["exports"] = [{"format": "safetensors"}]
    return project


def test_a_bare_checkpoint_cannot_be_run_on_data(on_checkpoint: Project):
    message = refusal(on_checkpoint)
    assert ": data.calibration: cannot be used: a bare checkpoint has no graph" in message
    assert "set model.factory" in message


@pytest.mark.parametrize(
    ("step", "lacking", "remedy"),
    [
        ({"pass": "quantize-static"}, "graph and run", "set model.factory"),
        ({"pass": "fuse"}, "graph", "set model.factory"),
        (
            {"pass": "quantize-weights", "method": "gptq"},
            "graph and run",
            "set data.calibration or model.factory",
        ),
        (
            {"pass": "quantize-weights", "method": "reconstruct"},
            "graph and run",
            "set data.calibration or model.factory",
        ),
    ],
)
def test_a_bare_checkpoint_offers_weights_only(
    on_checkpoint: Project, step: dict[str, str], lacking: str, remedy: str
):
    on_checkpoint.spec |= {"data": {}, "passes": [step]}
    assert refusal(on_checkpoint).endswith(
        f"pass '{step['pass']}': needs {lacking}; a bare checkpoint offers weights only; {remedy}"
    )


def test_a_plan_without_a_graph(on_checkpoint: Project):
    on_checkpoint.spec["data"] = {}
    plan = on_checkpoint.plan()
    assert plan.macs is None
    assert [(row.name, row.actions[0]) for row in plan.rows][-1] == ("fc", "int8/channel")
    fc = plan.rows[-1]
    assert (fc.bytes_before, fc.bytes_after) == (4 * 8 * 4, 4 * 8 + 4 * 4)
    assert plan.exports[0].bytes > sum(row.bytes_after for row in plan.rows)
    assert "MACs" not in plain_text(plan_page(plan))


def test_a_plan_says_where_latency_is_not_judged(on_onnx: Project, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("compressor.models.onnx.runtimes.usable_providers", lambda: {"cpu"})
    on_onnx.spec["exports"] = [
        {"format": "onnx", "target": "ort-cuda"},
        {"format": "safetensors"},
    ]
    assert on_onnx.plan().warnings == (
        "onnx: its latency is not judged: meant for ONNX Runtime's CUDA provider, which does not "
        "start here, timed in ONNX Runtime on the CPU",
    )
    on_onnx.spec["exports"] = [{"format": "onnx", "target": "ort-cpu"}, {"format": "safetensors"}]
    assert not on_onnx.plan().warnings


@pytest.mark.parametrize("limit", [99.0, 100.0, 101.0])
def test_a_limit_that_nothing_breaks_is_refused(on_onnx: Project, limit: float):
    on_onnx.spec["limits"] = {"metric-drop": limit}
    refused = pytest.raises(SpecError, match=r"metric-drop: is 10\d, and accuracy can lose 100 at")
    with refused if limit >= 100 else nullcontext():
        on_onnx.plan()
