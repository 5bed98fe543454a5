"""The layout of compressed-tensors, against that package's own reading of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.errors import SpecError
from compressor.exporters.safetensors.compressed_tensors import (
    row_multiple,
    stored_entries,
    stored_tensors,
)
from compressor.exporters.safetensors.quantization_config import quantization_config
from compressor.types.layers import Scheme, StoredTensor
from tests.compressor.exporters.hugging_face import codes_of, kept, presets, quantized

BITS = (2, 3, 4, 8)
NAMES = tuple(presets(torch.float32))
BLOCKWISE = [name for name in NAMES if "tensor" not in name]
Q, K, DOWN = (
    f"model.layers.{{}}.{part}.weight" for part in ("self_attn.q_proj", "k_proj", "down_proj")
)


def weight(rows: int, columns: int, dtype: torch.dtype, seed: int = 3) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=numbers) * 0.1 + 0.03).to(dtype)


def sample(
    name: str = "layer.weight",
    preset: str = "int4-g32",
    rows: int = 40,
    dtype: torch.dtype = torch.float32,
) -> StoredTensor:
    return quantized(name, weight(rows, 256, dtype), presets(dtype)[preset])


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def theirs(tensor: StoredTensor) -> torch.Tensor:
    """Let the package decompress what is stored of a weight."""
    compressors: Any = pytest.importorskip(
        "compressed_tensors.compressors", reason="compressed-tensors is not installed"
    )
    quantization: Any = pytest.importorskip("compressed_tensors.quantization")
    config = quantization.QuantizationConfig.model_validate(
        quantization_config({tensor.name: tensor})
    )
    scheme: Any = config.config_groups["group_0"]
    compressor = compressors.BaseCompressor.get_value_from_registry(config.format)
    stored = stored_tensors(tensor, codes_of(tensor))
    local = {name.rpartition(".")[2]: value for name, value in stored.items()}
    found: torch.Tensor = compressor.decompress(local, scheme)["weight"]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("preset", NAMES)
def test_it_is_decompressed_to_what_the_codes_mean(preset: str, dtype: torch.dtype) -> None:
    tensor = sample(preset=preset, rows=37, dtype=dtype)
    want, found = codes_of(tensor).dequantize(), theirs(tensor)
    four_bits = preset in ("nvfp4", "mxfp4")
    assert found.dtype == (torch.bfloat16 if four_bits else dtype)
    # The scale of an nvfp4 tensor is stored as one over it, which is rounded.
    steps = 2**-7 if preset == "nvfp4" else 0
    torch.testing.assert_close(found, want.to(found.dtype), rtol=steps, atol=0)
    assert want.ne(0).any()


@pytest.mark.parametrize("preset", NAMES)
def test_entries_say_what_is_stored(preset: str) -> None:
    tensor = sample(preset=preset, dtype=torch.bfloat16, rows=37)
    entries = stored_entries(tensor)
    stored = stored_tensors(tensor, codes_of(tensor))
    assert list(stored) == [entry.name for entry in entries]
    for entry in entries:
        value = stored[entry.name]
        assert (value.dtype, tuple(value.shape)) == (entry.dtype, entry.shape)
        assert value.is_contiguous()
        assert entry.nbytes == len(as_bytes(value))
    assert tensor.codes is not None
    packed = tensor.codes.scheme.nbytes(*tensor.shape)
    # The layout adds the shape, and fills words.
    assert packed <= sum(entry.nbytes for entry in entries) <= packed + 16 + 4 * 4 * 8


@pytest.mark.parametrize("preset", BLOCKWISE)
@given(rows=st.integers(1, 150), data=st.data())
def test_blocks_of_rows_lie_at_their_offsets(preset: str, rows: int, data: st.DataObject) -> None:
    tensor = sample(preset=preset, rows=rows)
    assert tensor.codes is not None
    codes = codes_of(tensor)
    multiple = row_multiple(tensor.codes.scheme)
    cut = data.draw(st.integers(0, rows // multiple)) * multiple
    whole = stored_tensors(tensor, codes)
    written = {entry.name: bytearray(entry.nbytes) for entry in stored_entries(tensor)}
    for start, stop in ((0, cut), (cut, rows)):
        part = replace(
            codes,
            codes=codes.codes[start:stop],
            scale=codes.scale[start:stop],
            zero_point=codes.zero_point[start:stop],
        )
        block = stored_tensors(tensor, part)
        for entry in stored_entries(tensor):
            data_of_block = as_bytes(block[entry.name])
            offset = entry.offset(start)
            written[entry.name][offset : offset + len(data_of_block)] = data_of_block
    assert {name: bytes(value) for name, value in written.items()} == {
        name: as_bytes(value) for name, value in whole.items()
    }


def test_tensors_can_be_viewed_as_bytes_whatever_the_strides_of_codes_were() -> None:
    tensor = sample(preset="int8")
    codes = codes_of(tensor)
    row = torch.empty(1, len(codes.scale)).copy_(codes.scale.T)
    turned = replace(codes, scale=row.T, codes=codes.codes.T.contiguous().T)
    assert turned.scale.stride() != codes.scale.stride()
    for name, value in stored_tensors(tensor, turned).items():
        assert as_bytes(value) == as_bytes(stored_tensors(tensor, codes)[name])


def test_zero_points_are_packed_along_rows() -> None:
    multiples = {bits: row_multiple(presets(torch.float32)[f"int{bits}-g32-asym"]) for bits in BITS}
    assert multiples == {2: 16, 3: 32, 4: 8, 8: 4}
    assert row_multiple(presets(torch.float32)["int4-g32"]) == 1


def test_numbers_by_hand() -> None:
    scheme = Scheme(4, False, False, "group", 4, "int", "bfloat16", False)
    values = torch.tensor([[0.0, 0.5, 1.0, 7.5]], dtype=torch.bfloat16)
    stored = stored_tensors(*with_codes(values, scheme))
    # The step is a half and zero is code 0: codes 0, 1, 2, 15.
    assert stored["a.weight_packed"].tolist() == [[0xF210]]
    assert stored["a.weight_scale"].tolist() == [[0.5]]
    assert stored["a.weight_zero_point"].tolist() == [[0]]
    assert stored["a.weight_shape"].tolist() == [1, 4]
    mxfp4 = Scheme(4, True, True, "group", 32, "e2m1", "e8m0")
    ends = torch.zeros(1, 32)
    ends[0, :3] = torch.tensor([6.0, -0.5, 1.5])
    stored = stored_tensors(*with_codes(ends, mxfp4))
    assert stored["a.weight_packed"][0, :2].tolist() == [0x97, 0x03]
    assert stored["a.weight_scale"].tolist() == [[127]]  # 2 ** 0


def with_codes(values: torch.Tensor, scheme: Scheme) -> Any:
    tensor = quantized("a.weight", values, scheme)
    return tensor, codes_of(tensor)


def test_the_global_scale_divides() -> None:
    tensor = sample(preset="nvfp4")
    codes = codes_of(tensor)
    stored = stored_tensors(tensor, codes)
    assert codes.tensor_scale is not None
    assert float(stored["layer.weight_global_scale"] * codes.tensor_scale) == pytest.approx(1)
    assert stored["layer.weight_scale"].dtype == torch.float8_e4m3fn


def validated(tensors: dict[str, StoredTensor]) -> dict[str, Any]:
    quantization: Any = pytest.importorskip(
        "compressed_tensors.quantization", reason="compressed-tensors is not installed"
    )
    config = quantization_config(tensors)
    read = quantization.QuantizationConfig.model_validate(config)
    assert list(read.config_groups) == list(config["config_groups"])
    assert read.quantization_status == quantization.QuantizationStatus.COMPRESSED
    assert quantization_config(dict(tensors)) == config
    assert json.loads(json.dumps(config)) == config
    return config


@pytest.mark.parametrize("preset", NAMES)
def test_one_scheme_is_one_group(preset: str) -> None:
    tensors = {name: sample(name, preset) for name in (Q.format(0), Q.format(1))}
    tensors["model.norm.weight"] = kept("model.norm.weight", torch.ones(8))
    tensors["model.embed_tokens.weight"] = kept("model.embed_tokens.weight", torch.ones(8, 8))
    config = validated(tensors)
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["format"] == config["format"]
    # A tied output layer is not in the file, and is not quantized.
    assert config["ignore"] == ["model.embed_tokens", "lm_head"]


def test_an_output_layer_is_named_beside_the_class() -> None:
    """vLLM's output layers are no ``Linear``; it would look for their floats."""
    config = validated({name: sample(name) for name in (Q.format(0), "lm_head.weight")})
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear", "lm_head"]
    assert config["ignore"] == []


