"""What a starter spec does to an ONNX file: chosen by what is in the file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from compressor import catalog
from compressor.calibration.collect import make_observer
from compressor.errors import ModelError, SpecError
from compressor.graph.blocks import values_read
from compressor.graph.editing import inner_nodes
from compressor.graph.operators import operator
from compressor.graph.output_parts import compared_outputs
from compressor.graph.stored_weights import is_quantized
from compressor.graph.values import all_nodes
from compressor.run.metrics.scores import scored_output
from compressor.types.carrier import Capability, Carrier
from compressor.types.layers import Layer
from compressor.types.passes import PassContext
from compressor.types.tensors import TensorSpec

_CLASSICAL = "ai.onnx.ml"
_HALVES = ("float16", "bfloat16")
_WIDE = ("float64",)
_TARGET = "ort-cpu"  # of the export in a starter spec
_GROUPS = (128, 32)  # that presets of four bits have
_BEHIND_SCORES = ("Softmax", "LogSoftmax", "Add", "Mul", "Div")
_KEEPS = ("same", "type")  # how an operator moves what it reads


@dataclass(frozen=True)
class Step:
    """One pass of a recipe.

    Attributes:
        name: the pass.
        options: its options, as in a spec.
        why: a comment on it.
    """

    name: str
    options: Mapping[str, Any]
    why: str


@dataclass(frozen=True)
class Recipe:
    """The passes of a starter spec.

    Attributes:
        title: what the model is, and so why these.
        calibrated: they need calibration data.
        size_ratio: a limit that they should keep; `None` where they make nothing smaller.
    """

    title: str
    steps: tuple[Step, ...]
    calibrated: bool
    size_ratio: float | None = 1.0

    def lines(self) -> Iterator[str]:
        """Yield the lines of the passes in YAML."""
        for step in self.steps:
            yield f"  # {step.why}"
            yield f"  - pass: {step.name}"
            yield from (f"    {key}: {value}" for key, value in step.options.items())
        if self.steps[-1] is not _FUSE:
            yield "    # layers: # rules for single layers; the first that matches wins"
            yield '    #   - {match: "head*", skip: true}'


_FLOATS = Step(
    "cast", {"dtype": "fp32"}, "Make floats of what is quantized, so that passes can work."
)
_SINGLE = Step(
    "cast", {"dtype": "fp32"}, "Compute in float32 in place of float64, so that passes can work."
)
_FUSE = Step(
    "fuse",
    {},
    "Fold batch-norm and constants into the layers before them; fewer and larger operators.",
)
_STATIC = Step(
    "quantize-static",
    {},
    "8-bit weights and activations, with ranges from the calibration data.",
)
_DYNAMIC = Step(
    "quantize-dynamic",
    {},
    "8-bit weights; activations are quantized while the model runs. No calibration data.",
)
_BYTES = Step(
    "quantize-weights",
    {"preset": "int8"},
    "8-bit weights; products stay in floating point. No calibration data.",
)


USUAL = Recipe("", (_FUSE, _STATIC), calibrated=True)
"""For a model of which nothing is known."""

ENCODER_OF_TEXT = Recipe("an encoder of text", (_FUSE, _STATIC), calibrated=True)

ENCODER = Recipe("an encoder of the transformer family", (_FUSE, _DYNAMIC), calibrated=False)


def check_worth(
    nodes: Sequence[tuple[str, str]], weights: int, inputs: Collection[str], subject: str
) -> None:
    """Check that there is something to compress, whatever else a file is.

    Args:
        nodes: domain and operator of each node.
        weights: initializers with more than one axis.
        inputs: what data are given to.

    Raises:
        ModelError: it computes with trees or the like, and holds no weights; or it has no inputs.
    """
    if nodes and not inputs:
        raise ModelError(
            subject,
            "has no inputs, so that no data can calibrate or judge it",
            "serve it as it is; there is nothing to do",
        )
    classical = dict.fromkeys(name for domain, name in nodes if domain == _CLASSICAL)
    if classical and not weights:
        raise ModelError(
            subject,
            f"holds no weights that could be pruned or quantized: it computes with "
            f"{', '.join(classical)}",
            "serve it as it is; there is nothing to do",
        )


def recipe_for(carrier: Carrier) -> Recipe:
    """Return the recipe for a model, of those that ``compress plan`` accepts.

    Where nothing can run the model, it needs no calibration data.

    Raises:
        ModelError: it is quantized in a way that is not known.
    """
    half, wide = (_mostly(carrier, types) for types in (_HALVES, _WIDE))
    quantized = is_quantized(carrier.graph())
    first = _FLOATS if quantized else _SINGLE
    floats = _after(carrier, (first,)) if quantized or wide else None
    start = () if floats is None else (first,)
    carrier = floats or carrier
    title, chosen = _choice(carrier)
    fallback = ((_FUSE, _STATIC), (_FUSE, _DYNAMIC), (_BYTES,))
    runs = Capability.RUN in carrier.offers
    known = (
        tuple(_BYTES if s is _STATIC and not runs else s for s in steps)
        for steps in (chosen, *fallback)
    )
    fitting = (s for s in known if s and _after(carrier, s) is not None)
    steps = next(fitting, (_FUSE,))
    recipe = Recipe(title, (*start, *steps), any(s is _STATIC for s in steps))
    if steps == (_FUSE,):
        return replace(recipe, title="a model without weights to quantize", size_ratio=None)
    if start == (_FLOATS,):
        return replace(recipe, title=f"{title}, quantized already", size_ratio=1.2)
    if start:
        return replace(recipe, title=f"{title} in float64")
    if half:
        return replace(recipe, title=f"{title} in half precision")
    return recipe


def _mostly(carrier: Carrier, types: Collection[str]) -> bool:
    """Whether most weights of the layers have one of these types."""
    layers = carrier.layers()
    of_types = sum(layer.parameters for layer in layers if layer.dtype in types)
    return of_types * 2 > sum(layer.parameters for layer in layers)


def judged_outputs(carrier: Carrier) -> tuple[TensorSpec, ...]:
    """Return the outputs that say what a model finds, of those that it has.

    Not among them is what :func:`compared_outputs` leaves out, and what no layer computes, such as
    an input that is handed through. Without its graph, all are.
    """
    if Capability.GRAPH not in carrier.offers:
        return tuple(carrier.outputs)
    graph = carrier.graph()
    found = list(zip(carrier.outputs, graph.graph.outputs, compared_outputs(graph), strict=True))
    found = [entry for entry in found if _of_layers(entry[1])] or found
    found = [entry for entry in found if entry[2]] or found
    return tuple(spec for spec, _, _ in found)


def scores_classes(carrier: Carrier) -> bool:
    """Whether a model gives a score for each class: a layer computes them, or its softmax.

    It may be scaled, as where the classifier is one of cosines, or has a temperature, and computed
    in the branches of an ``If``. Beside these scores there is at most what :func:`judged_outputs`
    leaves out, and metrics about classes read them. A model whose output has the form of an input,
    as that of an autoencoder, estimates numbers.
    """
    judged = judged_outputs(carrier)
    if Capability.GRAPH not in carrier.offers or len(judged) != 1 or len(judged[0].shape) != 2:
        return False
    if judged[0].shape[1] == 1:  # one score is always the largest
        return False
    if len(carrier.outputs) > 1 and scored_output(carrier.outputs) != judged[0].name:
        return False
    if any(
        (i.dtype, i.shape[1:]) == (judged[0].dtype, judged[0].shape[1:]) for i in carrier.inputs
    ):
        return False
    value = next(v for v in carrier.graph().graph.outputs if v.name == judged[0].name)
    return _scored(value, _constants(carrier.graph()))


def _scored(value: ir.Value, constants: Collection[ir.Value]) -> bool:
    node = value.producer()
    while node is not None and _behind_scores(node):
        computed = [i for i in node.inputs if i is not None and _varies(i, constants)]
        if operator(node).arithmetic in ("*", "/") and len(computed) != 1:
            return False  # a gate
        node, value = (computed[0].producer(), computed[0]) if computed else (None, value)
    if node is None:
        return False
    if "then_branch" in node.attributes:
        place = node.outputs.index(value)
        branches = (node.attributes[name].as_graph() for name in ("then_branch", "else_branch"))
        return all(_scored(branch.outputs[place], constants) for branch in branches)
    return operator(node).is_product and not _both_vary(node, constants)


def _of_layers(output: ir.Value) -> bool:
    """Whether a product or a convolution is among what computes an output."""
    left, seen = [output], set[ir.Node]()
    while left:
        node = left.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(operator(n).is_product for n in (node, *inner_nodes(node))):
            return True
        left += values_read(node)
    return False


def _behind_scores(node: ir.Node) -> bool:
    row = operator(node)
    if row.moves == "shape":  # and drops or adds axes of length 1, at most
        before, after = (_row_of(value) for value in (node.inputs[0], node.outputs[0]))
        return before is not None and before == after
    return row.name in _BEHIND_SCORES or row.moves in _KEEPS


def _row_of(value: ir.Value | None) -> list[int] | None:
    """Return the lengths of a sample's axes but those of length 1; ``None`` if not known."""
    if value is None or value.shape is None:
        return None
    sizes = [size for size in value.shape[1:] if isinstance(size, int)]
    return [s for s in sizes if s != 1] if len(sizes) == len(value.shape) - 1 else None


