"""A commented starter spec, to fill in."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from compressor.calibration.sources.tokenizer import has_tokenizer
from compressor.errors import ModelError, SpecError, printable
from compressor.files import write_text
from compressor.graph.values import all_nodes
from compressor.lab.recipes import (
    ENCODER,
    ENCODER_OF_TEXT,
    USUAL,
    Recipe,
    check_worth,
    decides,
    judged_outputs,
    recipe_for,
    scores_classes,
)
from compressor.lab.starter_arrays import likely_inputs, mapping_of, of_arrays, preparation
from compressor.lab.starter_data import Choices, Given, settled
from compressor.lab.starter_heads import CHOICES, choices_of, head_metric
from compressor.lab.starter_parts import (
    AGREEMENT,
    COSINE,
    FEEDS,
    FEEDS_FOR_RANGES,
    HEAD,
    LABEL,
    NOTHING_RUNS,
    OF_ANSWERS,
    ONNX,
    PART,
    PASSES,
    PRETRAINED,
    REST,
    SEQUENCE,
    SIDE,
    STORAGE,
    TORCH,
    UNKNOWN_INPUTS,
    WIDENED,
    WIDENED_STORAGE,
)
from compressor.lab.starter_text import continued_text, likely_lines, text_data, written_inputs
from compressor.spec.schema import schema_seen_from
from compressor.spec.source_text import scalar, seen_from
from compressor.types.tensors import TensorSpec, may_agree, samples_apart, unstackable

_IMAGE_AXES = 4
_HALVES = ("float16", "bfloat16")
_READ: Mapping[str, Sequence[str]] = {
    "images": ("pixel_values",),
    "text": ("input_ids",),
    "jsonl": ("input_ids",),
    "wav": ("input_features", "input_values"),
}
"""By kinds of data, the inputs that read them."""


_NOTHING = Choices()


def write_starter(model: Path, output: Path, choices: Choices = _NOTHING) -> bool:
    """Write a starter spec for a model; return whether parts of it are left to fill in.

    Its first line tells editors of the schema.

    Args:
        model: an ONNX file, or a checkpoint that :mod:`compressor.models.checkpoint.weight_files`
            reads.

    Raises:
        SpecError: the model does not exist, the output exists, or a choice is none that there is.
        ModelError: the model is not usable.
    """
    if not model.exists():
        raise SpecError(f"model {str(model)!r}", "does not exist", "check its spelling")
    if output.exists():
        raise SpecError(
            f"spec {str(output)!r}", "exists already", "name another file with -o, or remove it"
        )
    folder = output.resolve().parent
    relative = seen_from(folder, model)
    first = f"# yaml-language-server: $schema={schema_seen_from(folder)}\n"
    given = Given(model, folder, *settled(model, choices))
    text, inputs = _starter(model, relative, output.name, given)
    given.check_answers(text)
    prepared = preparation(given, inputs, output)
    if prepared is not None:
        prepared.check()
        text = prepared.named_in(text)
        write_text(prepared.path, prepared.code)
    write_text(output, first + text)
    return "FILL IN" in text


def starter_text(model: Path, relative: str, spec: str, given: Given | None = None) -> str:
    """Return the starter spec for a model.

    Args:
        relative: its path as seen from the spec.
        given: the data, and what else was chosen.

    Raises:
        SpecError: the data are not what the model takes.
        ModelError: the model is not usable.
    """
    given = given or Given(model, Path(), _NOTHING, None)
    return _starter(model, relative, spec, given)[0]


def _starter(
    model: Path, relative: str, spec: str, given: Given
) -> tuple[str, Sequence[TensorSpec]]:
    """Return the starter spec, and the inputs that arrays are for."""
    text, inputs = _parts(model, relative, spec, given)
    return given.chosen(text), inputs


def _parts(model: Path, relative: str, spec: str, given: Given) -> tuple[str, Sequence[TensorSpec]]:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", _named(model).stem).strip("-._") or "model"
    head = _head(model, spec, name)
    inputs: Sequence[TensorSpec]
    if model.suffix == ".onnx":
        text, inputs = _of_onnx(model, relative, name, given)
        return head + text, inputs
    if (model / "config.json").is_file():
        text, inputs = _pretrained(model, relative, name, given)
        return head + text, inputs
    inputs = likely_inputs(given)
    from compressor.lab.inspect.checkpoint import weight_summary
    from compressor.models.checkpoint.adapters import check_no_adapter

    check_no_adapter(model)
    weights = weight_summary(model)
    middle = TORCH.format(
        model=scalar(relative),
        tensors=weights.tensors,
        parameters=weights.parameters,
        inputs=likely_lines(inputs, given),
    )
    data = given.part(inputs, calibrated=True, scored=True) or of_arrays(inputs, given)
    return head + middle + data + _passes(USUAL) + _rest(name), inputs


def _of_onnx(
    model: Path, relative: str, name: str, given: Given
) -> tuple[str, Sequence[TensorSpec]]:
    """Return the starter spec for an ONNX file, all but its head, and its inputs."""
    import onnx
    from google.protobuf.message import DecodeError

    from compressor.models.executor import unknown_operators
    from compressor.models.onnx.carrier import open_onnx
    from compressor.models.onnx.checks import check_repeats, foreign_operators
    from compressor.models.torch.lowering import OPSET

    try:
        proto = onnx.load(model, load_external_data=False)
    except DecodeError:
        pass  # what follows says so
    else:
        nodes = [(node.domain, node.op_type) for node in proto.graph.node]
        stored = proto.graph.initializer
        weights = sum(len(tensor.dims) > 1 for tensor in stored)
        taken = {entry.name for entry in proto.graph.input} - {tensor.name for tensor in stored}
        check_worth(nodes, weights, taken, f"model {str(model)!r}")
    carrier = open_onnx(model, OPSET)
    check_repeats(carrier.graph(), f"model {str(model)!r}")
    recipe, inputs = recipe_for(carrier), carrier.inputs
    listed = "\n".join(f"#   {printable(str(entry))}" for entry in inputs)
    first = ONNX.format(model=scalar(relative), inputs=listed)
    operators = ((node.domain, node.op_type) for node in all_nodes(carrier.graph().graph))
    storage = "" if unknown_operators(operators) else STORAGE
    last = _passes(recipe) + _rest(name, recipe.size_ratio, storage)
    if foreign := foreign_operators(carrier.graph()):
        return first + NOTHING_RUNS.format(operator=printable(foreign[0])) + last, ()
    calibrated = recipe.calibrated
    if samples_apart(inputs, carrier.outputs):
        given = replace(given, batch=1)
    why = _why_feeds(
        inputs, carrier.outputs, stacked=given.found is not None and given.found.stacked
    )
    judged = judged_outputs(carrier)
    scored = len(judged) == 1 and len(judged[0].shape) == 2
    numbers = given.answers(inputs, judged)
    classes = decides(carrier) or (scores_classes(carrier) and not numbers)
    metric = AGREEMENT if classes else COSINE
    data = given.part(inputs, calibrated=calibrated, scored=scored, metric=metric)
    if not data:
        if not why and given.found is not None and given.found.feeds:
            why = "Each file is a sample"
        fed = why and _feeds(inputs, carrier.outputs, given, calibrated, why, metric)
        data = fed or of_arrays(inputs, given, calibrated, metric, numbers)
    return first + data + last, inputs


def _passes(recipe: Recipe) -> str:
    """Return the part ``passes``."""
    title = f"# For {recipe.title}:\n" if recipe.title else ""
    return PASSES.format(title=title, steps="\n".join(recipe.lines()))


def _named(model: Path) -> Path:
    """Return a path that ends in the model's name; a link has its own, unlike what it names."""
    return model.resolve() if model.is_dir() else model


