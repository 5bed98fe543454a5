"""Layers cut out of their graph, and offsets added to what they write."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compressor.graph.inference import infer_shapes
from compressor.graph.isolated import cut_at, isolated, readers, with_offsets
from compressor.graph.layers import graph_layers
from compressor.graph.values import main_values
from compressor.models.onnx.ort_runner import graph_runner
from compressor.types.tensors import Array, Batch
from tests.compressor.tiny_project import sample_images, tiny_onnx


def tiny() -> ir.Model:
    model = ir.from_proto(tiny_onnx())
    infer_shapes(model)
    return model


def first(batch: Batch) -> Array:
    return next(iter(batch.values()))


def test_a_layer_reads_what_it_is_given():
    model = tiny()
    found = isolated(model, graph_layers(model), main_values(model))
    assert [layer.name for layer in found.layers] == ["conv1", "conv2", "fc"]
    assert found.cut.inputs == {"image": "image", "b": "b_given", "f": "f_given"}
    assert not found.shared
    images = sample_images(0, 2)
    given = {"image": images, "b_given": np.zeros((2, 8, 8, 8), np.float32)}
    given["f_given"] = np.zeros((2, 8), np.float32)
    outputs = graph_runner(found.cut.model).run(given)
    whole = graph_runner(model, ["a"]).run({"image": images})
    assert np.array_equal(outputs["a"], whole["a"])
    bias = model.graph.initializers["fc.bias"].const_value
    assert bias is not None
    assert np.array_equal(outputs["logits"], np.broadcast_to(bias.numpy(), (2, 4)))
    assert np.allclose(outputs["c"][0, :, 3, 3], outputs["c"][1, :, 3, 3])


def test_layers_with_unknown_values_are_left_out():
    model = tiny()
    found = isolated(model, graph_layers(model), {"image", "a", "logits"})
    assert [layer.name for layer in found.layers] == ["conv1"]


def test_a_cut_with_the_values_of_the_whole_gives_the_same():
    model = tiny()
    images = sample_images(0, 3)
    whole = graph_runner(model, ["d", "logits"]).run({"image": images})
    cut = cut_at(model, ["d"], ["logits"])
    assert [node.op_type for node in cut.model.graph] == ["GlobalAveragePool", "Flatten", "Gemm"]
    again = graph_runner(cut.model).run({"image": images, cut.inputs["d"]: whole["d"]})
    assert np.array_equal(again["logits"], whole["logits"])


def test_values_are_computed_from_what_lies_before_the_next_end():
    model = tiny()
    outputs = ["a", "c", "logits"]
    assert readers(model, outputs, ["image", "b", "f"], ["b"]) == ["c"]
    assert readers(model, outputs, ["image", "b"], ["b"]) == ["c", "logits"]
    assert readers(model, outputs, ["image"], ["image"]) == outputs
    assert readers(model, outputs, ["image"], []) == []


def test_offsets_move_a_value_for_all_its_readers():
    model = tiny()
    images = sample_images(0, 2)
    whole = graph_runner(model, ["a"]).run({"image": images})
    moved, offsets = with_offsets(model, ["a", "logits"])
    runner = graph_runner(moved)
    none = {name: np.zeros(1, np.float32) for name in offsets.values()}
    assert np.array_equal(*(first(r) for r in (runner.run({"image": images, **none}), whole)))
    lowered = runner.run({"image": images, **none, offsets["a"]: -1e6 + 0 * whole["a"]})
    zero = graph_runner(cut_at(model, ["b"], ["logits"]).model).run(
        {"image": images, "b_given": np.zeros_like(whole["a"])}
    )
    assert np.allclose(first(lowered), zero["logits"], atol=1e-5)
    shifted = runner.run({"image": images, **none, offsets["logits"]: np.ones(1, np.float32)})
    assert list(shifted) == ["logits"]  # a user's metric may ask for it by its name
    assert np.allclose(first(shifted), whole["logits"] + 1)
    assert [o.name for o in model.graph.outputs] == ["logits"]