def decides(carrier: Carrier) -> bool:
    """Whether the only output holds numbers of classes: ``ArgMax`` gives them."""
    if Capability.GRAPH not in carrier.offers or len(carrier.outputs) != 1:
        return False
    node = carrier.graph().graph.outputs[0].producer()
    while node is not None and operator(node).moves not in ("", "padded") and node.inputs[0]:
        node = node.inputs[0].producer()
    if node is None:
        return False
    row = operator(node)  # a reduction that chooses an index
    return row.family == "reduction" and row.float16 == "choice"


def _choice(carrier: Carrier) -> tuple[str, tuple[Step, ...]]:
    """Return what a model of floats is, and the steps that suit it."""
    layers = carrier.layers()
    convolutional = sum(layer.parameters for layer in layers if layer.is_convolution)
    recurrent = sum(layer.parameters for layer in layers if layer.is_recurrent)
    linear = sum(layer.parameters for layer in layers if layer.is_linear)
    if recurrent > max(convolutional, linear):
        return "a recurrent network", (_FUSE, _DYNAMIC)
    if convolutional > linear or not _attends(carrier.graph(), softmax=convolutional > 0):
        if convolutional > linear and not recurrent:
            return "a convolutional network", (_FUSE, _STATIC)
        counts = {"convolutional": convolutional, "linear": linear, "recurrent": recurrent}
        kinds = ", ".join([kind for kind, count in counts.items() if count]) or "linear"
        return f"a network of {' and '.join(kinds.rsplit(', ', 1))} layers", (_FUSE, _STATIC)
    if _gives_words(carrier.graph(), layers):
        return "a decoder of text", (_FUSE, _words(layers))
    return ENCODER.title, ENCODER.steps