def test_several_schemes_are_mixed_precision() -> None:
    tensors = {}
    for index in range(12):
        tensors[Q.format(index)] = sample(Q.format(index), "int4-g32")
        tensors[K.format(index)] = sample(K.format(index), "int8" if index < 2 else "int4-g32")
        tensors[DOWN.format(index)] = sample(DOWN.format(index), "fp8")
    tensors["lm_head.weight"] = kept("lm_head.weight", torch.ones(8, 8))
    config = validated(tensors)
    assert config["format"] == "mixed-precision"
    assert config["ignore"] == ["lm_head"]
    by_targets = [group["targets"] for group in config["config_groups"].values()]
    # A pattern over layer numbers, where it matches nothing else; names otherwise.
    assert by_targets[0][0] == r"re:model\.layers\.\d+\.self_attn\.q_proj$"
    assert by_targets[0][1:] == [f"model.layers.{index}.k_proj" for index in range(2, 12)]
    assert by_targets[1:] == [
        ["model.layers.0.k_proj", "model.layers.1.k_proj"],
        [r"re:model\.layers\.\d+\.down_proj$"],
    ]
    formats = [group["format"] for group in config["config_groups"].values()]
    assert formats == ["pack-quantized", "pack-quantized", "float-quantized"]


def test_schemes_that_differ_in_the_type_of_scales_alone_are_one_group() -> None:
    config = validated(
        {
            Q.format(0): sample(Q.format(0), "int8"),
            Q.format(1): sample(Q.format(1), "int8", dtype=torch.bfloat16),
        }
    )
    assert len(config["config_groups"]) == 1


