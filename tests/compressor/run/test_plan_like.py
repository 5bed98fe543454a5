"""A plan that follows another of the same model and data."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.report.pages.plan import plan_page
from compressor.report.terminal import plain_text
from compressor.run import export_plan
from compressor.run.plan import make_plan
from compressor.spec.load import load_spec
from tests.compressor.tiny_project import Project

STATIC = {"pass": "quantize-static", "weights": {"bits": 4}}


@pytest.mark.parametrize(
    ("passes", "targets", "planned"),
    [
        ([{"pass": "fuse"}, STATIC], "ort-cpu", []),
        ([{"pass": "fuse"}, {**STATIC, "weights": {"bits": 8}}], "ort-cpu", [QuantizeStatic]),
        ([{"pass": "fuse", "affine": False}, STATIC], "ort-cpu", [Fuse, QuantizeStatic]),
        ([{"pass": "fuse"}], "ort-cpu", []),
        ([{"pass": "fuse"}, STATIC], "openvino", [Fuse, QuantizeStatic]),
    ],
    ids=["same", "other last pass", "other first pass", "fewer", "other target"],
)
def test_only_what_differs_is_planned_again(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch, passes, targets, planned
):
    on_onnx.spec["passes"] = [{"pass": "fuse"}, STATIC]
    on_onnx.spec["exports"] = [{"format": "onnx", "target": "ort-cpu"}]
    before = on_onnx.plan()
    on_onnx.spec["passes"] = passes
    on_onnx.spec["exports"] = [{"format": "onnx", "target": targets}]
    fresh = on_onnx.plan()
    surveyed: list[type] = []
    for kind in (Fuse, QuantizeStatic):

        def survey(step, carrier, context, kind=kind, original=kind.survey):
            surveyed.append(kind)
            return original(step, carrier, context)

        monkeypatch.setattr(kind, "survey", survey)
    with patch.object(export_plan, "_float_bytes", wraps=export_plan._float_bytes) as predicted:
        again = make_plan(load_spec(on_onnx.path), before)
    assert predicted.called == (targets != "ort-cpu")  # the float model is what it was
    assert surveyed == planned
    assert plain_text(plan_page(again)) == plain_text(plan_page(fresh))
    assert [p.bytes for p in again.passes] == [p.bytes for p in fresh.passes]
    assert again.exports == fresh.exports
