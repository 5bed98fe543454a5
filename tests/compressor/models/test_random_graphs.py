"""Graphs that draw random numbers are refused before anything is judged by their outputs."""

from contextlib import nullcontext
from pathlib import Path

import onnx
import pytest

from compressor import Spec
from compressor.errors import ModelError
from compressor.front.spec import checked
from compressor.lab.starter import starter_text
from compressor.models.onnx.carrier import open_onnx
from compressor.models.onnx.checks import check_repeats
from compressor.models.torch.lowering import OPSET
from compressor.run.plan import make_plan

NOISE = "n = RandomNormalLike(h) y = Add(h, n)"


def written(nodes: str, path: Path) -> Path:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 4] x) => (float[N, 4] y) {'
    weight = "w = Constant <value = float[4, 4] {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}> ()"
    model = onnx.parser.parse_model(f"{text} {weight} h = MatMul(x, w) {nodes} }}")
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        (NOISE, r"draws random numbers.*noise as an input"),
        ("t = Constant <value = bool {1}> () y = Dropout(h, , t)", r"draws.*for inference"),
        ("t = Constant <value = bool {0}> () y = Dropout(h, , t)", ""),
        ("y = Dropout(h)", ""),
        (
            "s = Constant <value = int64[1] {0}> () e = Constant <value = int64[1] {4}> () "
            "a = Constant <value = int64[1] {1}> () y = Slice(h, s, e, a)",
            "",
        ),
    ],
)
def test_a_graph_that_draws_random_numbers_is_no_function(
    nodes: str, says: str, tmp_path: Path
) -> None:
    graph = open_onnx(written(nodes, tmp_path / "m.onnx"), OPSET).graph()
    with pytest.raises(ModelError, match=says) if says else nullcontext():
        check_repeats(graph, "model")


def test_plan_and_init_refuse_it(tmp_path: Path) -> None:
    path = written(NOISE, tmp_path / "m.onnx")
    exports = [{"format": "onnx"}]
    spec = Spec(name="m", model={"onnx": str(path)}, passes=[{"pass": "fuse"}], exports=exports)
    with pytest.raises(ModelError, match=r"RandomNormalLike.*draws"):
        make_plan(checked(spec))
    with pytest.raises(ModelError, match=r"RandomNormalLike.*draws"):
        starter_text(path, "m.onnx", "m.yaml")
