"""Modules that ``transformers`` builds from a Hugging Face directory, their weights mapped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from compressor.errors import ModelError, SpecError, suggestion
from compressor.models.checkpoint.weight_files import read_weights
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.matching import check_finite
from compressor.models.transformers.classes import library, saved_from
from compressor.models.transformers.networks import (
    CONFIG,
    check_fit,
    loaded,
    network_of,
    read_config,
    reason_of,
)
from compressor.types.tensors import TensorSpec

_REFERENCE = re.compile(r"transformers[.:](\w+)")
_TOKENS = "input_ids"
_OTHER_SIDE = "encoder_outputs"  # what a decoder reads, and a whole network takes
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DEFAULTED = (
    *("inputs_embeds", "position_ids", "head_mask", "past_key_values", "cache", "cache_position"),
    *("encoder_hidden_states", "encoder_attention_mask", "start_positions", "end_positions"),
    *("token_type_ids", "input_mask", "perm_mask", "target_mapping", "mems", "state"),
    *("logits_to_keep", "float_answer", "numeric_values", "numeric_values_scale"),
)
"""Arguments in tensors that are no further data: other forms of inputs, states, what trains."""
_FIXED = ("architectures", "auto_map", "model_type", "quantization_config", "transformers_version")


class MappedCarrier(TorchCarrier):
    """A module whose parameters are views of mapped files, from the start."""

    def load(self, checkpoint: Path) -> None:
        """Check every weight; they are in place already.

        Raises:
            ModelError: a tensor holds NaN or infinity.
        """
        buffers = dict(self.module.named_buffers())
        check_finite(self.module.state_dict().items(), f"checkpoint {str(checkpoint)!r}", buffers)


def auto_class_name(factory: str) -> str | None:
    """Return the class name in ``transformers.NAME`` or ``transformers:NAME``, else ``None``."""
    match = _REFERENCE.fullmatch(factory)
    return match[1] if match else None


def library_version() -> str:
    """Return the version of ``transformers``; raise ``SpecError`` if it is not installed."""
    return str(library().__version__)


def open_pretrained(
    name: str,
    directory: Path,
    config: Mapping[str, Any],
    inputs: Sequence[TensorSpec],
    part: str | None = None,
) -> MappedCarrier:
    """Build the network that a directory's ``config.json`` describes.

    Nothing is fetched and no code but that of ``transformers`` runs. The parameters are views of
    the memory-mapped weight files in the element type that most of them have, unless ``config``
    names another ``dtype``. The module returns no key-value cache, so that it can be lowered.

    Args:
        name: a ``transformers`` auto class, such as ``AutoModelForCausalLM``.
        directory: holds ``config.json`` and the weights.
        config: replaces values of ``config.json``.
        inputs: the module's inputs; if empty, the main input that its class names.
        part: path of the module in the network that is the model; ``None`` for all of it.

    Raises:
        SpecError: there is no such auto class, value or part, the class is for other models, the
            directory has no configuration, or ``transformers`` is not installed.
        ModelError: the configuration is malformed, of an unknown kind, or disagrees with the
            weights.
    """
    auto = _auto_class(name)
    stored = read_config(directory)
    network = network_of(auto, {**stored, **_changes(config, stored)}, directory)
    single = directory / "model.safetensors"
    whole = single.is_file() and not (directory / "model.safetensors.index.json").is_file()
    weights = read_weights(single if whole else directory)
    if part is not None:
        _part_of(network, part)  # before anything is read
    module = _filled(network, weights, directory, config.get("dtype"), part or "")
    return MappedCarrier(
        module, inputs or usual_inputs(module), folder=directory if part is None else None
    )


def _part_of(network: torch.nn.Module, path: str) -> torch.nn.Module:
    try:
        return network.get_submodule(path)
    except AttributeError as error:
        paths = dict.fromkeys(path for path, _ in network.named_modules() if path)
        raise SpecError(
            "model.part",
            f"{path!r} is no module of {type(network).__name__}",
            suggestion(path, paths),
        ) from error


def _auto_class(name: str) -> Any:
    package = library()
    if name.startswith("AutoModel") and hasattr(package, name):
        return getattr(package, name)
    names = [n for n in dir(package) if n.startswith("AutoModel")]  # takes a third of a second
    raise SpecError(
        "model.factory",
        f"'transformers.{name}' is not an auto class of transformers {package.__version__}",
        suggestion(name, names),
    )


def _changes(config: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec's changes to ``config.json`` other than ``dtype``."""
    changes = dict(config)
    dtype = changes.pop("dtype", None)
    names = [str(d).removeprefix("torch.") for d in _DTYPES]
    if dtype is not None and dtype not in names:
        raise SpecError("model.config.dtype", f"is {dtype!r}", f"give one of {', '.join(names)}")
    for key in changes:
        if key not in stored or key in _FIXED:
            changeable = [k for k in stored if k not in _FIXED]
            raise SpecError(
                f"model.config.{key}",
                f"is not an entry of {CONFIG} that can be changed",
                suggestion(key, dict.fromkeys([*changeable, "dtype"])),
            )
    return changes


