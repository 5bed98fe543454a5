"""A checkpoint's folder: shards, index, companions and ``config.json``, checked against each other.

Headers are compared before any data is read. Names, shapes and the configuration also show which
tensors are layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from compressor.errors import ModelError, SpecError, listed
from compressor.files import read_json
from compressor.graph.layers import layer_name
from compressor.models.codec.headers import (
    INDEX,
    WEIGHTS,
    ShardHeader,
    TensorHeader,
    check_index,
    read_header,
    read_index,
)
from compressor.types.layers import CONVOLUTION, LINEAR, TABLE, Layer, LayerKind

# Model types whose decoder layers have Llama's names and shapes; "" stands for a config without
# one. Other models follow rules that only their own code knows.
_LLAMA_LIKE = {
    "",
    "cohere",
    "gemma",
    "gemma2",
    "granite",
    "llama",
    "mistral",
    "olmo",
    "olmo2",
    "qwen2",
    "qwen3",
    "smollm3",
    "stablelm",
}
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
_Shape = tuple[int, ...]
_WEIGHT = ".weight"
_TABLE = re.compile(
    r"(?:wte|wpe|shared|emb|embed|embed_in|embed_tokens\w*|embed_positions\w*|\w*_emb|\w*embeddings?"
    r"|relative_attention_bias)"
)
_NORM = re.compile(r"(?:\w*norm\d*|ln_\w+|ln\d*)", re.IGNORECASE)
_CONVOLUTION_AXES = (3, 4, 5)

# Models whose linear layers are ``transformers.pytorch_utils.Conv1D``, stored [columns, rows], and
# the names of these layers.
_CONV1D_MODELS = {"decision_transformer", "gpt2", "imagegpt", "openai-gpt"}

_CONV1D_LAYERS = ("c_attn", "q_attn", "c_proj", "c_fc")
CONFIG = "config.json"
CARD = "README.md"  # a run writes one that holds it
MODULES = "modules.json"  # of sentence-transformers: the network and what follows it

# Text, vocabularies and templates, and a model's own code, which is copied and never run.
_COMPANIONS = {".json", ".jinja", ".md", ".model", ".py", ".spm", ".tiktoken", ".txt", ".vocab"}

_LEGAL = ("LICENSE", "NOTICE", "USE_POLICY")

# What describes the weights that are left behind, or a run of this tool.
ADAPTER = "adapter_config.json"  # as peft names it; it would let transformers look for the adapter
_LEFT_BEHIND = {ADAPTER, "manifest.json", "model.json", "report.json", "report.md"}


def read_config(path: Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises:
        ModelError: it is not a JSON object.
    """
    subject = f"config {str(path)!r}"
    # Some published files hold Infinity, which Python reads and writes.
    config = read_json(path, subject, "cannot be read", constants=True)
    if not isinstance(config, dict):
        raise ModelError(subject, "is not a JSON object", "fetch it again")
    return config


def is_llama_like(config: Mapping[str, Any]) -> bool:
    """Return whether a model's decoder layers have the names and shapes of Llama's."""
    return str(config.get("model_type", "")) in _LLAMA_LIKE


def check_config(config: Mapping[str, Any], shapes: Mapping[str, _Shape], subject: str) -> None:
    """Compare a configuration with the tensors, where their names are those of Llama.

    Args:
        config: the content of ``config.json``; what it does not say is not compared.
        shapes: all tensors of the checkpoint.

    Raises:
        ModelError: they disagree in a shape, in the number of layers, or in what a layer holds.
    """
    if not is_llama_like(config):
        return
    expected_shapes = _expected_shapes(config)
    for name, shape in shapes.items():
        layer = _LAYER.fullmatch(name)
        expected = expected_shapes.get(layer[2] if layer else name.removeprefix("model."))
        if expected is not None and not _agree(shape, expected):
            asked = ["?" if e is None else e for e in expected]
            raise ModelError(
                subject,
                f"asks for {name!r} with shape {_text(asked)}, the checkpoint has {_text(shape)}",
                "config.json and weights belong to different models; fetch both again",
            )
    if "quantization_config" not in config:  # with one, some layers may be stored otherwise
        _check_layers(config, shapes, subject)
    _check_output(config, shapes, subject)


