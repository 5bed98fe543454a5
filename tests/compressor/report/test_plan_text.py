import json
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from compressor.report.pages.plan import NARROW, plan_json, plan_page
from compressor.report.terminal import plain_text
from compressor.run.export_plan import ExportPlan
from compressor.run.layer_rows import LayerRow
from compressor.run.plan import PassPlan, Plan
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
        "exports": (
            ExportPlan("safetensors", 305_900, float_bytes=1_112_000),
            ExportPlan("onnx", 311_000, float_bytes=1_089_032),
        ),
        "rows": (
            LayerRow(
                "conv1",
                "Conv",
                (16, 3, 3, 3),
                ("+batch-norm", "int8/channel"),
                ("", ""),
                1_792,
                560,
            ),
            LayerRow(
                "linear",
                "Gemm",
                (10, 64),
                ("-", "keep"),
                ("", "rule 'linear' says skip"),
                2_600,
                2_600,
            ),
        ),
        "previews": (),
        "bytes": 1_089_032,
        "parameters": 269_722,
        "macs": 40_813_184,
        "peak_memory": 612_000_000,
        "warnings": (),
    }
    return Plan(**{**whole, **changes})


def test_the_plan_is_as_agreed(golden: Callable[[str, str], None]):
    golden("plan.txt", plain_text(plan_page(make_plan())))
    golden("plan_layers.txt", plain_text(plan_page(make_plan(), every_layer=True)))


def test_the_text_is_the_table_without_colours(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = plain_text(plan_page(make_plan()))
    assert text == plain_text(plan_page(make_plan()))
    assert "\x1b" not in text


def test_a_long_row_is_neither_cut_nor_folded():
    name = "model.layers." + "deep." * 80 + "weight"
    row = LayerRow(name, "MatMul", (4096, 4096), ("-", "-"), ("", ""), 67_108_864, 67_108_864)
    text = plain_text(plan_page(make_plan(rows=(row,)), every_layer=True))
    lines = [line for line in text.splitlines() if name in line]
    assert len(lines) == 1
    assert lines[0].endswith("67.1 MB   67.1 MB")


def test_names_are_shown_as_they_are():
    row = LayerRow("[bold]\x1b[31mx", "Gemm", (1, 1), ("-", "-"), ("", ""), 4, 4)
    assert r"[bold]\x1b[31mx" in plain_text(plan_page(make_plan(rows=(row,))))


def test_a_plan_without_passes_prints():
    row = LayerRow("fc", "Gemm", (2, 2), (), (), 16, 16)
    text = plain_text(plan_page(make_plan(passes=(), rows=(row,))))
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
        "reasons": ["quantize-static: rule 'linear' says skip"],
        "bytes_before": 2600,
        "bytes_after": 2600,
    }
    assert document["passes"][1]["touched"] == 1
    assert document["passes"][1]["statistics"] == 1
    assert not document["estimate"]
    assert not document["exports"][1]["estimate"]
    assert document["exports"][1]["size_ratio"] == pytest.approx(0.28557, abs=1e-5)
    assert document["peak_memory"] == 612_000_000


def rows_of(*layers: tuple[str, str]) -> tuple[LayerRow, ...]:
    """Layers by name and by what `quantize-static` does to them."""
    return tuple(
        LayerRow(name, "Conv", (8, 8), ("-", action), ("", ""), 1000, 250)
        for name, action in layers
    )


def shown(rows: tuple[LayerRow, ...], width: int = NARROW) -> list[list[str]]:
    """The cells of the rows of layers, below the headings."""
    lines = plain_text(plan_page(make_plan(rows=rows), width=width)).splitlines()
    return [re.split(" {2,}", line.rstrip()) for line in lines[4 : lines.index("", 4)]]


DONE = ["quantize-static: int8"]


