"""Forms in which tensors are stored: which one is chosen, and that nothing of them is lost."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from compressor.errors import ArtifactError, ModelError
from compressor.exporters import SafetensorsExporter
from compressor.graph.codes import BITS
from compressor.graph.values import is_op
from compressor.models.codec.load import load
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.types.tensors import Array
from tests.compressor.exporters.hand_made import CONTEXT, Builder, entry, quantized, rows

SPARSE_TYPES = [
    *(np.float32, np.float16, np.float64, np.int8, np.uint8, np.int16, np.int32, np.int64),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]


def holding(array: Any) -> OnnxCarrier:
    """A model that returns one of its tensors and ignores its input."""
    made = Builder()
    x = entry(features=2)
    weight = made.constant("w", array)
    model = made.model([x], made.node("Identity", [weight], "y"))
    model.graph.outputs[0].dtype = weight.dtype
    model.graph.outputs[0].shape = weight.shape
    return OnnxCarrier(model)


def stored(array: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """Write a tensor, and return what ``model.json`` says of it."""
    SafetensorsExporter(**options).write(holding(array), folder, CONTEXT)
    described: dict[str, Any] = json.loads((folder / "model.json").read_bytes())["tensors"]["w"]
    return described


def returned(folder: Path) -> torch.Tensor:
    output: torch.Tensor = load(folder)(torch.zeros(1, 2))["output"]
    return output


def raw(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def thinned(shape: tuple[int, ...], dtype: Any, kept: float, seed: int) -> Array:
    """Random bit patterns, NaN and negative zeros among them, of which a share is kept."""
    noise = np.random.default_rng(seed)
    bits = noise.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    bits[noise.random(shape) >= kept] = 0
    return bits.view(dtype).reshape(shape)


def two_of_four(shape: tuple[int, ...], dtype: Any, axis: int, n: int = 2) -> Array:
    noise = np.random.default_rng(1)
    full = noise.integers(1, 100, shape).astype(dtype)
    moved = np.moveaxis(full, axis, -1)
    order = noise.random((*moved.shape[:-1], moved.shape[-1] // 4, 4)).argsort(-1)
    moved[(order >= n).reshape(moved.shape)] = 0
    return full


@settings(max_examples=40)
@given(
    st.sampled_from(SPARSE_TYPES),
    st.tuples(st.integers(30, 45), st.integers(30, 45)),
    st.floats(0, 1),
    st.integers(0, 99),
)
def test_whatever_is_sparse_comes_back_bit_for_bit(
    dtype: Any, shape: tuple[int, int], kept: float, seed: int
) -> None:
    array = thinned(shape, dtype, kept, seed)
    with tempfile.TemporaryDirectory() as folder:
        described = stored(array, Path(folder))
        assert bytes_of(returned(Path(folder))) == raw(array)
        size = sum(t.nbytes for t in load_file(Path(folder) / "model.safetensors").values())
        values = np.count_nonzero(np.frombuffer(raw(array), f"u{array.itemsize}"))
        masked = values * array.itemsize + -(-array.size // 8)
        if array.size >= 1024 and masked < 0.89 * array.nbytes:
            assert described["form"] in ("bitmask", "n-of-m")
            assert size <= 1.06 * masked
        else:
            assert size <= array.nbytes


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("shape", "axis"), [((64, 32), 1), ((64, 32), 0), ((32, 8, 3, 3), 1), ((63, 32), 1)]
)
def test_two_of_four(dtype: Any, shape: tuple[int, ...], axis: int, tmp_path: Path) -> None:
    array = two_of_four(shape, dtype, axis)
    described = stored(array, tmp_path)
    expected = {"form": "n-of-m", "n": 2, "m": 4, "axis": axis, "indices": "w.indices"}
    assert expected.items() <= described.items()
    parts = load_file(tmp_path / "model.safetensors")
    # Half of the values, and two bits for the place of each.
    assert parts["w"].shape == (array.size // 2,)
    assert parts["w.indices"].shape == (array.size // 8,)
    assert bytes_of(returned(tmp_path)) == raw(array)


def test_one_of_four_takes_less_than_a_mask(tmp_path: Path) -> None:
    array = two_of_four((64, 32), np.float16, 1, n=1)
    assert stored(array, tmp_path)["n"] == 1
    parts = load_file(tmp_path / "model.safetensors")
    assert sum(t.nbytes for t in parts.values()) == array.size // 4 * 2 + array.size // 16
    assert bytes_of(returned(tmp_path)) == raw(array)


@pytest.mark.parametrize(
    ("array", "options"),
    [
        (thinned((64, 64), np.float32, 0.3, 0), {"sparse": "never"}),
        (thinned((64, 64), np.int8, 0.8, 0), {}),  # a mask would take what it saves
        (thinned((4096,), np.float32, 0.3, 0), {}),  # no weight
        (thinned((8, 8), np.float32, 0.3, 0), {}),
        (np.zeros((64, 64), bool), {}),
        (np.zeros((64, 64), np.complex64), {}),
    ],
)
def test_what_stays_as_it_is(array: Array, options: dict[str, Any], tmp_path: Path) -> None:
    assert stored(array, tmp_path, **options).keys() == {"dtype", "shape", "crc32"}
    assert bytes_of(returned(tmp_path)) == raw(array)


def test_names_that_are_taken(tmp_path: Path) -> None:
    made = Builder()
    x = entry(features=2)
    weights = [
        made.constant(name, thinned((64, 64), np.float32, 0.3, i))
        for i, name in enumerate(("w", "w.mask", "w.mask_"))
    ]
    value = made.node("Add", [made.node("Add", weights[:2], "one"), weights[2]], "y")
    carrier = OnnxCarrier(made.model([x], value, 64))
    SafetensorsExporter().write(carrier, tmp_path, CONTEXT)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == {"w", "w.mask", "w.mask_", "w.mask__", "w.mask.mask", "w.mask_.mask"}
    state = load(tmp_path).state_dict()
    for value in weights:
        assert value.const_value is not None
        assert value.name is not None
        assert bytes_of(state[value.name].clone()) == raw(value.const_value.numpy())


def three_bits(low: int = -4, high: int = 3) -> OnnxCarrier:
    carrier = quantized(ir.DataType.INT4, None, blocks=True)
    noise = np.random.default_rng(0)
    for node in carrier.graph().graph:
        if is_op(node, "DequantizeLinear"):
            node.metadata_props[BITS] = "3"
            codes = node.inputs[0]
            assert codes is not None
            assert codes.shape is not None
            made = noise.integers(low, high + 1, codes.shape.numpy()).astype(ml_dtypes.int4)
            codes.const_value = ir.tensor(made)
    return carrier


def test_codes_of_3_bits_lie_eight_in_three_bytes(tmp_path: Path) -> None:
    carrier, exporter = three_bits(), SafetensorsExporter()
    files = exporter.write(carrier, tmp_path, CONTEXT)
    document = json.loads((tmp_path / "model.json").read_bytes())
    weight = {"dtype": "int4", "shape": [64, 512], "form": "bits", "bits": 3}
    assert document["tensors"]["first.weight"].items() >= weight.items()
    value = carrier.graph().graph.initializers["first.weight"].const_value
    assert value is not None
    codes = value.numpy().astype(np.int64).ravel()
    with safe_open(files[0], framework="pt") as file:
        packed = file.get_tensor("first.weight")
    assert packed.nbytes == codes.size * 3 // 8
    first = sum((int(code) & 7) << 3 * index for index, code in enumerate(codes[:8]))
    assert int.from_bytes(bytes(packed[:3].numpy()), "little") == first
    found = load(tmp_path).state_dict()["first.weight"]
    assert found.dtype == torch.int8
    np.testing.assert_array_equal(found.numpy().ravel(), codes)
    name = len("a-name-of-usual-length") - len("a-test")  # the header is padded to 8 bytes
    assert abs(exporter.predict(carrier) - sum(f.stat().st_size for f in files)) <= name


def test_codes_that_are_wider_than_the_graph_says(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"first\.weight.* from -4 to 4, not .* of 3 bits"):
        SafetensorsExporter().write(three_bits(high=4), tmp_path, CONTEXT)


def test_no_tensor_is_evaluated_twice(tmp_path: Path) -> None:
    calls = []

    def compute() -> ir.TensorProtocol:
        calls.append(1)
        return ir.tensor(thinned((64, 64), np.float32, 0.3, 0))

    lazy = ir.LazyTensor(compute, dtype=ir.DataType.FLOAT, shape=ir.Shape((64, 64)))
    carrier, exporter = holding(lazy), SafetensorsExporter()
    exporter.check(carrier)
    dense = SafetensorsExporter(sparse="never").predict(carrier)
    assert dense <= exporter.predict(carrier) < dense + 200
    assert not calls
    files = exporter.write(carrier, tmp_path, CONTEXT)
    assert len(calls) == 1
    # Zeros are not known before: what is predicted is what it takes without them.
    assert sum(f.stat().st_size for f in files) < exporter.predict(carrier) - 8000


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        stored(thinned((64, 64), np.float32, 0.3, 0), tmp_path / name)
        found.append([p.read_bytes() for p in sorted((tmp_path / name).iterdir())])
    assert found[0] == found[1]


# ------------------------------------------------------------------------------- shards


def sharded(folder: Path, size: int = 20_000) -> tuple[Path, ...]:
    carrier = quantized(ir.DataType.INT4, None, blocks=True)
    return SafetensorsExporter(max_shard_size=size).write(carrier, folder, CONTEXT)


def test_shards_and_their_index(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    names = [f.name for f in files]
    assert names == [
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.json",
    ]
    index = json.loads(files[0].read_bytes())
    places = {name: p.name for p in files[1:3] for name in load_file(p)}
    assert index["weight_map"] == places
    sizes = [t.nbytes for p in files[1:3] for t in load_file(p).values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert json.loads(files[-1].read_bytes())["weights"] == files[0].name
    whole = tmp_path / "whole"
    whole.mkdir()
    carrier = quantized(ir.DataType.INT4, None, blocks=True)
    SafetensorsExporter().write(carrier, whole, CONTEXT)
    x = torch.from_numpy(rows()["x"])
    assert torch.equal(load(tmp_path)(x)["output"], load(whole)(x)["output"])
    exporter = SafetensorsExporter(max_shard_size=20_000)
    assert abs(exporter.predict(carrier) - sum(f.stat().st_size for f in files)) <= 2 * 16
    runner = exporter.open(files[0])
    assert runner.run(rows())["output"].shape == (7, 10)


def test_no_shard_is_larger_than_was_asked(tmp_path: Path) -> None:
    for path in sharded(tmp_path, 5000)[1:-1]:
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 5000


def test_a_mask_lies_with_its_values(tmp_path: Path) -> None:
    stored(thinned((64, 64), np.float32, 0.3, 0), tmp_path, max_shard_size=1)
    assert set(load_file(tmp_path / "model.safetensors")) == {"w", "w.mask"}


def test_a_missing_shard(tmp_path: Path) -> None:
    sharded(tmp_path)[1].unlink()
    with pytest.raises(ModelError, match="names a missing shard 'model-00001-of-00002"):
        load(tmp_path)


def test_a_shard_that_holds_something_else(tmp_path: Path) -> None:
    one, two = sharded(tmp_path)[1:3]
    whole, other = load_file(one), load_file(two)
    twice = sorted(other)[0]
    changes: list[tuple[dict[str, torch.Tensor], str]] = [
        (whole | {"more": torch.zeros(3)}, "does not list 'more', which 'model-00001-of-00002"),
        ({}, r"places '.*' in 'model-00001-of-00002.safetensors', which does not hold it"),
        (whole | {twice: other[twice]}, f"hold '{twice}', as 'model-00001-of-00002"),
    ]
    for tensors, message in changes:
        one.unlink()
        save_file(tensors, one)
        with pytest.raises(ModelError, match=message):
            load(tmp_path)


# ------------------------------------------------------------------------------- damaged files


def _change(folder: Path, name: str, value: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = value
    path.unlink()
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("array", "part", "value", "message"),
    [
        (
            thinned((64, 64), np.float32, 0.3, 0),
            "w.mask",
            torch.zeros(512, dtype=torch.uint8),
            r"damaged tensor 'w' \(its mask marks 0 elements, \d+ values are stored\)",
        ),
        (
            thinned((64, 64), np.float32, 0.3, 0),
            "w",
            torch.zeros(3),
            r"damaged tensor 'w' \(its mask marks \d+ elements, 3 values are stored\)",
        ),
        (
            two_of_four((64, 32), np.float16, 1),
            "w.indices",
            torch.zeros(256, dtype=torch.uint8),
            r"damaged tensor 'w' \(its indices do not ascend within a group\)",
        ),
    ],
)
def test_parts_that_contradict_each_other(
    array: Array, part: str, value: torch.Tensor, message: str, tmp_path: Path
) -> None:
    stored(array, tmp_path)
    _change(tmp_path, part, value)
    with pytest.raises(ModelError, match=r"'w' of weights .* its checksum differs"):
        load(tmp_path)(torch.zeros(1, 2))
    module = load(tmp_path, verify=False)
    with pytest.raises(ModelError, match=message):
        module(torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("w.mask", torch.zeros(511, dtype=torch.uint8), r"'w.mask' as U8\[511\], not U8\[512\]"),
        ("w.mask", torch.zeros(512), r"'w.mask' as F32\[512\], not U8\[512\]"),
        ("w", torch.zeros(2, 2), r"'w' as F32\[2, 2\], not one axis of F32"),
        ("w", torch.zeros(2, dtype=torch.float16), r"'w' as F16\[2\], not one axis of F32"),
    ],
)
def test_parts_of_other_shapes(
    part: str, value: torch.Tensor, message: str, tmp_path: Path
) -> None:
    stored(thinned((64, 64), np.float32, 0.3, 0), tmp_path)
    _change(tmp_path, part, value)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"form": "zip"}, r"'w', float32\[64, 64\], in a form .*\('zip'\)"),
        ({"form": "bitmask"}, "in a form"),
        ({"form": "bitmask", "mask": 3}, "in a form"),
        ({"form": "bitmask", "mask": "w"}, "stores 'w' for 'w' and for another"),
        ({"form": "bits", "bits": 3}, "in a form"),
        ({"form": "n-of-m", "n": 3, "m": 4, "axis": 1, "indices": "i"}, "in a form"),
        ({"form": "n-of-m", "n": 2, "m": 8, "axis": 1, "indices": "i"}, "in a form"),
        ({"form": "n-of-m", "n": 2, "m": 4, "axis": 2, "indices": "i"}, "in a form"),
        ({"form": "n-of-m", "n": 2, "m": 4, "axis": -1, "indices": "i"}, "in a form"),
        ({"form": "bitmask", "mask": "elsewhere"}, "lack the tensor 'elsewhere'"),
        ({"form": None}, "in a form"),
    ],
)
def test_forms_that_do_not_exist(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    stored(thinned((64, 64), np.float32, 0.3, 0), tmp_path)
    path = tmp_path / "model.json"
    document = json.loads(path.read_bytes())
    document["tensors"]["w"] = {"dtype": "float32", "shape": [64, 64], **fields}
    path.write_text(json.dumps(document))
    weights = tmp_path / "model.safetensors"
    save_file(load_file(weights), weights)  # without the hash of the document
    with pytest.raises(ModelError, match=message):
        load(tmp_path)
