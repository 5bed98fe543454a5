"""The layouts of GPTQ and AWQ, unpacked here bit by bit as their readers do it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compressor.errors import SpecError
from compressor.exporters.safetensors.code_layouts import CODE_LAYOUTS, LayoutName
from compressor.exporters.safetensors.exporter import SafetensorsExporter
from compressor.exporters.safetensors.inputs_first import InputsFirst, configuration
from compressor.lab.quantizing import QuantizeOptions, quantization_spec
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.passes.quantize.weights.layers import WeightRule
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.exporter import ExportContext
from compressor.types.layers import Scheme
from compressor.types.passes import PassContext
from tests.compressor.exporters.hugging_face import DTYPES, codes_of, kept, quantized, tiny

ROWS, COLUMNS = 48, 128
CONTEXT = ExportContext("tiny", "spec")


def scheme(bits: int, group: int | None, symmetric: bool, dtype: torch.dtype) -> Scheme:
    kind: Any = DTYPES[dtype]
    span: Any = "group" if group else "channel"
    narrow, signed = False, symmetric and bits < 8
    return Scheme(bits, symmetric, symmetric, span, group, "int", kind, narrow, None, signed)


def fields(words: torch.Tensor, bits: int) -> list[list[list[int]]]:
    """Return the codes in each word of a matrix, the lowest bits first."""
    mask = (1 << bits) - 1
    return [
        [[(word >> shift) & mask for shift in range(0, 32, bits)] for word in row]
        for row in words.tolist()
    ]


def gptq_weight(stored: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """Unpack as AutoGPTQ does: ``(code - (stored zero + 1)) * scale``."""
    bits, more = config["bits"], 1 if config["checkpoint_format"] == "gptq" else 0
    words, zeros = fields(stored["qweight"], bits), fields(stored["qzeros"], bits)
    per_word, groups = 32 // bits, stored["g_idx"].tolist()
    found = torch.empty(stored["qweight"].shape[1], len(groups))
    for column, group in enumerate(groups):
        for row in range(len(found)):
            code = words[column // per_word][row][column % per_word]
            zero = zeros[group][row // per_word][row % per_word] + more
            found[row, column] = (code - zero) * float(stored["scales"][group, row])
    return found


def awq_weight(stored: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """Unpack as AutoAWQ does, by the places of a word that the rows of each eight are in."""
    place = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}
    words, zeros = fields(stored["qweight"], 4), fields(stored["qzeros"], 4)
    group = config["group_size"] if config["group_size"] > 0 else len(words)
    found = torch.empty(8 * len(words[0]), len(words))
    for row in range(len(found)):
        for column in range(len(words)):
            code = words[column][row // 8][place[row % 8]]
            zero = zeros[column // group][row // 8][place[row % 8]]
            found[row, column] = (code - zero) * float(stored["scales"][column // group, row])
    return found


READERS = {"gptq": gptq_weight, "awq": awq_weight}
CASES: list[tuple[LayoutName, int, int | None, bool, torch.dtype]] = [
    ("gptq", 4, 32, True, torch.bfloat16),
    ("gptq", 4, 64, False, torch.float16),
    ("gptq", 8, None, True, torch.float16),
    ("gptq", 2, 32, False, torch.bfloat16),
    ("awq", 4, 32, True, torch.float16),
    ("awq", 4, 64, False, torch.bfloat16),
    ("awq", 4, None, False, torch.float16),
]


@pytest.mark.parametrize(("kind", "bits", "group", "symmetric", "dtype"), CASES, ids=str)
def test_a_reader_finds_what_the_codes_mean(
    kind: LayoutName, bits: int, group: int | None, symmetric: bool, dtype: torch.dtype
):
    draw = torch.Generator().manual_seed(0)
    weight = (torch.randn(ROWS, COLUMNS, generator=draw) * 0.1 + 0.03).to(dtype)
    tensor = quantized("fc.weight", weight, scheme(bits, group, symmetric, dtype))
    layout = CODE_LAYOUTS[kind]
    stored = layout.tensors(tensor, codes_of(tensor))
    described = {entry.name: (entry.dtype, entry.shape) for entry in layout.entries(tensor)}
    assert described == {name: (t.dtype, tuple(t.shape)) for name, t in stored.items()}
    config = configuration("gptq" if kind == "gptq" else "awq", {tensor.name: tensor})
    assert config["group_size"] == (group or -1)
    local = {name.removeprefix("fc."): value for name, value in stored.items()}
    assert torch.equal(READERS[kind](local, config), codes_of(tensor).dequantize())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "llama"
    tiny("Llama", torch.float32).save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_a_directory_is_written_and_checked(folder: Path, tmp_path: Path, kind: LayoutName):
    exporter = SafetensorsExporter(layout=kind)
    step = QuantizeWeights(preset="int4-g32", layers=(WeightRule(match="*.o_proj", skip=True),))
    carrier, context = open_checkpoint(folder), PassContext(targets=exporter.targets)
    after = step.apply(carrier, context, {}).carrier
    exporter.check(after)
    paths = exporter.write(after, tmp_path, CONTEXT)
    assert sum(path.stat().st_size for path in paths) == exporter.predict(after)
    assert "computed again" in exporter.check_written(after, paths[0])
    (check,) = exporter.prove(after, paths[0])
    assert not check.known
    held = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == kind
    start = "model.layers.1.mlp.down_proj"
    local = {n.removeprefix(f"{start}."): t for n, t in held.items() if n.startswith(start)}
    assert local["scales"].dtype == torch.float16
    tensor = after.tensors()[f"{start}.weight"]
    assert tensor.codes is not None
    meant = tensor.codes.compute(tensor.read()).dequantize()
    assert torch.equal(READERS[kind](local, config), meant)
    assert "model.layers.1.self_attn.o_proj.weight" in held
    assert r"-:^model\.layers\.1\.self_attn\.o_proj$" in config["dynamic"]
    if kind == "awq":
        assert "model.layers.1.self_attn.o_proj" in config["modules_to_not_convert"]
    else:
        (endings,) = config["modules_in_block_to_quantize"]
        assert "self_attn.q_proj" in endings
        assert not any(ending.endswith("o_proj") for ending in endings)


def test_a_layer_is_named_in_full_if_another_of_its_kind_stays_float():
    weight = torch.randn(ROWS, COLUMNS).to(torch.float16)
    given = scheme(4, 32, True, torch.float16)
    chosen = [f"model.layers.{n}.mlp.{name}" for n, name in ((0, "up"), (1, "up"), (11, "down"))]
    tensors = {f"{name}.weight": quantized(f"{name}.weight", weight, given) for name in chosen}
    for name in ("lm_head.weight", "model.layers.1.mlp.down.weight"):
        tensors[name] = kept(name, weight)
    (endings,) = configuration("gptq", tensors)["modules_in_block_to_quantize"]
    assert endings == ["mlp.up", "model.layers.11.mlp.down"]


def test_what_a_layout_cannot_hold_is_refused():
    weight = torch.randn(ROWS, COLUMNS).to(torch.float16)
    four = scheme(4, 32, True, torch.float16)

    def refused(kind: LayoutName, given: Scheme, rows: int = ROWS) -> str:
        with pytest.raises(SpecError) as caught:
            CODE_LAYOUTS[kind].entries(quantized("fc.weight", weight[:rows], given))
        return str(caught.value)

    assert "int8/channel, which awq cannot store" in refused(
        "awq", scheme(8, None, True, torch.float16)
    )
    assert "which gptq cannot store" in refused("gptq", scheme(3, 32, True, torch.float16))
    assert "its scales are float32" in refused("gptq", scheme(4, 32, True, torch.float32))
    assert "its 12 rows and 128 columns do not fill words" in refused("awq", four, 12)


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_tables_and_output_layers_have_no_preset(kind: LayoutName):
    """Readers look for codes in blocks: vLLM would find no floats of ``lm_head``."""
    weight, given = torch.randn(ROWS, COLUMNS), scheme(4, 32, True, torch.float16)
    for made, what in (
        (quantized("model.embed_tokens.weight", weight, given, "Gather"), "a table"),
        (quantized("lm_head.weight", weight, given), "the output layer"),
    ):
        remedy = "leave out embeddings, or skip the layer by a rule"
        with pytest.raises(SpecError, match=f"is {what}, which {kind} cannot store; {remedy}$"):
            CODE_LAYOUTS[kind].entries(made)


def test_schemes_are_one_for_all():
    weight = torch.randn(ROWS, COLUMNS).to(torch.float16)
    pair = [
        quantized(f"{name}.weight", weight, scheme(4, group, True, torch.float16))
        for name, group in (("a", 32), ("b", 64))
    ]
    with pytest.raises(SpecError, match="has one scheme for all"):
        configuration("gptq", {t.name: t for t in pair})
    with pytest.raises(SpecError, match="no layer is quantized"):
        configuration("awq", {"a.weight": kept("a.weight", weight)})


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_weights_of_several_types_have_one_scheme(kind: InputsFirst):
    weight = torch.randn(ROWS, COLUMNS)
    pair = [
        quantized(f"{name}.weight", weight.to(dtype), scheme(4, 32, True, dtype))
        for name, dtype in (("a", torch.float16), ("b", torch.bfloat16))
    ]
    assert configuration(kind, {t.name: t for t in pair})["group_size"] == 32


def test_the_command_line_writes_them_for_vllm(folder: Path, tmp_path: Path):
    given = (folder, tmp_path / "out")
    made = quantization_spec(*given, QuantizeOptions(format="gptq", consumer="vllm"))
    (export,) = made.exports
    assert isinstance(export, SafetensorsExporter)
    assert (export.layout, export.consumer) == ("gptq", "vllm")
    made = quantization_spec(*given, QuantizeOptions(format="awq", consumer="transformers"))
    assert isinstance(made.exports[0], SafetensorsExporter)
    assert made.exports[0].layout == "awq"
    with pytest.raises(SpecError, match="does not read awq"):
        quantization_spec(*given, QuantizeOptions(format="awq", consumer="llama.cpp"))