def _head(model: Path, spec: str, name: str) -> str:
    return HEAD.format(model=printable(_named(model).name), spec=printable(spec), name=scalar(name))


def _why_feeds(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], *, stacked: bool
) -> str:
    """Return why samples are whole feeds; empty if arrays can hold them, or do (``stacked``)."""
    given = unstackable(inputs)
    if given is not None:
        return f"An input does not begin with an axis for samples: {printable(str(given))}"
    states = _states(inputs, outputs) if _of_one_sample(inputs) and not stacked else {}
    if states:
        name, output = next(iter(states.items()))
        names = f"{printable(output)!r} of input {printable(name)!r}"
        return f"An output has the shape and the name of an input, as a state has: {names}"
    if inputs and not stacked and _is_image_of_any_size(inputs[0].shape):
        return f"Samples may differ in size: {printable(str(inputs[0]))}"
    return ""


def _is_image_of_any_size(shape: Sequence[object]) -> bool:
    if len(shape) != _IMAGE_AXES:
        return False
    ends = ((shape[1], shape[2:]), (shape[3], shape[1:3]))
    return any(n in (1, 3) and any(isinstance(s, str) for s in size) for n, size in ends)


def _feeds(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    given: Given,
    calibrated: bool,
    why: str,
    metric: str,
) -> str:
    """Return the part ``data`` for a model that is run on whole feeds."""
    held = given.arrays[1]
    label = given.label(inputs) if given.of_classes else ""
    absent = {spec.name for spec in inputs if held and spec.name not in held}
    states = _states(inputs, outputs, absent)
    mapping = mapping_of(given, [i for i in inputs if i.name not in states], held, bool(states))
    state = ", ".join(f"{scalar(name)}: {scalar(output)}" for name, output in states.items())
    values = {"mapping": mapping, "state": f"\n    state: {{{state}}}" if states else ""}
    return FEEDS.format(
        why=why,
        calibration=FEEDS_FOR_RANGES.format(**values) if calibrated else "",
        **values,
        metric=metric,
        target=f"target: {scalar(label)}" if label else f"# target: {LABEL}{OF_ANSWERS}",
        sequence=SEQUENCE if states else "",
    )


