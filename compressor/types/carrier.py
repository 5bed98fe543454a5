"""Carriers hold models, and are the only place that knows their frameworks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from compressor.types.channels import Units
from compressor.types.layers import Layer, StoredTensor, WeightCodes
from compressor.types.tensors import Batch, TensorSpec

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, eq=False)
class WeightChange:
    """A change of a layer's float weight, computed on demand.

    Attributes:
        layer: the layer of the weight.
        compute: takes rows of the weight in canonical form and the index of the first one;
            returns the changed rows in the same shape and dtype. Pure, so it may be called
            repeatedly, in any order and by several threads.
        multiple: ``compute`` accepts ranges of rows that start at a multiple of this and end at
            another or at the last row; ``None`` if it needs all rows at once.
    """

    layer: Layer
    compute: Callable[[torch.Tensor, int], torch.Tensor]
    multiple: int | None = 1

    def stored(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the changed weight; argument and result are in the stored shape."""
        return self.layer.stored(self.compute(self.layer.canonical(weight), 0))


class Capability(StrEnum):
    """What a carrier can offer and a pass can need."""

    WEIGHTS = "weights"
    RUN = "run"
    GRAPH = "graph"
    TRAIN = "train"
    BLOCKS = "blocks"  # runs its blocks one at a time, for passes that work block by block


class Runner(Protocol):
    """A model that is ready to run."""

    @property
    def runtime(self) -> str:
        """Name and version of the runtime, such as ``onnxruntime 1.22 (CPU)``."""
        ...

    def run(self, batch: Batch) -> Batch:
        """Run one batch; inputs and outputs by name."""
        ...


class Carrier(Protocol):
    """A model at one point of the pipeline. Carriers are values: a change returns a new one."""

    @property
    def kind(self) -> str:
        """``torch``, ``onnx`` or ``checkpoint``."""
        ...

    @property
    def offers(self) -> frozenset[Capability]:
        """The capabilities that passes can use."""
        ...

    @property
    def folder(self) -> Path | None:
        """The Hugging Face directory of the model, with its tokenizer and config, if any."""
        ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The model's inputs; empty without a graph."""
        ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The model's outputs."""
        ...

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers in order of execution, or of storage without a graph."""
        ...

    def weight(self, layer: Layer) -> torch.Tensor:
        """Return a layer's weight in its stored shape; its codes if it is quantized."""
        ...

    def tensors(self) -> Mapping[str, StoredTensor]:
        """Return all tensors of a checkpoint of the model by name; none is read yet."""
        ...

    def with_weights(self, changes: Mapping[str, torch.Tensor]) -> Carrier:
        """Return a carrier with some parameters (by name, stored shape) replaced."""
        ...

    def with_changes(self, changes: Mapping[str, WeightChange]) -> Carrier:
        """Return a carrier with some float weights (by parameter name) changed.

        For a streamed model, nothing is computed until the weights are read.
        """
        ...

    def with_codes(self, changes: Mapping[str, WeightCodes]) -> Carrier:
        """Return a carrier with some float weights (by parameter name) stored as codes.

        Nothing is computed until the codes are read.
        """
        ...

    def graph(self) -> ir.Model:
        """Return the model in ONNX IR. It is shared: clone it before changing it."""
        ...

    def with_graph(self, graph: ir.Model) -> Carrier:
        """Return a carrier of the changed graph; it no longer offers ``train``."""
        ...

    def with_channels(
        self,
        graph: ir.Model,
        kept: Mapping[str, Mapping[int, Units]],
        *,
        planned: bool = False,
        probe: Batch | None = None,
    ) -> Carrier:
        """Return a carrier of the model without some of its channels.

        A PyTorch carrier adapts its module if it can; otherwise it executes the graph, which can
        be trained too.

        Args:
            graph: the smaller model; unchanged parts have the same names as in this one.
            kept: the positions that remain on each axis of each parameter that shrinks.
            planned: only sizes matter: no weight is read, nothing is run or compared, and the
                result can be neither run nor saved.
            probe: inputs on which an adapted module is compared with the graph; random by default.

        Raises:
            SpecError: the carrier has no graph, or stores weights as codes.
        """
        ...

    def trainable(self) -> torch.nn.Module:
        """Return a copy to train: it takes the inputs and returns the outputs by name.

        Its parameters and buffers have the model's names after ``module.``;
        :meth:`with_weights` takes them back.

        Raises:
            SpecError: the carrier does not offer ``train``.
        """
        ...

    def with_trainable_graph(
        self,
        graph: ir.Model,
        parameters: Collection[str],
        *,
        planned: bool = False,
        probe: Batch | None = None,
    ) -> Carrier:
        """Return a carrier of the changed graph that can be trained, where this one can.

        A PyTorch carrier then holds a module that executes the graph. If that is impossible,
        because PyTorch lacks an operator or weights are quantized, the result is that of
        :meth:`with_graph`.

        Args:
            graph: the changed model; unchanged parts have the same names as in this one.
            parameters: names of new float initializers to train, besides existing parameters.
            planned: only sizes matter, as in :meth:`with_channels`.
            probe: inputs on which the module is compared with the graph; random by default.

        Raises:
            SpecError: the carrier has no graph.
        """
        ...

    def runner(self, taps: Sequence[str] = ()) -> Runner:
        """Return a runner of the model that also outputs the graph values ``taps``."""
        ...

    def save(self, directory: Path) -> None:
        """Write what :meth:`restore` needs into an empty directory."""
        ...

    def restore(self, directory: Path) -> Carrier:
        """Return the carrier that a descendant of this one saved there."""
        ...