@pytest.mark.parametrize(
    ("names", "common"),
    [
        (["layer1.0.conv1", "layer1.0.conv2", "layer1.2.conv1"], "layer1.*.conv*"),
        (["model.layers.0.q_proj", "model.layers.11.gate_proj"], "model.layers.*.*_proj"),
        (["stem", "block1.conv1", "head"], "stem … head"),
        (["fc1", "fc2"], "fc*"),
        (["a.b", "c.d"], "a.b … c.d"),
        (["conv[1]", "conv[2]"], "conv[1] … conv[2]"),  # no pattern of rules says that
    ],
)
def test_layers_of_one_kind_share_a_row(names: list[str], common: str):
    rows = rows_of(("first", "int4"), *((name, "int8") for name in names))
    assert shown(rows)[2:] == [
        [common, "Conv", str(len(names)), f"{len(names)}.00 kB", f"{len(names) * 250} B"],
        ["", *DONE],
    ]


def test_a_pattern_is_shown_only_where_it_fits_these_layers_alone():
    rows = rows_of(("l.0.fc", "int8"), ("l.1.fc", "int4"), ("l.2.fc", "int8"))
    assert [row[0] for row in shown(rows)] == ["l.0.fc and 1 more", "", "l.1.fc", ""]


@pytest.mark.parametrize(
    ("actions", "together"),
    [
        (("fold batch-norm block1.bn1", "fold batch-norm block2.bn1"), "fold batch-norm …"),
        (("fold /bn/Mul", "fold /bn_1/Mul"), "fold …"),
        (("fold Conv_3", "fold Conv_14"), "fold …"),
        (("int8/channel x uint8", "int4/channel x uint8"), ""),
        (("32 of 64 channels", "16 of 64 channels"), ""),
        (("energy 0.9, rank up to 8 of 32", "energy 0.9, rank up to 8 of 64"), ""),
    ],
)
def test_names_in_what_happens_do_not_keep_layers_apart(actions: tuple[str, str], together: str):
    found = shown(rows_of(("a", actions[0]), ("b", actions[1])), width=120)
    if together:
        assert found[1:] == [["", f"quantize-static: {together}"]]
    else:
        assert [row[-1] for row in found[1::2]] == [f"quantize-static: {a}" for a in actions]


def test_operators_and_reasons_keep_layers_apart():
    conv, gemm = rows_of(("a", "keep"), ("b", "keep"))
    assert len(shown((conv, replace(gemm, kind="Gemm")))) == 4
    assert len(shown((conv, replace(gemm, reasons=("", "it is the output"))), 120)) == 4


@pytest.mark.parametrize("estimate", [False, True])
def test_the_layers_fit_80_columns(estimate: bool):
    long = rows_of(
        ("model." + "deep." * 80 + "first", "keep"),
        ("model.last", "rank 12 of 768 " * 9),
    )
    rows = tuple(replace(row, kind="ConvTranspose", reasons=("", "why " * 40)) for row in long)
    steps = tuple(replace(step, estimate=estimate) for step in make_plan().passes)
    plan = make_plan(rows=rows, passes=steps)
    table = plain_text(plan_page(plan)).split("\n\n")[1].splitlines()
    assert max(map(len, table)) <= NARROW
    name = next(line.split()[0] for line in table if line.startswith("model.deep"))
    assert "…" in name
    assert name.endswith(".first")
    wide = plain_text(plan_page(plan, width=500))
    assert rows[0].name in wide
    assert plan_json(plan)["layers"][0]["name"] == rows[0].name


def test_an_estimate_is_called_one():
    first, second = make_plan().passes
    plan = make_plan(
        passes=(first, replace(second, estimate=True)),
        exports=(
            ExportPlan("safetensors", 305_900, at_most=True, estimate=True),
            ExportPlan("onnx", 311_000, estimate=True),
        ),
    )
    text = plain_text(plan_page(plan))
    assert re.findall("about .*B|after .about.", text) == [
        "after (about)",
        "about 283 kB",
        "about 306 kB",
        "about 311 kB",
    ]
    assert "at most about 306 kB" in text
    document = plan_json(plan)
    assert document["estimate"]
    assert [step["estimate"] for step in document["passes"]] == [False, True]
    assert [export["estimate"] for export in document["exports"]] == [True, True]