def _attends(model: ir.Model, *, softmax: bool) -> bool:
    """Whether products of activations with each other are computed, as attention does.

    Args:
        softmax: one operand has to be a softmax. The products of convolutional networks that
            compute their own weights are no attention.
    """
    constants = _constants(model)
    products = [
        n for n in all_nodes(model.graph) if operator(n).is_matmul and _both_vary(n, constants)
    ]
    return any(not softmax or _reads_softmax(n) for n in products)


def _constants(model: ir.Model) -> set[ir.Value]:
    """Return the values that depend on stored ones or on shapes alone, initializers aside."""
    constants: set[ir.Value] = set()
    for node in all_nodes(model.graph):
        shape = operator(node).family == "shape"
        if shape or not any(_varies(value, constants) for value in values_read(node)):
            constants.update(node.outputs)
    return constants


def _varies(value: ir.Value | None, constants: Collection[ir.Value]) -> bool:
    return value is not None and not value.is_initializer() and value not in constants


def _both_vary(node: ir.Node, constants: Collection[ir.Value]) -> bool:
    return all(_varies(value, constants) for value in node.inputs[:2])


def _reads_softmax(product: ir.Node) -> bool:
    """Whether an operand of a product is a softmax, whatever moves or scales it on its way."""
    left, seen = list(product.inputs), set[ir.Node]()
    while left:
        value = left.pop()
        node = None if value is None else value.producer()
        if node is None or node in seen or operator(node).is_product:
            continue
        if operator(node).name == "Softmax":
            return True
        seen.add(node)
        left += node.inputs
    return False


def _gives_words(model: ir.Model, layers: Sequence[Layer]) -> bool:
    """Whether an output has a score for each row of a table that is looked up."""
    words = {layer.rows for layer in layers if layer.is_table}
    ends = [value.shape[-1] for value in model.graph.outputs if value.shape]
    return any(isinstance(length, int) and length in words for length in ends)


def _words(layers: Sequence[Layer]) -> Step:
    """Return the step for a decoder: four bits, in the groups that its layers divide into."""
    columns = [layer.columns for layer in layers if layer.is_linear]
    group = next((g for g in _GROUPS if all(c % g == 0 for c in columns)), _GROUPS[-1])
    options = {"preset": f"int4-g{group}", "method": "hqq"}
    why = f"4-bit weights, with a scale for each group of {group} in a row. No calibration data."
    return Step("quantize-weights", options, why)


def _after(carrier: Carrier, steps: Sequence[Step]) -> Carrier | None:
    """Return a model as a plan sees it after some passes; ``None`` if it refuses one."""
    context = PassContext(targets=frozenset({_TARGET}))
    for step in steps:
        declared = catalog.load("pass", step.name).model_validate(dict(step.options))
        adapted = declared.adapted(carrier, context)
        try:
            survey = declared.survey(adapted, context)
        except SpecError:
            return None
        made = {r.key: make_observer(r.observer, r.options).placeholder() for r in survey.requests}
        carrier = declared.preview(adapted, context, made)
    return carrier