def _filled(
    network: Any, weights: Mapping[str, torch.Tensor], directory: Path, dtype: str | None, part: str
) -> torch.nn.Module:
    """Return the part of a network of the same class and configuration that holds the weights.

    What the part does not read may be missing: those who publish an encoder leave the decoder out.
    """
    subject = f"checkpoint {str(directory)!r}"
    usual = _usual_dtype(weights, subject)
    try:
        target_dtype = getattr(torch, dtype) if dtype else usual
        module, loading = loaded(type(network), network.config, weights, target_dtype)
    except Exception as error:  # as in network_of
        raise ModelError(
            subject,
            f"does not load into {type(network).__name__} ({reason_of(error)})",
            "check that config.json belongs to the weights",
        ) from error
    tensors = module.state_dict(keep_vars=True)
    filled: torch.nn.Module = module.get_submodule(part).requires_grad_(False).eval()
    # One tensor may have several names, such as the table of embeddings that two sides share.
    read = {id(tensor) for tensor in filled.state_dict(keep_vars=True).values()}
    missing = [name for name in loading["missing_keys"] if id(tensors[name]) in read]
    saved = saved_from(network.config.to_dict())
    check_fit(type(network).__name__, {**loading, "missing_keys": missing}, subject, saved)
    codes = [name for name, tensor in weights.items() if not tensor.is_floating_point()]
    floats = {name for name, tensor in tensors.items() if tensor.is_floating_point()}
    _refuse_codes([name for name in codes if name in floats], weights, subject)
    return filled


def _usual_dtype(weights: Mapping[str, torch.Tensor], subject: str) -> torch.dtype:
    """Return the floating-point type that most of the weights' elements have."""
    floats = {name: t for name, t in weights.items() if t.is_floating_point()}
    _refuse_codes([n for n, t in floats.items() if t.dtype not in _DTYPES], weights, subject)
    sizes = dict.fromkeys(_DTYPES, 0)
    for tensor in floats.values():
        sizes[tensor.dtype] += tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def _refuse_codes(names: list[str], weights: Mapping[str, torch.Tensor], subject: str) -> None:
    """Raise ``ModelError`` for weights in a type that needs scales."""
    if names:
        raise ModelError(
            subject,
            f"has {names[0]!r} as {str(weights[names[0]].dtype).removeprefix('torch.')}",
            "give the float checkpoint that it was made from",
        )


def usual_inputs(module: Any) -> tuple[TensorSpec, ...]:
    """Return the main input of a module's class, and what it reads beside text.

    Raises:
        SpecError: its shape is not known, or it has several sides.
    """
    config, main = getattr(module, "config", None), getattr(module, "main_input_name", None)
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    encoder, sides = encoder_path(module), sides_of(module)
    spec = None if encoder or sides else _main_input(str(main), config, dtype)
    if spec is not None:
        return (spec, *_beside_text(module, dtype))
    name = main or _TOKENS
    rest = "sequence], dtype: int64" if name == _TOKENS else f"...], dtype: {dtype}"
    remedy = f"write e.g. inputs: {{{name}: {{shape: [batch, {rest}}}}}"
    raise SpecError(
        "model.inputs",
        f"is empty, and {type(module).__name__} has no single usual input",
        f"{remedy}, or take the encoder alone: part: {encoder}"
        if encoder
        else f"take one side: part: {' or '.join(sides.values())}"
        if sides
        else remedy,
    )


def text_inputs(module: Any) -> tuple[TensorSpec, ...]:
    """Return the inputs of a module that reads text in lines; empty for other modules.

    Besides the tokens they are the mask, and the types of tokens if the network has several.
    """
    parameters = signature(module.forward).parameters
    if getattr(module, "main_input_name", None) != _TOKENS:
        return ()
    types = getattr(module.config, "type_vocab_size", None)
    several = isinstance(types, int) and types > 1
    names = [_TOKENS, "attention_mask", *(["token_type_ids"] if several else [])]
    shape = ("batch", "sequence")
    return tuple(TensorSpec(name, shape, "int64") for name in names if name in parameters)


