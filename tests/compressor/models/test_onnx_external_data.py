"""Weights of ONNX files that lie in other files: where they may lie, and what is read of them."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor import catalog
from compressor.errors import ModelError
from compressor.models.onnx.carrier import open_onnx
from compressor.models.onnx.module import file_runner
from compressor.models.torch.lowering import OPSET
from compressor.types.passes import PassContext
from tests.compressor.models.test_onnx_file import FLOAT, weight
from tests.compressor.tiny_project import sample_images, tiny_onnx


def external(folder: Path, **changes: str) -> Path:
    """Write a file whose weights lie in another, and change what it says of the last of them."""
    path = folder / "m.onnx"
    onnx.save(tiny_onnx(), path, save_as_external_data=True, location="w.data", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    entries = {entry.key: entry for entry in weight(model, "fc.bias").external_data}
    for key, value in changes.items():
        entries[key].value = value
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": "-4"}, r"'fc.bias' has the offset '-4' in its external data"),
        ({"offset": "near the end"}, r"has the offset 'near the end'"),
        ({"offset": "²"}, r"has the offset '²'"),
        ({"length": "-16"}, r"has the length '-16'"),
        ({"length": "20"}, r"'fc.bias' has 20 bytes, but its shape \[4\] needs 16"),
        ({"offset": "99999999999999999999"}, r"'w.data' is missing or too short"),
        ({"location": "w\0.data"}, r"names no valid file for its data"),
        ({"location": ""}, r"names no valid file for its data"),
        ({"location": "."}, r"external data file '.' is missing or too short"),
        ({"location": "a/../../w.data"}, r"keeps 'fc.bias' outside its folder"),
    ],
)
def test_places_of_external_data(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    path = external(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        open_onnx(path, OPSET)


def test_external_data_in_a_folder_below(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "m.onnx"
    path_of_data = Path("data") / "w.data"
    external(tmp_path, location=str(path_of_data))
    content = (tmp_path / "w.data").read_bytes()
    (tmp_path / path_of_data).write_bytes(content)
    model = open_onnx(path, OPSET)
    expected = numpy_helper.to_array(weight(tiny_onnx(), "fc.bias"))
    bias = model.graph().graph.initializers["fc.bias"].const_value
    assert bias is not None
    np.testing.assert_array_equal(bias.numpy(), expected)
    model.runner().run({"image": sample_images(0)})


def test_arrays_outlive_the_writing_of_their_graph(tmp_path: Path) -> None:
    """Passes hold arrays of a file's data, which is mapped, while the result is written."""
    carrier = open_onnx(external(tmp_path), OPSET)
    bias = next(t for t in carrier.tensors().values() if t.name == "fc.bias").read()
    kept = bias.clone()
    written = tmp_path / "written"
    written.mkdir()
    carrier.save(written)
    assert bias.equal(kept)
    assert carrier.tensors()["fc.bias"].read().equal(kept)
    assert carrier.restore(written).tensors()["fc.bias"].read().equal(kept)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [9, 18])
def test_a_model_of_over_two_gigabytes(tmp_path: Path, opset: int) -> None:
    """Nothing of it is read to open, plan and predict it; the file is a hole on the disk."""
    side, layers = 16384, 3
    size = side * side * 4
    with (tmp_path / "w.data").open("wb") as file:
        file.truncate(layers * size)
    nodes, tensors = [], []
    for index in range(layers):
        name, source = f"l{index}.weight", f"h{index}" if index else "x"
        tensor = TensorProto(name=name, data_type=FLOAT, dims=[side, side])
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in (("location", "w.data"), ("offset", str(index * size))):
            tensor.external_data.add(key=key, value=text)
        tensors.append(tensor)
        nodes.append(helper.make_node("MatMul", [source, name], [f"h{index + 1}"]))
    ends = [helper.make_tensor_value_info(n, FLOAT, ["n", side]) for n in ("x", f"h{layers}")]
    graph = helper.make_graph(nodes, "big", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)
    (tmp_path / "big.onnx").write_bytes(model.SerializeToString())
    before = anonymous_bytes()
    carrier = open_onnx(tmp_path / "big.onnx", OPSET)
    step = catalog.load("pass", "quantize-dynamic")()
    after = step.preview(carrier, PassContext(targets=frozenset({"ort-cpu"})), {})
    exporter = catalog.load("exporter", "onnx")()
    exporter.check(after)
    assert exporter.predict(after) == pytest.approx(layers * side * side, rel=0.01)
    assert exporter.predict(carrier) == pytest.approx(layers * size, rel=0.01)
    assert anonymous_bytes() - before < 200e6


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def test_axes_that_lie_in_another_file_are_run(tmp_path: Path) -> None:
    """ONNX Runtime takes the file's weights from there, and refuses its axes."""
    axes = numpy_helper.from_array(np.array([2, 3]), "axes")
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["x", "axes"], ["y"], keepdims=0)],
        "means",
        [value("x", TensorProto.FLOAT, ["n", 3, 4, 4])],
        [value("y", TensorProto.FLOAT, ["n", 3])],
        [axes],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 4)).astype(np.float32)
    found = file_runner(path, open_onnx(path, OPSET).graph()).run({"x": x})
    np.testing.assert_allclose(found["y"], x.mean((2, 3)), rtol=1e-5)


def test_data_of_a_linked_model_lie_beside_what_it_names(tmp_path: Path) -> None:
    """As Hugging Face's cache keeps them; a link alone may not lead out of the folder."""
    folders = [tmp_path / name for name in ("blobs", "snapshot", "elsewhere")]
    for folder in folders:
        folder.mkdir()
    blobs, snapshot, elsewhere = folders
    file = external(blobs)
    (blobs / "w.data").rename(blobs / "0a")
    (snapshot / "m.onnx").symlink_to("../blobs/m.onnx")
    (snapshot / "w.data").symlink_to("../blobs/0a")
    linked = open_onnx(snapshot / "m.onnx", OPSET)
    (blobs / "w.data").write_bytes((blobs / "0a").read_bytes())
    images = {"image": sample_images(0)}
    expected, found = (c.runner().run(images)["logits"] for c in (open_onnx(file, OPSET), linked))
    np.testing.assert_array_equal(found, expected)
    (elsewhere / "w.data").write_bytes((blobs / "0a").read_bytes())
    (snapshot / "w.data").unlink()
    (snapshot / "w.data").symlink_to("../elsewhere/w.data")
    with pytest.raises(ModelError, match=r"outside its folder, at 'w\.data'"):
        open_onnx(snapshot / "m.onnx", OPSET)
