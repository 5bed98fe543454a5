import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from compressor.report.pages.plan import plan_json, plan_page, plan_text
from compressor.report.terminal import plain_text
from compressor.run.plan import ExportPlan, LayerRow, PassPlan, Plan
from compressor.types.passes import LayerPlan
from compressor.types.statistics import Request
from compressor.types.tensors import TensorSpec


def stand_in(**attributes: Any) -> Any:
    return SimpleNamespace(**attributes)


def make_plan(**changes: Any) -> Plan:
    fuse = PassPlan("fuse", (LayerPlan("conv1", "+batch-norm"),), (), (), 1_083_432)
    quantize = PassPlan(
        "quantize-static",
        (
            LayerPlan("conv1", "int8/channel"),
            LayerPlan("linear", "keep", "rule 'linear' says skip", touched=False),
        ),
        (Request("image", "image", "mse", {}),),
        ("range of image comes from 512 samples",),
        283_204,
    )
    whole: dict[str, Any] = {
        "spec": stand_in(name="resnet20-edge"),
        "model": stand_in(
            carrier=stand_in(inputs=(TensorSpec("image", ("batch", 3, 32, 32), "float32"),))
        ),
        "data": {},
        "metric": stand_in(name="accuracy"),
        "context": stand_in(),
        "passes": (fuse, quantize),
        "exports": (ExportPlan("safetensors", 305_900), ExportPlan("onnx", 311_000)),
        "rows": (
            LayerRow(
                "conv1", "Conv", (16, 3, 3, 3), ("+batch-norm", "int8/channel"), (), 1_792, 560
            ),
            LayerRow(
                "linear",
                "Gemm",
                (10, 64),
                ("-", "keep"),
                ("rule 'linear' says skip",),
                2_600,
                2_600,
            ),
        ),
        "final": stand_in(),
        "bytes": 1_089_032,
        "parameters": 269_722,
        "macs": 40_813_184,
        "peak_memory": 612_000_000,
        "warnings": (),
    }
    return Plan(**{**whole, **changes})


def test_the_plan_is_as_agreed(golden: Callable[[str, str], None]):
    golden("plan.txt", plan_text(make_plan()))


def test_the_text_is_the_table_without_colours(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = plan_text(make_plan())
    assert text == plain_text(plan_page(make_plan()))
    assert "\x1b" not in text


def test_a_long_row_is_neither_cut_nor_folded():
    name = "model.layers." + "deep." * 80 + "weight"
    row = LayerRow(name, "MatMul", (4096, 4096), ("-", "-"), (), 67_108_864, 67_108_864)
    lines = [line for line in plan_text(make_plan(rows=(row,))).splitlines() if name in line]
    assert len(lines) == 1
    assert lines[0].endswith("67.1 MB   67.1 MB")


def test_names_are_shown_as_they_are():
    row = LayerRow("[bold]\x1b[31mx", "Gemm", (1, 1), ("-", "-"), (), 4, 4)
    assert r"[bold]\x1b[31mx" in plan_text(make_plan(rows=(row,)))


def test_a_plan_without_passes_prints():
    row = LayerRow("fc", "Gemm", (2, 2), (), (), 16, 16)
    text = plan_text(make_plan(passes=(), rows=(row,)))
    assert "pass" not in text
    assert "fc" in text


def test_the_json_form_holds_the_same():
    document = plan_json(make_plan())
    assert json.loads(json.dumps(document)) == document
    assert document["model"]["inputs"] == [
        {"name": "image", "shape": ["batch", 3, 32, 32], "dtype": "float32"}
    ]
    assert document["layers"][1] == {
        "name": "linear",
        "kind": "Gemm",
        "shape": [10, 64],
        "actions": [
            {"pass": "fuse", "action": None},
            {"pass": "quantize-static", "action": "keep"},
        ],
        "reasons": ["rule 'linear' says skip"],
        "bytes_before": 2600,
        "bytes_after": 2600,
    }
    assert document["passes"][1]["touched"] == 1
    assert document["passes"][1]["statistics"] == 1
    assert document["exports"][1]["size_ratio"] == pytest.approx(0.28557, abs=1e-5)
    assert document["peak_memory"] == 612_000_000
