"""Keep the graph of a PyTorch module between commands, since lowering takes seconds; check it.

What lies in the store is the graph without the module's tensors. Its key holds everything that the
graph depends on: the code, the configuration, the structure and the attributes of the module, and
versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import onnx_ir as ir
import torch

from compressor.calibration.sources.user_functions import call
from compressor.errors import InputError, ModelError, SpecError
from compressor.files import json_sha256
from compressor.graph.values import all_nodes
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.onnx.module import file_runner
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.lowering import OPSET
from compressor.models.torch.matching import held_tensors
from compressor.models.torch.saved_module import without_weights
from compressor.run.noise.signals import signal_and_error
from compressor.run.store import Store, result_key, store_of
from compressor.types.carrier import Carrier
from compressor.types.tensors import Batch

CarrierT = TypeVar("CarrierT", bound=TorchCarrier)

_GRAPH = "lowered.onnx"
_VERSION = 6  # of what is kept
_EXACT_DB = 60.0  # that a graph reaches where both are computed in float32
_NARROW_DB = {torch.float16: 48.0, torch.bfloat16: 30.0}  # each layer rounds to 11 or 8 bits
_MOST_BYTES = 1 << 30  # of constants; a protobuf file holds at most 2 GB


@dataclass(frozen=True)
class KeptGraph:
    """Where the graph of a module lies in a store, or is going to.

    Attributes:
        output: the folder that the store belongs to.
    """

    output: Path
    key: str

    def used_by(self, carrier: CarrierT) -> CarrierT:
        """Return a carrier that has the graph, if it is there and whole."""
        store = Store(store_of(self.output))
        stored = store.read(self.key)
        if stored is None:
            return carrier
        graph = ir.load(store.folder(self.key) / _GRAPH)
        for (node, name), value in zip(_floats(graph), stored["floats"], strict=True):
            node.attributes[name] = ir.AttrFloat32(name, value)
        return type(carrier)(
            carrier.module, carrier.inputs, graph, folder=carrier.folder
        ).with_own_weights()

    def keep(self, carrier: TorchCarrier, note: Callable[[str], None]) -> None:
        """Write the graph unless it is there; a folder that takes no files is no error.

        Args:
            note: called with one line if the graph that is there is damaged.
        """
        store = Store(store_of(self.output), note)
        if store.read(self.key) is not None:
            return
        graph = without_weights(carrier.lowered, carrier.module)
        constants = (v.const_value for v in graph.graph.initializers.values())
        if sum(c.nbytes for c in constants if c is not None) > _MOST_BYTES:
            return
        with suppress(InputError, SpecError), store.write(self.key) as (folder, result):
            ir.save(graph, folder / _GRAPH)
            # The file rounds them to float32, which shows in folded weights.
            result["floats"] = [node.attributes[name].value for node, name in _floats(graph)]


def _floats(graph: ir.Model) -> list[tuple[ir.Node, str]]:
    """Return where single numbers are: the nodes with their attributes' names."""
    return [
        (node, attribute.name)
        for node in all_nodes(graph.graph)
        for attribute in node.attributes.values()
        if attribute.type == ir.AttributeType.FLOAT and not attribute.is_ref()
    ]


def kept_graph(output: Path, carrier: TorchCarrier, parts: Mapping[str, Any]) -> KeptGraph:
    """Return where a module's graph is kept.

    Args:
        parts: what made the module: its factory, code and configuration, and its attributes.
    """
    tensors = held_tensors(carrier.module)
    structure = {
        "module": str(carrier.module),
        "tensors": {n: [str(t.dtype), list(t.shape)] for n, t in tensors.items()},
        "inputs": [str(i) for i in carrier.inputs],
        "opset": OPSET,
        "version": _VERSION,
    }
    return KeptGraph(output, result_key("lowered", json_sha256(structure), **parts))


def check_graph(carrier: Carrier, files: Sequence[Path], batch: Batch) -> None:
    """Check that a graph gives the outputs of the module or file that it came from.

    Args:
        files: those that were read; the first is an ONNX file's own.

    Raises:
        ModelError: their outputs differ.
        DataError: the module does not take the samples.
    """
    types = set[torch.dtype]()
    if isinstance(carrier, TorchCarrier):
        subject = f"module {type(carrier.module).__name__}"
        expected = call(f"{subject} on the first samples", carrier.module_outputs, batch)
        types = {parameter.dtype for parameter in carrier.module.parameters()}
        remedy = (
            "its forward depends on something that export froze: random numbers, "
            "the batch size, or Python state; if it has changed since the last run in a way that "
            "neither its code nor its attributes show, add --fresh"
        )
    elif isinstance(carrier, OnnxCarrier):
        subject = f"model {str(files[0])!r}"
        expected = list(file_runner(files[0], carrier.graph()).run(batch).values())
        remedy = "report it with the file; until then, export it again with opset 21"
    else:
        return
    # What the module's own type rounds away does not count.
    least = min((db for dtype, db in _NARROW_DB.items() if dtype in types), default=_EXACT_DB)
    for (name, ours), theirs in zip(carrier.runner().run(batch).items(), expected, strict=True):
        same = ours.shape == theirs.shape
        signal, error = signal_and_error([theirs], [ours]) if same else (0.0, 1.0)
        if error > signal * 10 ** (-least / 10):
            raise ModelError(subject, f"its graph returns other values for output {name!r}", remedy)
