"""Specs that commands make: a commented starter to fill in, and that of ``compress quantize``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import SpecError, printable
from compressor.files import write_text
from compressor.spec.load import Spec, check_spec
from compressor.spec.source_text import Document
from compressor.types.tensors import TensorSpec, unstackable

_PLAIN = re.compile(r"(\.{0,2}/)*[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}

_HEAD = """\
# Starter spec for {model}, written by `compress init`.
#
#   1. Put your data in place: see `data` below.
#   2. compress plan {spec}    checks everything, computes nothing heavy
#   3. compress run {spec}     does it; run it again and it resumes
#
# Paths are relative to this file.
version: 1
name: {name}
seed: 0 # the same spec, inputs and versions give the same bytes
"""

_ONNX = """
# The float model. The file knows its inputs:
{inputs}
model:
  onnx: {model}
"""

_TORCH = """
# The float model: a function that builds the network, and the weights to put into it
# ({tensors:,} tensors, {parameters:,} parameters). Python names are imported, from this folder or
# the one you are in; checkpoints are read as weights only and never run code.
model:
  factory: my_package.model:build # FILL IN: called without arguments, returns a torch.nn.Module
  # config: {{width: 64}} # keyword arguments for the factory
  checkpoint: {model}
  inputs: # FILL IN: what forward takes; a name in place of a size is a dynamic axis
    image: {{shape: [batch, 3, 224, 224], dtype: float32}}
"""

_PRETRAINED = """
# The float model: transformers builds the network that config.json describes and maps the weights
# ({tensors:,} tensors, {parameters:,} parameters). Nothing is fetched; code that comes with a model
# never runs.
model:
  factory: transformers.{auto_class}
  checkpoint: {model}
"""

_TEXT = """
# Text in UTF-8, cut into samples of so many tokens. `jsonl: FILE` takes objects with a `field`.
data:
  # FILL IN: typical text. Take it from the training data: what tunes a model must not also judge
  # it. Only methods gptq and awq read it.
  calibration:
    text: calibration.txt
    tokenizer: {model}
    length: {length}
    inputs: {{input_ids: input_ids}}
    samples: 128
    batch: 8
  # FILL IN: text on which the float model and every artifact are compared.
  evaluation:
    text: evaluation.txt
    tokenizer: {model}
    length: {length}
    inputs: {{input_ids: input_ids}}
    target: labels # the token that follows each
    batch: 8
metric: perplexity

# Passes run in this order. `compress passes` lists them all, `compress passes NAME` their options.
passes:
  # 4-bit weights, with a scale for each group of 128 in a row.
  - pass: quantize-weights
    preset: int4-g128
    method: gptq # rtn and hqq need no data
    # layers: # rules for single layers; the first that matches wins
    #   - {{match: "lm_head", skip: true}}
"""

_DATA = """
# Each file holds arrays with one row a sample. `inputs` maps each input of the model to an array;
# arrays that do not have the shape and dtype that the model takes yet need a `transform`.
# Besides npz there are npy, safetensors, images (a folder) and factory (your own function).
data:
  # FILL IN: typical samples, some hundred of them, that set the int8 ranges. Take them from the
  # training data: what tunes a model must not also judge it.
  calibration:
    npz: calibration.npz
    inputs:
{mapping}
    # transform: my_package.data:normalize # fn(batch) -> batch, on arrays by name
    samples: 512
    batch: {batch}
  # FILL IN: samples on which the float model and every artifact are compared.
  evaluation:
    npz: evaluation.npz
    inputs:
{mapping}
    # transform: my_package.data:normalize
    # target: label # the array with the right answers
    batch: {batch}

# Without a target, outputs are compared with the float model's (cosine). With one: accuracy, top5,
# perplexity, mse, or your own package.module:function.
# metric: accuracy
"""

_FEEDS = """
# An input has no axis for samples: {given}.
# So each sample is a whole feed: an npz file in a folder, with everything that the model takes at
# once, in arrays of any rank. A factory (your function) may yield dictionaries instead.{sequence}
data:
  # FILL IN: typical samples that set the int8 ranges. Take them from the training data: what tunes
  # a model must not also judge it.
  calibration:
    npz: calibration # a folder
    samples: feeds{state}
    inputs:
{mapping}
    # transform: my_package.data:normalize # fn(feed) -> feed, on arrays by name
  # FILL IN: samples on which the float model and every artifact are compared.
  evaluation:
    npz: evaluation
    samples: feeds{state}
    inputs:
{mapping}
    # transform: my_package.data:normalize
    # target: label # the array with the right answers

