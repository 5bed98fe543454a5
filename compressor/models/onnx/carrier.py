"""The carrier of ONNX files, and of any model once a graph pass has changed it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from onnx_ir import tensor_adapters

from compressor.errors import ModelError, SpecError
from compressor.graph.channels.lengths import note_static_lengths
from compressor.graph.codebooks import attach_codebook
from compressor.graph.codes import attach_codes
from compressor.graph.editing import clean, infer_shapes
from compressor.graph.layers import graph_layers
from compressor.graph.values import tensor_spec
from compressor.models.executor import from_numpy
from compressor.models.executor.dtypes import TORCH_DTYPES
from compressor.models.onnx.checks import upgraded
from compressor.models.onnx.file import read_onnx
from compressor.models.onnx.ort_runner import runner_of
from compressor.types.carrier import Capability, Runner, WeightChange
from compressor.types.channels import Units
from compressor.types.layers import Layer
from compressor.types.quantized import QuantizedTensor, WeightCodes
from compressor.types.tensors import StoredTensor, TensorSpec

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
        self.inputs = _specs(graph.graph.inputs)
        self.outputs = _specs(graph.graph.outputs)

    @cached_property
    def offers(self) -> frozenset[Capability]:
        """All, but no run where an operator is of a domain that ONNX Runtime does not know."""
        from compressor.models.onnx.checks import foreign_operators

        every = frozenset({Capability.WEIGHTS, Capability.RUN, Capability.GRAPH})
        return every - {Capability.RUN} if foreign_operators(self._graph) else every

    def layers(self) -> tuple[Layer, ...]:
        """The layers in the order of execution."""
        return graph_layers(self._graph)

    def weight(self, layer: Layer) -> torch.Tensor:
        """The layer's weight in its stored shape."""
        return from_numpy(_constant(self._graph, layer.weight))

    def tensors(self) -> dict[str, StoredTensor]:
        """All initializers of the main graph."""
        found = {}
        for name, value in self._graph.graph.initializers.items():
            tensor = value.const_value
            if tensor is not None and tensor.dtype in TORCH_DTYPES:
                found[name] = StoredTensor(
                    name,
                    tuple(int(d) for d in tensor.shape.numpy()),
                    TORCH_DTYPES[tensor.dtype],
                    partial(from_numpy, tensor),
                )
        return found

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
        """Return a carrier with some float weights changed; they are computed at once.

        Raises:
            KeyError: there is no initializer of a name.
        """
        return self.with_weights(
            {name: change.stored(self.weight(change.layer)) for name, change in changes.items()}
        )

    def with_codes(self, changes: Mapping[str, WeightCodes]) -> OnnxCarrier:
        """Return a carrier with some float weights stored as codes, found when they are read."""
        return OnnxCarrier(graph_with_codes(self._graph, changes, self.weight))

    def graph(self) -> ir.Model:
        """The model in ONNX IR. Shared: clone it before changing it."""
        return self._graph

    def with_graph(self, graph: ir.Model) -> OnnxCarrier:
        """Return a carrier of the changed graph."""
        return OnnxCarrier(graph)

    def with_channels(
        self,
        graph: ir.Model,
        kept: Mapping[str, Mapping[int, Units]],  # noqa: ARG002
        *,
        planned: bool = False,  # noqa: ARG002
    ) -> OnnxCarrier:
        """Return a carrier of the smaller graph."""
        return OnnxCarrier(graph)

    def with_trainable_graph(
        self,
        graph: ir.Model,
        parameters: Collection[str],  # noqa: ARG002
        *,
        planned: bool = False,  # noqa: ARG002
    ) -> OnnxCarrier:
        """Return a carrier of the changed graph; it is not trained."""
        return OnnxCarrier(graph)

    def check_finite(self, subject: str) -> None:
        """Refuse NaN everywhere, and infinity in layers: a mask may well hold it.

        Raises:
            ModelError: a tensor holds such values.
        """
        _check_finite(self._graph, subject)

    def trainable(self) -> NoReturn:
        """Raise ``SpecError``: a graph is not trained."""
        raise SpecError(
            "training",
            "needs the PyTorch module, and here is a graph",
            "train before the passes that work on the graph, or give model.factory",
        )

    def runner(self, taps: Sequence[str] = ()) -> Runner:
        """Start what runs the graph; ``taps`` are yielded as further outputs.

        Raises:
            ModelError: the runtime does not load the graph.
        """
        from compressor.models.onnx.checks import foreign_operators

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
        """Write the graph, large tensors beside it."""
        ir.save(
            self._graph,
            directory / _STATE,
            external_data=_STATE + ".data",
            size_threshold_bytes=_EXTERNAL_FROM,
        )

    def restore(self, directory: Path) -> OnnxCarrier:
        """Return the carrier that was saved there."""
        return restore_graph(directory)


