"""The carrier of ONNX files, and of any model once a graph pass has changed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from google.protobuf.message import DecodeError
from onnx_ir import tensor_adapters

from compressor.carriers.ort_runner import OrtRunner, graph_runner
from compressor.errors import ModelError, SpecError
from compressor.graph.clean import clean, infer_shapes
from compressor.graph.layers import graph_layers
from compressor.graph.values import all_nodes, tensor_spec
from compressor.types.carrier import Capability
from compressor.types.layers import Layer
from compressor.types.tensors import TensorSpec

_STATE = "graph.onnx"
_EXTERNAL_FROM = 1 << 16  # bytes: larger tensors lie beside the graph, where they can be mapped


class OnnxCarrier:
    """A model as an ONNX IR graph.

    Args:
        graph: the model; shared, never changed in place.
    """

    kind = "onnx"
    offers = frozenset({Capability.WEIGHTS, Capability.RUN, Capability.GRAPH})

    def __init__(self, graph: ir.Model):
        self._graph = graph
        self.inputs = _specs(graph.graph.inputs)
        self.outputs = _specs(graph.graph.outputs)

    def layers(self) -> tuple[Layer, ...]:
        """The layers in the order of execution."""
        return graph_layers(self._graph)

    def weight(self, layer: Layer) -> torch.Tensor:
        """The layer's weight in its stored shape."""
        return torch.from_numpy(np.array(_constant(self._graph, layer.weight).numpy()))

    def with_weights(self, changes: Mapping[str, torch.Tensor]) -> OnnxCarrier:
        """Return a carrier with some initializers replaced."""
        graph = self._graph.clone()
        for name, tensor in changes.items():
            _constant(graph, name)
            value = graph.graph.initializers[name]
            value.const_value = tensor_adapters.TorchTensor(tensor.contiguous(), name=name)
            value.dtype = value.const_value.dtype
            value.shape = ir.Shape(tuple(tensor.shape))
        return OnnxCarrier(graph)

    def graph(self) -> ir.Model:
        """The model in ONNX IR. Shared: clone it before changing it."""
        return self._graph

    def with_graph(self, graph: ir.Model) -> OnnxCarrier:
        """Return a carrier of the changed graph."""
        return OnnxCarrier(graph)

    def check_finite(self, subject: str) -> None:
        """Refuse NaN everywhere, and infinity in layers: a mask may well hold it.

        Raises:
            ModelError: a tensor holds such values.
        """
        _check_finite(self._graph, subject)

    def runner(self, taps: Sequence[str] = ()) -> OrtRunner:
        """Start ONNX Runtime on the graph; ``taps`` are yielded as further outputs."""
        return graph_runner(self._graph, taps)

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


def restore_graph(directory: Path) -> OnnxCarrier:
    """Return the carrier saved in ``directory``; large tensors stay memory-mapped."""
    return OnnxCarrier(ir.load(directory / _STATE))


def open_onnx(path: Path, opset: int) -> OnnxCarrier:
    """Read an ONNX file, bring it to ``opset`` where it is older, and check it.

    Raises:
        SpecError: the path is missing.
        ModelError: it is cut or not ONNX.
    """
    subject = f"model {str(path)!r}"
    if not path.is_file():
        raise SpecError(subject, "does not exist", "check model.onnx")
    try:
        model = ir.load(path)
    except (DecodeError, ValueError, TypeError, KeyError, OSError) as error:
        raise ModelError(
            subject,
            f"is not an ONNX file ({type(error).__name__})",
            "the file is cut or of another format",
        ) from error
    if not len(model.graph) or not model.opset_imports:
        raise ModelError(subject, "holds no graph", "the file is cut or of another format")
    _check_external(model, path)
    model = _upgrade(model, opset, subject)
    clean(model)
    infer_shapes(model)
    return OnnxCarrier(model)


def external_files(path: Path) -> tuple[Path, ...]:
    """Return the external data files of an ONNX file, sorted."""
    names = {str(t.location) for t in _external_tensors(ir.load(path))}
    return tuple(path.parent / name for name in sorted(names))


def _specs(values: Sequence[ir.Value]) -> tuple[TensorSpec, ...]:
    return tuple(tensor_spec(v) for v in values)


def _constant(model: ir.Model, name: str) -> ir.TensorProtocol:
    value = model.graph.initializers.get(name)
    if value is None or value.const_value is None:
        raise KeyError(f"no initializer {name!r}")
    return value.const_value


def _external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yield every tensor that lies in another file: of initializers and of attributes."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value
    for node in all_nodes(model.graph):
        for attribute in node.attributes.values():
            found = [attribute.value] if attribute.type == ir.AttributeType.TENSOR else []
            found = list(attribute.as_tensors()) if _is_list(attribute) else found
            yield from (t for t in found if isinstance(t, ir.ExternalTensor))


def _is_list(attribute: ir.Attr) -> bool:
    return attribute.type == ir.AttributeType.TENSORS and not attribute.is_ref()


def _check_external(model: ir.Model, path: Path) -> None:
    folder = path.parent.resolve()
    for tensor in _external_tensors(model):
        file = folder / tensor.location
        if not file.resolve().is_relative_to(folder):
            raise ModelError(
                f"model {str(path)!r}",
                f"keeps {tensor.name!r} outside its folder, at {str(tensor.location)!r}",
                "keep external data beside the model",
            )
        end = (tensor.offset or 0) + (tensor.length or 0)
        if not file.is_file() or file.stat().st_size < end:
            raise ModelError(
                f"model {str(path)!r}",
                f"external data file {str(tensor.location)!r} is missing or too short",
                "copy it beside the model again",
            )


def _upgrade(model: ir.Model, opset: int, subject: str) -> ir.Model:
    have = model.opset_imports.get("", 0)
    if have >= opset:
        return model
    from onnxscript import version_converter

    try:
        version_converter.convert_version(model, opset, fallback=True)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ModelError(
            subject,
            f"opset {have} cannot be brought to {opset} ({str(error).splitlines()[0][:200]})",
            "export the model again with a newer opset",
        ) from error
    return model


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
