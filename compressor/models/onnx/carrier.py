"""The carrier of ONNX files, and of any model once a graph pass has changed it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NoReturn

import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from onnx_ir import tensor_adapters

from compressor.errors import ModelError, SpecError, first_line
from compressor.graph.codebooks import attach_codebook
from compressor.graph.codes import attach_codes
from compressor.graph.editing import Editor
from compressor.graph.folding import fold_sorted_gates
from compressor.graph.group_norms import own_constants
from compressor.graph.layers import graph_layers
from compressor.graph.module_names import name_by_modules
from compressor.graph.plain import make_plain
from compressor.graph.skeleton import converted
from compressor.graph.values import tensor_spec
from compressor.models.element_types import TORCH_DTYPES, from_numpy
from compressor.models.executor import GraphModule
from compressor.models.onnx.checks import (
    check_loads,
    check_operators,
    foreign_operators,
    free_wrong_ranks,
)
from compressor.models.onnx.file import read_onnx
from compressor.models.onnx.ort_runner import (
    OLDEST_RUN,
    lacks_kernels,
    runner_of,
)
from compressor.models.onnx.saving import save_graph
from compressor.models.torch.matching import check_finite
from compressor.progress import quiet_libraries
from compressor.types.carrier import Capability, Runner, WeightChange
from compressor.types.layers import Layer, StoredTensor, WeightCodes

_OLDEST_OF_ONNXSCRIPT = 18  # its converter works in memory; older opsets need the onnx package's
_STATE = "graph.onnx"
_EXTERNAL_FROM = 1 << 16  # bytes: larger tensors lie beside the graph, where they can be mapped


class OnnxCarrier:
    """A model as an ONNX IR graph.

    Args:
        graph: the model; shared, never changed in place.
    """

    kind = "onnx"
    folder = None

    def __init__(self, graph: ir.Model):
        self._graph = graph
        self.inputs = tuple(tensor_spec(value) for value in graph.graph.inputs)
        self.outputs = tuple(tensor_spec(value) for value in graph.graph.outputs)

    @cached_property
    def offers(self) -> frozenset[Capability]:
        """Weights and graph, and run unless ONNX Runtime lacks an operator's domain."""
        offered = frozenset({Capability.WEIGHTS, Capability.RUN, Capability.GRAPH})
        return offered - {Capability.RUN} if foreign_operators(self._graph) else offered

    @cached_property
    def _layers(self) -> tuple[Layer, ...]:
        return graph_layers(self._graph)

    def layers(self) -> tuple[Layer, ...]:
        """The layers in the order of execution; the graph is walked once."""
        return self._layers

    def weight(self, layer: Layer) -> torch.Tensor:
        """The layer's weight in its stored shape."""
        return from_numpy(_constant(self._graph, layer.weight))

    def tensors(self) -> dict[str, StoredTensor]:
        """All initializers of the main graph."""
        tensors = {}
        for name, value in self._graph.graph.initializers.items():
            tensor = value.const_value
            if tensor is not None and tensor.dtype in TORCH_DTYPES:
                tensors[name] = StoredTensor(
                    name,
                    tuple(int(d) for d in tensor.shape.numpy()),
                    TORCH_DTYPES[tensor.dtype],
                    partial(from_numpy, tensor),
                )
        return tensors

    def with_weights(self, changes: Mapping[str, torch.Tensor]) -> OnnxCarrier:
        """Return a carrier with some initializers replaced."""
        graph = self._graph.clone()
        for name, tensor in changes.items():
            _constant(graph, name)
            value = graph.graph.initializers[name]
            value.const_value = tensor_adapters.TorchTensor(tensor.contiguous(), name=name)
            # Clones share their type objects, so a new one is set.
            value.type = ir.TensorType(value.const_value.dtype)
            value.shape = ir.Shape(tuple(tensor.shape))
        return OnnxCarrier(graph)

    def with_changes(self, changes: Mapping[str, WeightChange]) -> OnnxCarrier:
        """Return a carrier with some float weights changed; the changes are computed now.

        Raises:
            KeyError: there is no initializer of a name.
        """
        return self.with_weights(
            {name: change.stored(self.weight(change.layer)) for name, change in changes.items()}
        )

    def with_codes(self, changes: Mapping[str, WeightCodes]) -> OnnxCarrier:
        """Return a carrier with some float weights stored as codes, computed when first read."""
        return OnnxCarrier(graph_with_codes(self._graph, changes, self.weight))

    def graph(self) -> ir.Model:
        """The model in ONNX IR. Shared: clone it before changing it."""
        return self._graph

    def with_graph(self, graph: ir.Model, *_: object, **__: object) -> OnnxCarrier:
        """Return a carrier of the changed graph; it is not trained."""
        return OnnxCarrier(graph)

    with_channels = with_trainable_graph = with_graph

    def check_finite(self, subject: str) -> None:
        """Refuse NaN everywhere, and infinity in layers (masks may well hold it).

        Raises:
            ModelError: a tensor holds such values.
        """
        weights = {name for layer in self._layers for name in (layer.weight, layer.bias)}
        initializers = self._graph.graph.initializers
        floats = (
            (name, from_numpy(value.const_value))
            for name, value in initializers.items()
            if value.const_value is not None and value.const_value.dtype.is_floating_point()
        )
        check_finite(floats, subject, may_be_infinite=initializers.keys() - weights)

    def trainable(self) -> NoReturn:
        """Raise ``SpecError``: a graph is not trained."""
        raise SpecError(
            "training",
            "needs the PyTorch module, and here is a graph",
            "train before the passes that work on the graph, or set model.factory",
        )

    def runner(self, taps: Sequence[str] = ()) -> Runner:
        """Start a runtime for the graph, which also returns the values named by ``taps``.

        Raises:
            ModelError: the runtime does not load the graph.
        """
        foreign = foreign_operators(self._graph)
        if foreign:
            raise ModelError(
                "model",
                f"cannot be run: ONNX Runtime has no operator {foreign[0]}",
                "use passes that need no data, and leave data out; or export the model again "
                "without it",
            )
        return runner_of(self._graph, taps)

    def save(self, directory: Path) -> None:
        """Write the graph, with large tensors in a file beside it."""
        save_graph(self._graph, directory / _STATE, _EXTERNAL_FROM)

    def restore(self, directory: Path) -> OnnxCarrier:
        """Return the carrier that was saved in ``directory``."""
        return restore_graph(directory)