# Without a target, outputs are compared with the float model's (cosine). With one: accuracy, top5,
# perplexity, mse, or your own package.module:function.
# metric: accuracy
"""

_SEQUENCE = """
# CHECK `state`: the input takes that output of the step before, and starts with zeros. Each file
# is then a sequence: what changes from step to step has the steps as one more, first axis."""

_PASSES = """
# Passes run in this order. `compress passes` lists them all, `compress passes NAME` their options.
passes:
  # Fold batch-norm and constants into the layers before them; fewer and larger operators.
  - pass: fuse
  # 8-bit weights and activations, with ranges from the calibration data.
  - pass: quantize-static
    # layers: # rules for single layers; the first that matches wins
    #   - {match: "head*", skip: true}
"""

_REST = """
# Each artifact is written, opened again, and measured in the runtime that will serve it.
# `compress exporters` lists the formats.
exports:
  - format: safetensors # reload with compressor.load(folder)
  - format: onnx
    target: ort-cpu # or tensorrt

# The run fails (exit code 1) when an artifact misses one of these.
limits:
  size-ratio: 0.5 # bytes of the artifact / bytes of the float model, at most
  # metric-drop: 1.0 # how much worse the metric may be; in points for accuracy

output: {output}
"""


def write_starter(model: Path, output: Path) -> None:
    """Write a starter spec for a model.

    Args:
        model: an ONNX file, or a checkpoint that :mod:`compressor.models.checkpoint.weight_files`
            reads.

    Raises:
        SpecError: the model does not exist, or the output exists.
        ModelError: the model is not usable.
    """
    if not model.exists():
        raise SpecError(f"model {str(model)!r}", "does not exist", "check its spelling")
    if output.exists():
        raise SpecError(
            f"spec {str(output)!r}", "exists already", "name another file with -o, or remove it"
        )
    folder = output.resolve().parent
    relative = Path(os.path.relpath(model.resolve(), folder)).as_posix()
    write_text(output, starter_text(model, relative, output.name))