def _of_one_sample(inputs: Sequence[TensorSpec]) -> bool:
    return all(spec.shape and spec.shape[0] == 1 for spec in inputs)


def _states(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], absent: Collection[str] = ()
) -> dict[str, str]:
    """Return outputs that look like the next value of an input without an axis of samples.

    They have its shape and type; of several, one whose name begins or ends with the input's comes
    first. Where all inputs are of one sample, others are none, but for the only one that is
    like an input which the files lack; nor are they of an input that has
    samples and that the files do not hold (``absent``).
    """
    states: dict[str, str] = {}
    single = _of_one_sample(inputs)
    first = {i.name for i in inputs if i.shape and not isinstance(i.shape[0], int)}
    stacked = first.difference(absent)
    for spec in inputs:
        like = [
            output.name
            for output in outputs
            if output.dtype == spec.dtype
            and may_agree(output.shape, spec.shape)
            and output.name not in states.values()
        ]
        if spec.shape and spec.name not in stacked and like:
            named = [n for n in like if n.startswith(spec.name) or n.endswith(spec.name)]
            sole = single and spec.name in absent and len(like) == 1
            if named or sole or not (single or spec.name in first):
                states[spec.name] = (named or like)[0]
    return states if len(states) < len(inputs) else {}


def _rest(name: str, size_ratio: float | None = 1.0, storage: str = STORAGE) -> str:
    size = "null" if size_ratio is None else size_ratio
    return REST.format(output=scalar(f"out/{name}"), size_ratio=size, storage=storage)