def graph_with_codes(
    graph: ir.Model,
    changes: Mapping[str, WeightCodes],
    weight: Callable[[Layer], torch.Tensor],
) -> ir.Model:
    """Return a copy of a graph in which some float weights are stored as codes.

    Args:
        changes: the codes by the weight's name.
        weight: returns a layer's float weight in its stored shape.

    Raises:
        KeyError: no layer has a weight of a name.
        ValueError: a weight cannot be stored so.
    """
    changed = graph.clone()
    layers = {layer.weight: layer for layer in graph_layers(changed)}
    editor = Editor(changed)  # one for all: it looks at every node
    for name, codes in changes.items():
        attach = attach_codebook if codes.scheme.element == "codebook" else attach_codes
        attach(editor, layers[name], codes.scheme, partial(codes.read, weight))
    return changed


def restore_graph(directory: Path) -> OnnxCarrier:
    """Return the carrier saved in ``directory``; large tensors stay memory-mapped."""
    return OnnxCarrier(ir.load(directory / _STATE))


def open_onnx(path: Path, opset: int) -> OnnxCarrier:
    """Read an ONNX file, check it, and convert it to ``opset`` if it is older.

    Weights that PyTorch's exporters left nameless are named after their modules.

    Example:
        >>> carrier = open_onnx(Path("model.onnx"), opset=21)
        >>> carrier.layers()[0].name
        'conv1'

    Raises:
        SpecError: the path is missing or a folder.
        ModelError: it is cut, not ONNX, breaks ONNX's rules, takes or gives text, or ONNX Runtime
            refuses it.
    """
    subject = f"model {str(path)!r}"
    model = read_onnx(path)
    check_numbers(model, subject)
    _check_shapes(model, subject)
    common.InlinePass()(model)
    free_wrong_ranks(model)
    fold_sorted_gates(model)
    name_by_modules(model)
    check_operators(model, subject)
    old = model.opset_imports.get("", opset) < OLDEST_RUN
    in_torch = not old and _runs_in_torch(model, subject)
    model = upgraded(model, opset, subject)
    make_plain(model)
    own_constants(model)
    if in_torch or (old and _runs_in_torch(model, subject)):
        GraphModule(model)
    return OnnxCarrier(model)


def _runs_in_torch(model: ir.Model, subject: str) -> bool:
    """Whether a graph runs in PyTorch, since ONNX Runtime lacks kernels; else check that it loads.

    Raises:
        ModelError: ONNX Runtime refuses the model, of which it has all operators.
    """
    if foreign_operators(model):
        return False
    if lacks_kernels(model):
        return True
    check_loads(model, subject)
    return False


def check_numbers(model: ir.Model, subject: str) -> None:
    """Check that a model takes and gives numbers.

    Raises:
        ModelError: an input or output is text.
    """
    for role, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
        for value in values:
            if value.dtype == ir.DataType.STRING:
                raise ModelError(
                    subject,
                    f"{role} {value.name!r} is text",
                    "cut off what works on text, and export the model again with numbers",
                )


def _check_shapes(model: ir.Model, subject: str) -> None:
    """Check that a model says how many axes its inputs have.

    Raises:
        ModelError: an input does not.
    """
    for value in model.graph.inputs:
        if value.shape is None:
            raise ModelError(
                subject,
                f"input {value.name!r} has no shape",
                "export the model again; dynamic axes may be names",
            )


def _constant(model: ir.Model, name: str) -> ir.TensorProtocol:
    value = model.graph.initializers.get(name)
    if value is None or value.const_value is None:
        raise KeyError(f"no initializer {name!r}")
    return value.const_value


def upgraded(model: ir.Model, opset: int, subject: str) -> ir.Model:
    """Return a graph in an opset, or in its own if that is newer; value names stay the same.

    Args:
        model: the graph; may be changed.
    """
    have = model.opset_imports.get("")
    if have is None:  # all operators are of other domains
        model.opset_imports[""] = opset
        return model
    if have >= opset:
        return model
    result = model
    try:
        if have < _OLDEST_OF_ONNXSCRIPT:
            result = converted(model, opset)
        else:
            from onnxscript import version_converter

            with quiet_libraries():
                version_converter.convert_version(model, opset, fallback=False)
    except (RuntimeError, ValueError, NotImplementedError, ir.serde.SerdeError) as error:
        raise _refused(subject, have, opset, first_line(error)) from error
    if result.opset_imports.get("") != opset:
        raise _refused(subject, have, opset, "the converter left it as it was")
    result.producer_name, result.producer_version = model.producer_name, model.producer_version
    result.metadata_props.update(model.metadata_props)
    return result


def _refused(subject: str, have: int, opset: int, reason: str) -> ModelError:
    return ModelError(
        subject,
        f"cannot be converted from opset {have} to {opset} ({reason})",
        "export the model again with a newer opset",
    )
