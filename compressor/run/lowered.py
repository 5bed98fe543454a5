"""Keep the graph of a PyTorch module between commands, since lowering takes seconds.

What lies in the store is the graph without the module's tensors. Its key holds everything that the
graph depends on: the code, the configuration, the structure of the module, and versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import onnx_ir as ir

from compressor.errors import InputError, SpecError
from compressor.files import json_sha256
from compressor.graph.values import all_nodes
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.lowering import OPSET
from compressor.models.torch.matching import held_tensors
from compressor.models.torch.saved_module import without_weights
from compressor.run.store import Store, result_key, store_of

CarrierT = TypeVar("CarrierT", bound=TorchCarrier)

_GRAPH = "lowered.onnx"
_VERSION = 5  # of what is kept
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
        parts: what made the module: its factory, code and configuration.
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
