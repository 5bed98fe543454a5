"""How many of the calibration samples are held back to search on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from ruamel.yaml import YAML

from compressor.lab.tune.search_data import search_data
from compressor.run.plan import make_plan
from compressor.spec.load import load_spec


@pytest.mark.parametrize(
    ("samples", "held"), [(64, 64), (128, 32), (1200, 288), (1400, 352), (4000, 2048)]
)
def test_beyond_what_calibrates_well_samples_are_searched_on(
    tmp_path: Path, samples: int, held: int
) -> None:
    """Below 32 in a quarter, they do both; above 1,024 beside them, they are more than that."""
    weights = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4]) for n in "xy"]
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "mix")
    graph = helper.make_graph([node], "mix", ends[:1], ends[1:], [weights])
    imports = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), tmp_path / "m.onnx")
    rows = np.random.default_rng(0).standard_normal((samples, 4)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=rows, label=rows.argmax(1))
    source = {"npz": "d.npz", "inputs": {"x": "x"}, "target": "label", "batch": 32}
    document = {
        "version": 1,
        "name": "mix",
        "model": {"onnx": "m.onnx"},
        "data": {"calibration": source, "evaluation": source},
        "metric": "accuracy",
        "passes": [{"pass": "quantize-static"}],
        "exports": [{"format": "onnx", "target": "ort-cpu"}],
        "output": "out",
    }
    with (tmp_path / "spec.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(document, file)
    found = search_data(make_plan(load_spec(tmp_path / "spec.yaml", [])))
    assert sum(part.samples or 0 for part in found.parts) == held
    assert found.calibration == ({} if held == samples else {"samples": samples - held})