def _pretrained(
    model: Path, relative: str, name: str, given: Given
) -> tuple[str, Sequence[TensorSpec]]:
    """Return the starter spec for a Hugging Face directory, all but its head, and its inputs."""
    from compressor.lab.inspect.checkpoint import weight_summary
    from compressor.models.transformers.carrier import further_inputs, text_inputs
    from compressor.models.transformers.classes import auto_class_for, saved_from
    from compressor.models.transformers.lengths import piece_length
    from compressor.models.transformers.networks import read_config
    from compressor.models.transformers.pooling import pools

    config = read_config(model)
    # A decoder that makes vectors of texts may still be called one that continues them.
    auto_class = "AutoModel" if pools(model) else auto_class_for(saved_from(config))
    weights, place = weight_summary(model), scalar(relative)
    tensors, parameters = weights.tensors, weights.parameters
    first = PRETRAINED.format(
        model=place, tensors=tensors, parameters=parameters, auto_class=auto_class
    )
    if weights.bfloat16:
        why = "in which ONNX Runtime does not compute"
        first += WIDENED.format(dtype="bfloat16", why=why)
    if auto_class == "AutoModelForCausalLM":
        text = continued_text(place, piece_length(config), weights)
        storage = WIDENED_STORAGE if weights.bfloat16 else STORAGE
        return first + text + _rest(name, storage=storage), ()
    part, others, network, inputs = _usual(model, auto_class, config, given)
    if any(spec.dtype in _HALVES for spec in inputs):
        inputs = tuple(replace(i, dtype="float32") for i in inputs)
        first += (
            "" if weights.bfloat16 else WIDENED.format(dtype="float16", why="which no data are")
        )
    if part:
        first += (SIDE if others else PART).format(part=part, others=others)
    built = type(network).__name__ if network is not None else saved_from(config)
    texts = () if network is None else text_inputs(network)
    if texts and (built.endswith(CHOICES) or len(inputs) > 1):
        inputs = (*texts, *inputs[1:])
        inputs = choices_of(inputs) if built.endswith(CHOICES) else inputs
        first += written_inputs(inputs, further_inputs(network, inputs))
    elif texts and has_tokenizer(model):
        text = text_data(place, auto_class, network, given, part=part, side=bool(others))
        return first + text + _passes(ENCODER_OF_TEXT) + _rest(name, storage=""), ()
    if not inputs:
        first += UNKNOWN_INPUTS
        image = "image_size" in config
        inputs = (TensorSpec("pixel_values" if image else "input_ids", ("batch",), "float32"),)
    recipe = USUAL if inputs[0].name == "pixel_values" else ENCODER
    described = SimpleNamespace(**config) if network is None else network.config
    metric, scored = head_metric(built, described)
    data = given.part(inputs, calibrated=recipe.calibrated, scored=scored, metric=metric)
    data = data or of_arrays(inputs, given, recipe.calibrated, metric)
    return first + data + _passes(recipe) + _rest(name), inputs


def _usual(
    model: Path, auto_class: str, config: dict[str, Any], given: Given
) -> tuple[str, str, Any, tuple[TensorSpec, ...]]:
    """Return the path of what is run, those of other sides, itself, and its usual inputs.

    Of an encoder and decoder that is the encoder, and of two sides the one that the data are for.
    The network is built on the ``meta`` device; where that cannot be done, all is empty.
    """
    from compressor.models.transformers.carrier import encoder_path, sides_of, usual_inputs
    from compressor.models.transformers.classes import library
    from compressor.models.transformers.networks import network_of

    try:
        declared = getattr(library(), auto_class, None)
        if declared is None:  # the file names a class that the library does not have
            return "", "", None, ()
        network = network_of(declared, config, model)
        sides = sides_of(network)
        path = _side(sides, given) if sides else encoder_path(network)
        others = " or ".join(side for side in sides.values() if side != path)
        part = network.get_submodule(path)
        return path, others, part, usual_inputs(part)
    except (SpecError, ModelError):
        return "", "", None, ()


def _side(sides: Mapping[str, str], given: Given) -> str:
    """Return the side that the data are for; without data that of images, if there is one."""
    found = given.found
    kind = "images" if found is None else found.kind
    wanted = _READ.get(kind, given.arrays[1])
    chosen = next((path for name, path in sides.items() if name in wanted), "")
    return chosen or sides.get("pixel_values") or next(iter(sides.values()))
