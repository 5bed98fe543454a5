"""An ONNX graph as a PyTorch module that is compiled at its first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
from torch import Tensor, nn

from compressor.models.executor.compiler import compiled, flattened
from compressor.models.executor.module import FIRST_CALL, GraphModule, Linked, initializers


class DeferredGraphModule(GraphModule):
    """A `GraphModule` whose graph is known to be sound, and is not looked at before it is needed.

    Args:
        read: returns the graph; called once, by the first call or the first move to a device. All
            of its initializers belong to the main graph.
        tensors: the value of every initializer, by name.
        input_names: the graph's inputs, in order.
        output_names: its outputs.
        keeps_constants: as in `GraphModule`.
    """

    def __init__(
        self,
        read: Callable[[], ir.Model],
        tensors: Mapping[str, Tensor],
        input_names: Sequence[str],
        output_names: Sequence[str],
        *,
        keeps_constants: bool = False,
    ):
        nn.Module.__init__(self)
        for name, tensor in tensors.items():
            self._hold(name, tensor)
        self._keeps_constants = keeps_constants
        self._constants = None
        self._linked = None
        self._read = read
        self.input_names = tuple(input_names)
        self.output_names = tuple(output_names)

    def _ready(self) -> Linked:
        linked = self._linked
        if linked is None:
            with FIRST_CALL:
                if self._linked is None:
                    model = flattened(self._read())
                    names = {value: value.name or "" for value in initializers(model.graph)}
                    self._linked = self._link(compiled(model), names)
                linked = self._linked
        return linked