def test_tied_output_layers_of_encoders_are_ignored() -> None:
    tensors = {
        "bert.layer.0.dense.weight": sample("bert.layer.0.dense.weight"),
        "cls.predictions.transform.dense.weight": sample("cls.predictions.transform.dense.weight"),
        "lm_head.dense.weight": sample("lm_head.dense.weight"),
    }
    ignored = ["lm_head", "lm_head.decoder", "cls.predictions.decoder"]
    assert quantization_config(tensors)["ignore"] == ignored


def test_what_transformers_would_not_decompress_is_dequantized_at_once() -> None:
    def asked(tensor: StoredTensor) -> bool:
        return validated({tensor.name: tensor}).get("dequantize", False) is True

    assert asked(sample(preset="int4-g32-asym"))
    assert asked(sample(preset="nvfp4"))
    assert asked(quantized("embed.weight", weight(8, 256, torch.float32), INT4, "Gather"))
    assert not asked(sample(preset="nvfp4", dtype=torch.bfloat16))
    assert not asked(sample(preset="int4-g32"))
    assert not asked(sample(preset="int8-tensor-asym"))


INT4 = presets(torch.float32)["int4-g32"]


@pytest.mark.parametrize(
    ("other", "remedy"),
    [
        ("mxfp4", "give a bfloat16 model"),
        ("int4-g32-asym", "make it symmetric"),
        ("table", "keep the table as it is"),
    ],
)
def test_mixtures_that_transformers_does_not_load_are_refused(other: str, remedy: str) -> None:
    first = sample(Q.format(0), "int8")
    if other == "table":
        second = quantized("embed.weight", weight(8, 256, torch.float32), INT4, "Gather")
    else:
        second = sample(Q.format(1), other)
    with pytest.raises(SpecError, match=f"one scheme for all layers, or {remedy}"):
        quantization_config({t.name: t for t in (first, second)})


def test_nothing_quantized_is_refused() -> None:
    with pytest.raises(SpecError, match="no layer is quantized"):
        quantization_config({"a.weight": kept("a.weight", torch.ones(4, 4))})


def test_what_the_layout_has_no_form_for_is_refused() -> None:
    def refused(tensor: StoredTensor, why: str) -> None:
        for call in (stored_entries, lambda t: quantization_config({t.name: t})):
            with pytest.raises(SpecError, match=why) as caught:
                call(tensor)
            assert "layer 'blocks.0.fc" in str(caught.value)

    name, matrix = "blocks.0.fc.weight", weight(8, 32, torch.float32)
    refused(quantized("blocks.0.fc.kernel", matrix, INT4), "is called 'kernel'")
    image = quantized(name, matrix.reshape(8, 8, 2, 2), presets(torch.float32)["int8"], "Conv")
    refused(image, "not a matrix")
    turned = quantized(name, matrix, INT4)
    assert turned.codes is not None
    layer = replace(turned.codes.layer, transposed=True)
    refused(replace(turned, codes=replace(turned.codes, layer=layer)), "not a matrix")
    for scheme in (
        Scheme(4, True, True, "group", 32, "e2m1", "e4m3"),
        Scheme(4, True, True, "channel", None, "e2m1", "e8m0"),
        Scheme(4, True, False, "group", 32, "int"),
        Scheme(5, True, True, "group", 32, "int"),
        Scheme(4, True, True, "group", 32, "int", "e8m0"),
    ):
        refused(quantized(name, matrix, scheme), "its scheme is")