def _expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes that follow from a configuration; ``None`` for what it does not say."""
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    width = _number(config, "head_dim")
    if width is None and hidden and heads:
        width = hidden // heads
    key_heads = _number(config, "num_key_value_heads") or heads
    queries = heads * width if heads and width else None
    keys = key_heads * width if key_heads and width else None
    middle, vocabulary = _number(config, "intermediate_size"), _number(config, "vocab_size")
    return {
        "embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "norm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (middle, hidden),
        "mlp.up_proj.weight": (middle, hidden),
        "mlp.down_proj.weight": (hidden, middle),
    }


def _check_layers(config: Mapping[str, Any], shapes: Mapping[str, _Shape], subject: str) -> None:
    count = _number(config, "num_hidden_layers")
    held: dict[int, set[str]] = {}
    for name in shapes:
        if (match := _LAYER.fullmatch(name)) is not None:
            held.setdefault(int(match[1][:9]), set()).add(match[2])
    if not held:
        return
    if count is not None and held.keys() != set(range(count)):
        missing = sorted(set(range(count)) - held.keys())
        what = f"layer {missing[0]} is missing" if missing else f"there are {len(held)}"
        raise ModelError(
            subject,
            f"asks for {count} layers, in the checkpoint {what}",
            "config.json and weights belong to different models; fetch both again",
        )
    first = min(held)
    for number, names in sorted(held.items()):
        if names != held[first]:
            differing = [f"layers.{number}.{name}" for name in sorted(names ^ held[first])]
            raise ModelError(
                subject,
                f"asks for layers of one form; layer {number} differs from layer {first} in "
                f"{listed(differing)}",
                "a shard is missing or belongs to another model; fetch it again",
            )


def _check_output(config: Mapping[str, Any], shapes: Mapping[str, _Shape], subject: str) -> None:
    architectures = config.get("architectures")
    causal = isinstance(architectures, list) and any(
        str(name).endswith("ForCausalLM") for name in architectures
    )
    table = any(f"{prefix}embed_tokens.weight" in shapes for prefix in ("model.", ""))
    untied = config.get("tie_word_embeddings") is False
    if causal and table and untied and "lm_head.weight" not in shapes:
        raise ModelError(
            subject,
            "says that lm_head has a weight of its own, but the checkpoint has no 'lm_head.weight'",
            "a shard is missing, or tie_word_embeddings should be true",
        )


def _number(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int else None


def _agree(shape: _Shape, expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(
        want is None or have == want for have, want in zip(shape, expected, strict=True)
    )


def _text(shape: Any) -> str:
    return "[" + ", ".join(str(n) for n in shape) + "]"


def layer_of(
    name: str, shape: tuple[int, ...], dtype: str, config: Mapping[str, Any]
) -> Layer | None:
    """Return the layer that a tensor is the weight of; ``None`` for norms, biases and the like.

    It is the layer that the same model's graph would give: a linear layer's weight is read by a
    ``MatMul``, an embedding's by a ``Gather``.

    Args:
        dtype: numpy name of its floating-point type.
        config: the content of ``config.json``; its ``model_type`` tells whether weights are
            stored transposed.
    """
    kind = _kind(name, shape)
    if kind is None:
        return None
    transposed = (
        kind == LINEAR
        and str(config.get("model_type")) in _CONV1D_MODELS
        and name.split(".")[-2] in _CONV1D_LAYERS
    )
    return Layer(layer_name(name), kind, name, shape, dtype, transposed)


def _kind(name: str, shape: tuple[int, ...]) -> LayerKind | None:
    if not name.endswith(_WEIGHT) or 0 in shape:
        return None
    module = layer_name(name).rpartition(".")[2]
    if len(shape) in _CONVOLUTION_AXES:
        return CONVOLUTION
    if len(shape) != 2 or _NORM.fullmatch(module):
        return None
    return TABLE if _TABLE.fullmatch(module) else LINEAR


def shard_paths(folder: Path) -> tuple[tuple[Path, ...], Mapping[str, str] | None]:
    """Return the shards of a folder, sorted, and its index: the shard's name for each tensor.

    An index says which files count. Without one, ``model.safetensors`` beside a ``config.json``
    is the model, as ``transformers`` has it, and all safetensors files together otherwise.

    Raises:
        SpecError: there is no safetensors file.
        ModelError: the index is malformed, or names a file that is missing or lies elsewhere.
    """
    index = folder / INDEX
    if index.is_file():
        mapping = read_index(index)
        return tuple(folder / name for name in sorted(set(mapping.values()))), mapping
    single = folder / WEIGHTS
    if single.is_file() and (folder / CONFIG).is_file():
        return (single,), None
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        raise _without_safetensors(folder)
    return files, None


def _without_safetensors(folder: Path) -> SpecError:
    """Return the error of a folder without safetensors; of a pickled model, how to save it."""
    subject = f"checkpoint {str(folder)!r}"
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    if not pickled or not (folder / CONFIG).is_file():
        remedy = "name the weight file itself"
        return SpecError(subject, "holds no .safetensors file", remedy)
    classes = read_config(folder / CONFIG).get("architectures")
    names = [str(n) for n in classes] if isinstance(classes, list) else []
    name = names[0] if names and names[0].isidentifier() else "AutoModel"
    return SpecError(
        subject,
        f"holds {pickled[0].name}, not safetensors",
        f"save it again: transformers.{name}.from_pretrained(DIR).save_pretrained(DIR)",
    )


def companions(folder: Path) -> dict[str, Path]:
    """Return the files that belong to a checkpoint besides its weights, by their place in it.

    Configuration, tokenizer, templates, licence: small files at the top of the folder. Weights of
    other formats (``pytorch_model.bin``, ``original/``) are left out. What follows the network in a
    directory of sentence-transformers (``1_Pooling/``) has its own folders, with weights.
    """
    top = [
        path
        for path in folder.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
        and path.name not in _LEFT_BEHIND
        and (path.suffix in _COMPANIONS or path.name.startswith(_LEGAL))
    ]
    inner = [p for part in _modules_behind(folder) for p in part.rglob("*") if p.is_file()]
    return {path.relative_to(folder).as_posix(): path for path in sorted(top + inner)}


def _modules_behind(folder: Path) -> list[Path]:
    """Return the folders of what ``modules.json`` lists after the network."""
    if not (folder / MODULES).is_file():
        return []
    entries = read_json(folder / MODULES, f"file {str(folder / MODULES)!r}", "is malformed")
    named = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
    places = {str(e.get("path", "")) for e in named[1:]}  # the first is the network
    # Folders of this one alone: nothing from elsewhere is copied.
    return [part for part in folder.iterdir() if part.name in places]


@dataclass(frozen=True)
class Checkpoint:
    """Safetensors files that belong together.

    Attributes:
        folder: the folder whose configuration and tokenizer belong to it, if there is one.
        config: the content of ``config.json``; empty without one.
        untied: an output layer has a weight of its own by now, which is the table's in the files.
    """

    path: Path
    folder: Path | None
    shards: tuple[ShardHeader, ...]
    config: Mapping[str, Any]
    untied: bool = False

    @cached_property
    def tensors(self) -> dict[str, TensorHeader]:
        """All tensors by name, in the order of storage."""
        return {name: tensor for shard in self.shards for name, tensor in shard.tensors.items()}


def read_shards(path: Path) -> tuple[ShardHeader, ...]:
    """Read the headers of a file, or of all shards of a folder, and compare them with its index.

    Raises:
        SpecError: there are no safetensors files.
        ModelError: a file is cut or damaged, the index and the shards disagree, or a tensor is in
            two shards.
    """
    paths, index = shard_paths(path) if path.is_dir() else ((path,), None)
    shards = tuple(read_header(file) for file in paths)
    held: dict[str, str] = {}
    for shard in shards:
        name = shard.path.relative_to(path).as_posix() if path.is_dir() else shard.path.name
        for tensor in shard.tensors:
            if tensor in held:
                raise ModelError(
                    f"checkpoint {str(path)!r}",
                    f"has tensor {tensor!r} in two files, {held[tensor]!r} and {name!r}",
                    "remove one of them",
                )
            held[tensor] = name
    if index is not None:
        remedy = "the index belongs to other files; fetch both again"
        check_index(path / INDEX, index, held, remedy)
    return shards


def read_checkpoint(path: Path) -> Checkpoint:
    """Read all headers of a checkpoint, and its ``config.json``.

    A file that is all there is of a Hugging Face folder stands for that folder.

    Raises:
        SpecError: the path is missing, or holds no safetensors.
        ModelError: something is damaged, or index and shards disagree.
    """
    subject = f"checkpoint {str(path)!r}"
    if not path.exists():
        raise SpecError(subject, "does not exist", "check its spelling")
    if path.is_file() and path.suffix != ".safetensors":
        if path.name.startswith("pytorch_model") and (path.parent / CONFIG).is_file():
            raise _without_safetensors(path.parent)
        remedy = "save the weights with safetensors, or write a spec that gives model.factory too"
        if path.suffix == ".onnx":
            remedy = "write a spec with model.onnx; `compress init` starts one"
        raise SpecError(subject, "is not a .safetensors file", remedy)
    folder = _model_folder(path)
    shards = read_shards(path)
    if not any(shard.tensors for shard in shards):
        raise ModelError(subject, "holds no tensors", "save it again")
    config = {} if folder is None else read_config(folder / CONFIG)
    return Checkpoint(path, folder, shards, config)


def _model_folder(path: Path) -> Path | None:
    if path.is_dir():
        return path if (path / CONFIG).is_file() else None
    folder = path.parent
    if not (folder / CONFIG).is_file() or (folder / INDEX).is_file():
        return None
    return folder if shard_paths(folder)[0] == (path,) else None
