"""A model in the form in which TensorRT gets it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from compressor.errors import SpecError
from compressor.exporters.onnx import OnnxExporter, opsets
from compressor.exporters.onnx.forms import in_form_for
from compressor.exporters.tensorrt.foreign import in_terms_of_tensorrt
from compressor.exporters.tensorrt.node_names import with_node_names
from compressor.types.carrier import Capability, Carrier

TARGET: Final = "tensorrt"
_FIRST_OPSET = 21


@dataclass(frozen=True)
class Form:
    """A model as TensorRT gets it.

    Attributes:
        carrier: the model; every node has a name.
        model: what the ONNX file holds, its weights lazy.
        onnx: writes the file.
    """

    carrier: Carrier
    model: ir.Model
    onnx: OnnxExporter


def form_of(carrier: Carrier) -> Form:
    """Bring a model into the form; no weight is evaluated.

    Raises:
        SpecError: there is no graph, no opset has all of it, or it is quantized in a way that
            TensorRT does not take.
    """
    if Capability.GRAPH not in carrier.offers:
        raise SpecError(
            "export tensorrt",
            f"needs a graph, a {carrier.kind} model has none",
            "give model.factory or model.onnx",
        )
    graph = carrier.graph()
    changed = with_node_names(in_terms_of_tensorrt(graph))
    own = carrier if changed is graph else carrier.with_graph(changed)
    formed = in_form_for(TARGET, changed, "float32")
    opset = _opset(formed)
    onnx = OnnxExporter(target=TARGET, opset=opset)
    return Form(own, opsets.convert(formed, opset), onnx)


def _opset(model: ir.Model) -> int:
    """Return the first opset, from 21 on, that has all of a graph."""
    first: SpecError | None = None
    for opset in range(_FIRST_OPSET, opsets.newest_opset() + 1):
        try:
            opsets.check_opset(opsets.convert(model, opset), opset)
        except SpecError as error:
            first = first or error
        else:
            return opset
    assert first is not None
    raise SpecError(first.subject, first.problem, "leave out the export tensorrt") from first
