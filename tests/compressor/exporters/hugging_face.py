"""Small models with random weights, and what a checkpoint of them holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from compressor.exporters.safetensors.compressed_tensors import stored_tensors
from compressor.exporters.safetensors.quantization_config import quantization_config
from compressor.passes.quantize.maths.floating import round_to_nearest
from compressor.types.layers import (
    Layer,
    LayerKind,
    QuantizedTensor,
    Scheme,
    StoredTensor,
    WeightCodes,
)

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
WIDTH = 128


def presets(dtype: torch.dtype) -> dict[str, Scheme]:
    """Return the schemes of the presets, and some between them, for weights of a dtype."""
    kind: Any = DTYPES[dtype]

    def integer(bits: int, group: int | None = None, symmetric: bool = True) -> Scheme:
        span: Any = "channel" if group is None else "group"
        return Scheme(bits, symmetric, symmetric, span, group, "int", kind, False)

    return {
        "int8": integer(8),
        "int8-g32-asym": integer(8, 32, False),
        "int4-g128": integer(4, 128),
        "int4-g32": integer(4, 32),
        "int4-g32-asym": integer(4, 32, False),
        "int4-channel-asym": integer(4, None, False),
        "int3-g32": integer(3, 32),
        "int3-g32-asym": integer(3, 32, False),
        "int2-g32": integer(2, 32),
        "int2-g32-asym": integer(2, 32, False),
        "int8-tensor-asym": Scheme(8, False, False, "tensor", None, "int", kind, False),
        "int4-signed-asym": Scheme(4, False, True, "group", 32, "int", kind, False),
        "fp8": Scheme(8, element="e4m3", scale_type=kind),
        "fp8-tensor": Scheme(8, granularity="tensor", element="e4m3", scale_type=kind),
        "nvfp4": Scheme(4, True, True, "group", 16, "e2m1", "e4m3"),
        "mxfp4": Scheme(4, True, True, "group", 32, "e2m1", "e8m0"),
    }


def quantized(
    name: str, weight: torch.Tensor, scheme: Scheme, kind: LayerKind = "Gemm"
) -> StoredTensor:
    """Return a weight that is to be stored as codes."""
    layer = Layer(
        name.removesuffix(".weight"), kind, name, tuple(weight.shape), DTYPES[weight.dtype]
    )

    def compute(matrix: torch.Tensor) -> QuantizedTensor:
        return round_to_nearest(matrix, scheme)

    codes = WeightCodes(layer, scheme, compute)
    return StoredTensor(name, tuple(weight.shape), weight.dtype, lambda: weight, codes)


def kept(name: str, weight: torch.Tensor) -> StoredTensor:
    """Return a tensor that stays as it is."""
    return StoredTensor(name, tuple(weight.shape), weight.dtype, lambda: weight)


def codes_of(tensor: StoredTensor) -> QuantizedTensor:
    """Return the codes of a whole weight."""
    assert tensor.codes is not None
    return tensor.codes.compute(tensor.read())


def tiny(architecture: str, dtype: torch.dtype, tied: bool = False) -> Any:
    """Return a model of two layers with random weights."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    grouped: dict[str, Any] = {"intermediate_size": 256, "num_key_value_heads": 2}
    extra: dict[str, Any] = {
        "Llama": grouped,
        "Qwen2": grouped,
        "OPT": {"ffn_dim": 256, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
        "GPT2": {"n_embd": WIDTH, "n_layer": 2, "n_head": 4},
    }[architecture]
    config = getattr(transformers, f"{architecture}Config")(**sizes, **extra)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = getattr(transformers, f"{architecture}{_head(architecture)}")(config)
        for parameter in model.parameters():
            # Biases and norms are drawn, too: zeros and ones would hide mistakes.
            torch.nn.init.normal_(parameter, std=0.08, mean=1.0 if parameter.ndim == 1 else 0.0)
            parameter.data = parameter.data.to(dtype)  # buffers stay float32, as they are loaded
    model.eval()
    model.config.dtype = dtype
    return model


def _head(architecture: str) -> str:
    return "LMHeadModel" if architecture == "GPT2" else "ForCausalLM"


def tensors_of(
    model: Any, choose: Callable[[str], Scheme | None], tables: bool = False
) -> dict[str, StoredTensor]:
    """Return what a checkpoint of a model holds; ``choose`` gives layers their schemes."""
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    modules = dict(model.named_modules())
    found: dict[str, StoredTensor] = {}
    for name, value in model.state_dict().items():
        if name in tied:
            continue
        module = modules[name.rpartition(".")[0]]
        table = isinstance(module, torch.nn.Embedding)
        weighs = isinstance(module, torch.nn.Linear) or (table and tables)
        scheme = choose(name) if weighs and name.endswith(".weight") else None
        kind: LayerKind = "Gather" if table else "Gemm"
        found[name] = kept(name, value) if scheme is None else quantized(name, value, scheme, kind)
    return found


def write(directory: Path, model: Any, tensors: Mapping[str, StoredTensor]) -> Path:
    """Write a Hugging Face directory of the quantized model."""
    directory.mkdir(parents=True, exist_ok=True)
    data: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.codes is None:
            data[name] = tensor.read().contiguous()
        else:
            data |= stored_tensors(tensor, codes_of(tensor))
    save_file(data, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [type(model).__name__]
    config["quantization_config"] = quantization_config(tensors)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def dequantized(model: Any, tensors: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    """Put what the codes mean into the model, and return those weights as float32."""
    weights = {
        name: codes_of(tensor).dequantize() for name, tensor in tensors.items() if tensor.codes
    }
    model.load_state_dict(weights, strict=False)
    return weights