def _beside_text(module: Any, dtype: str) -> Iterator[TensorSpec]:
    """Yield what a module that reads text reads with it and no text gives.

    Without them the class takes zeros or fails: the places of words on a page, their cells in a
    table or their paths in a document, how characters look and sound, and images.

    Args:
        dtype: of inputs in floats.
    """
    config, taken = module.config, signature(module.forward).parameters
    if getattr(module, "main_input_name", None) != _TOKENS:
        return
    scaled = hasattr(config, "bbox_scale")  # places are shares of the page, and no whole numbers
    kinds = getattr(config, "type_vocab_sizes", None) or ()  # of a token, each with its table
    depth = getattr(config, "max_depth", None)
    shapes: dict[str, tuple[str, int | None, str]] = {
        "bbox": ("sequence", 4, dtype if scaled else "int64"),
        "token_type_ids": ("sequence", len(kinds) or None, "int64"),
        "xpath_tags_seq": ("sequence", depth, "int64"),
        "xpath_subs_seq": ("sequence", depth, "int64"),
        "visual_embeds": ("regions", getattr(config, "visual_embedding_dim", None), dtype),
        "visual_feats": ("regions", getattr(config, "visual_feat_dim", None), dtype),
        "visual_pos": ("regions", getattr(config, "visual_pos_dim", None), dtype),
    }
    for name in taken:
        axis, size, kind = shapes.get(name, ("", None, ""))
        if size is not None:
            yield TensorSpec(name, ("batch", axis, size), kind)
        elif name in ("input_shape_ids", "input_pronunciation_ids"):
            yield TensorSpec(name, ("batch", "sequence"), "int64")
    # Where tokens stand for images, the text says where they are, and there may be none.
    stand = any(hasattr(config, f"image_token_{key}") for key in ("id", "index"))
    images = None if stand else _images("pixel_values", config, dtype)
    if "pixel_values" in taken and images is not None:
        yield images


def further_inputs(module: Any, inputs: Sequence[TensorSpec]) -> list[str]:
    """Return the arguments of a module that may be data, beside its inputs."""
    given = {spec.name for spec in inputs}
    return [
        name
        for name, argument in signature(module.forward).parameters.items()
        if "Tensor" in str(argument.annotation)
        and not name.endswith(("labels", "label"))
        and name not in {*given, *_DEFAULTED}
    ]


_POSITIONS = ("position_embeddings", "position_embedding")


def longest_text(module: Any) -> int | None:
    """Return how many tokens a module has positions for; ``None`` if it has no table of them."""
    for path, table in module.named_modules():
        if path.endswith(_POSITIONS) and isinstance(table, torch.nn.Embedding):
            # Tables with a place for padding begin after it.
            before = 0 if table.padding_idx is None else table.padding_idx + 1
            return table.num_embeddings - before
    return None


def encoder_path(module: Any) -> str:
    """Return where the encoder of an encoder and decoder is; empty for other networks."""
    both = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    # The configuration of an encoder saved alone may be that of the whole.
    taken = signature(module.forward).parameters
    decodes = any(name.startswith("decoder_") for name in taken)
    if not both or _OTHER_SIDE not in taken or not decodes:  # one that classifies may have none
        return ""
    encoder = module.get_encoder() if hasattr(module, "get_encoder") else module
    return next((path for path, part in module.named_modules() if part is encoder), "")


def sides_of(module: Any) -> dict[str, str]:
    """Return the path of each side of a network that reads two kinds of data, such as CLIP.

    The keys are the inputs that the sides begin with. Other networks have none.
    """
    taken = signature(module.forward).parameters
    sides: dict[str, str] = {}
    for path, part in module.named_children():
        first = next(iter(signature(part.forward).parameters), "")
        if first in taken and hasattr(part, "main_input_name"):  # a network by itself
            sides.setdefault(first, path)
    return sides if len(sides) > 1 else {}


def _main_input(name: str, config: Any, dtype: str) -> TensorSpec | None:
    if name == _TOKENS:
        return TensorSpec(name, ("batch", "sequence"), "int64")
    if name == "pixel_values":
        return _images(name, getattr(config, "vision_config", None) or config, dtype)
    if name == "input_features" and config.model_type == "whisper":
        frames = 2 * config.max_source_positions
        return TensorSpec(name, ("batch", config.num_mel_bins, frames), dtype)
    if name == "input_values" and hasattr(config, "conv_stride"):  # of layers that read a wave
        return TensorSpec(name, ("batch", "samples"), dtype)
    if name == "input_values" and hasattr(config, "frequency_stride"):  # patches of a spectrogram
        return TensorSpec(name, ("batch", config.max_length, config.num_mel_bins), dtype)
    if name == "past_values" and hasattr(config, "num_input_channels"):
        return TensorSpec(name, ("batch", config.context_length, config.num_input_channels), dtype)
    return None


def _images(name: str, config: Any, dtype: str) -> TensorSpec | None:
    """Return the input for images of the size that a configuration states, or for films of them."""
    stated, channels = (getattr(config, key, None) for key in ("image_size", "num_channels"))
    stated = stated or getattr(config, "input_size", None)
    size = [stated, stated] if isinstance(stated, int) else list(stated or ("height", "width"))
    if len(size) != 2 or (stated is None and channels is None):
        return None
    frames = getattr(config, "num_frames", None)
    each = ("batch",) if frames is None else ("batch", frames)
    return TensorSpec(name, (*each, channels or 3, *size), dtype)