def starter_text(model: Path, relative: str, spec: str) -> str:
    """Return the starter spec for a model.

    Args:
        relative: its path as seen from the spec.

    Raises:
        ModelError: the model is not usable.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model.resolve().stem).strip("-._") or "model"
    if model.suffix == ".onnx":
        from compressor.graph.values import tensor_spec
        from compressor.models.onnx.file import read_onnx

        graph = read_onnx(model).graph
        inputs = tuple(tensor_spec(value) for value in graph.inputs if not value.is_initializer())
        middle = _ONNX.format(model=scalar(relative), inputs=_listed(inputs))
        if unstackable(inputs) is not None:
            feeds = _feeds(inputs, [tensor_spec(value) for value in graph.outputs])
            return _head(model, spec, name) + middle + feeds + _PASSES + _rest(name)
    elif (model / "config.json").is_file():
        return _head(model, spec, name) + _pretrained(model, relative) + _rest(name)
    else:
        inputs = (TensorSpec("image", ("batch", 3, 224, 224), "float32"),)
        from compressor.lab.inspect.checkpoint import headers

        tensors, parameters = headers(model)
        middle = _TORCH.format(model=scalar(relative), tensors=tensors, parameters=parameters)
    return _head(model, spec, name) + middle + _arrays(inputs) + _PASSES + _rest(name)


def _head(model: Path, spec: str, name: str) -> str:
    return _HEAD.format(
        model=printable(model.resolve().name), spec=printable(spec), name=scalar(name)
    )


def _arrays(inputs: Sequence[TensorSpec]) -> str:
    mapping = "\n".join(f"      {scalar(i.name)}: {scalar(i.name)}" for i in inputs)
    first = inputs[0].shape[:1] if inputs else ()
    batch = first[0] if first and isinstance(first[0], int) else 32
    return _DATA.format(mapping=mapping, batch=batch)


def _feeds(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """Return the part ``data`` for a model that is run on whole feeds."""
    states = _states(inputs, outputs)
    given = [i for i in inputs if i.name not in states]
    mapping = "\n".join(f"      {scalar(i.name)}: {scalar(i.name)}" for i in given)
    state = ", ".join(f"{scalar(name)}: {scalar(output)}" for name, output in states.items())
    return _FEEDS.format(
        given=printable(str(unstackable(inputs))),
        mapping=mapping,
        state=f"\n    state: {{{state}}}" if states else "",
        sequence=_SEQUENCE if states else "",
    )


def _states(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> dict[str, str]:
    """Return outputs that look like the next value of an input without an axis of samples.

    They have its shape and type; of several, one whose name contains the input's comes first.
    """
    states: dict[str, str] = {}
    stacked = {i.name for i in inputs if i.shape and not isinstance(i.shape[0], int)}
    for spec in inputs:
        like = [
            output.name
            for output in outputs
            if output.dtype == spec.dtype
            and _alike(output.shape, spec.shape)
            and output.name not in states.values()
        ]
        if spec.shape and spec.name not in stacked and like:
            named = [name for name in like if spec.name in name]
            states[spec.name] = (named or like)[0]
    return states if len(states) < len(inputs) else {}


def _alike(first: Sequence[object], second: Sequence[object]) -> bool:
    """Whether two shapes can be the same; dynamic axes can have any length."""
    pairs = zip(first, second, strict=False)
    differ = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
    return len(first) == len(second) and not differ


def _rest(name: str) -> str:
    return _REST.replace("{output}", scalar(f"out/{name}"))


def scalar(text: str) -> str:
    """Write text as a YAML scalar, quoted where it would be read as something else."""
    plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _WORDS
    return text if plain else '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    """Write a character as in a double-quoted scalar."""
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08x}"


def _pretrained(model: Path, relative: str) -> str:
    """Return the parts from ``model`` to ``passes`` for a Hugging Face directory."""
    from compressor.lab.inspect.checkpoint import headers
    from compressor.models.transformers.networks import auto_class_for, read_config

    config = read_config(model)
    saved = config.get("architectures")
    auto_class = auto_class_for(str(saved[0]) if isinstance(saved, list) and saved else "")
    tensors, parameters = headers(model)
    place = scalar(relative)
    first = _PRETRAINED.format(
        model=place, tensors=tensors, parameters=parameters, auto_class=auto_class
    )
    if auto_class == "AutoModelForCausalLM":
        longest = config.get("max_position_embeddings") or config.get("n_positions")
        length = min(longest, 512) if isinstance(longest, int) and longest > 0 else 512
        return first + _TEXT.format(model=place, length=length)
    image = "image_size" in config
    inputs = (TensorSpec("pixel_values" if image else "input_ids", ("batch",), "float32"),)
    return first + _arrays(inputs) + _PASSES


def _listed(inputs: Sequence[TensorSpec]) -> str:
    return "\n".join(f"#   {printable(str(entry))}" for entry in inputs)


@dataclass(frozen=True)
class QuantizeOptions:
    """What ``compress quantize`` may be told.

    Attributes:
        preset: a preset of the pass ``quantize-weights``.
        method: one that needs weights alone.
        skip: patterns of layers that are left as they are.
        embeddings: quantize tables and the output layer too.
        max_shard_size: bytes of a written file at most; ``None`` keeps the input's shards.
    """

    preset: str
    method: str = "rtn"
    range: str | None = None
    skip: Sequence[str] = ()
    embeddings: bool = False
    max_shard_size: int | None = None


def quantization_spec(checkpoint: Path, output: Path, options: QuantizeOptions) -> Spec:
    """Return the spec that quantizes a checkpoint's weights, for others to load.

    Args:
        checkpoint: a safetensors file or a directory of them.

    Raises:
        SpecError: an option is wrong, or the output is the checkpoint itself.
    """
    source, target = checkpoint.resolve(), output.resolve()
    if target == (source if source.is_dir() else source.parent):
        raise SpecError(
            f"output {str(output)!r}", "is the folder of the checkpoint", "name another folder"
        )
    step: dict[str, Any] = {
        "pass": "quantize-weights",
        "preset": options.preset,
        "method": options.method,
        "embeddings": options.embeddings,
        "layers": [{"match": pattern, "skip": True} for pattern in options.skip],
    }
    export: dict[str, Any] = {"format": "safetensors", "layout": "compressed-tensors"}
    if options.range is not None:
        step["range"] = options.range
    if options.max_shard_size is not None:
        export["max-shard-size"] = options.max_shard_size
    value = {
        "version": 1,
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", target.name).strip("-._") or "quantized",
        # A dollar in a path of the command line is a dollar.
        "model": {"checkpoint": str(checkpoint).replace("$", "$$")},
        "passes": [step],
        "exports": [export],
        "output": str(output).replace("$", "$$"),
    }
    return check_spec(Document(Path("compress quantize"), value))