def graph_with_codes(
    graph: ir.Model,
    changes: Mapping[str, WeightCodes],
    weight: Callable[[Layer], torch.Tensor],
) -> ir.Model:
    """Return a copy of a graph in which some float weights are stored as codes.

    Args:
        graph: the model; not changed.
        changes: the codes by the weight's name.
        weight: returns a layer's float weight in its stored shape.

    Raises:
        KeyError: no layer has a weight of a name.
        ValueError: a weight cannot be stored so.
    """
    changed = graph.clone()
    layers = {layer.weight: layer for layer in graph_layers(changed)}
    for name, codes in changes.items():
        layer = layers[name]
        compute = partial(_computed, codes, layer, weight)
        if codes.scheme.element == "codebook":
            attach_codebook(changed, layer, codes.scheme, compute)
        else:
            attach_codes(changed, layer, codes.scheme, compute)
    return changed


def _computed(
    codes: WeightCodes, layer: Layer, weight: Callable[[Layer], torch.Tensor]
) -> QuantizedTensor:
    return codes.compute(layer.canonical(weight(layer)))


def restore_graph(directory: Path) -> OnnxCarrier:
    """Return the carrier saved in ``directory``; large tensors stay memory-mapped."""
    return OnnxCarrier(ir.load(directory / _STATE))


def open_onnx(path: Path, opset: int) -> OnnxCarrier:
    """Read an ONNX file, check it, and bring it to ``opset`` where it is older.

    Raises:
        SpecError: the path is missing or a folder.
        ModelError: it is cut, not ONNX, breaks ONNX's rules, or ONNX Runtime refuses it.
    """
    from compressor.models.onnx.checks import (
        OLDEST_RUN,
        check_loads,
        check_operators,
        foreign_operators,
    )

    subject = f"model {str(path)!r}"
    model = read_onnx(path)
    common.InlinePass()(model)
    check_operators(model, subject)
    runs = not foreign_operators(model)
    old = model.opset_imports.get("", opset) < OLDEST_RUN
    if runs and not old:
        check_loads(model, subject)
    model = upgraded(model, opset, subject)
    clean(model)
    infer_shapes(model)
    note_static_lengths(model)
    if runs and old:
        check_loads(model, subject)
    return OnnxCarrier(model)


def _specs(values: Sequence[ir.Value]) -> tuple[TensorSpec, ...]:
    return tuple(tensor_spec(v) for v in values)


def _constant(model: ir.Model, name: str) -> ir.TensorProtocol:
    value = model.graph.initializers.get(name)
    if value is None or value.const_value is None:
        raise KeyError(f"no initializer {name!r}")
    return value.const_value


def _check_finite(model: ir.Model, subject: str) -> None:
    layers = graph_layers(model)
    weights = {layer.weight for layer in layers} | {layer.bias for layer in layers}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point():
            continue
        array = tensor.numpy().astype(np.float32, copy=False)
        wrong = ~np.isfinite(array) if name in weights else np.isnan(array)
        bad = int(np.count_nonzero(wrong))
        if bad:
            raise ModelError(
                subject,
                f"tensor {name!r} holds {bad} values that are NaN or infinite",
                "the training diverged or the file is damaged; use an earlier checkpoint",
            )
