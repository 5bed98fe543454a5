"""Carriers: what holds a model and is the only place that knows its framework."""

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
    """What becomes of a layer's float weight, found when it is wanted.

    Attributes:
        layer: whose weight it is.
        compute: takes rows of the weight in canonical form, and the number of the first of them;
            returns what they become, in their shape and dtype. Pure, so it may be called again,
            in any order and by several threads.
        multiple: ``compute`` may be given some of the rows at a time, from a multiple of so many
            up to another or to the end; ``None`` where it wants all of them.
    """

    layer: Layer
    compute: Callable[[torch.Tensor, int], torch.Tensor]
    multiple: int | None = 1

    def stored(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what a whole weight becomes; both are in their stored shape."""
        return self.layer.stored(self.compute(self.layer.canonical(weight), 0))


class Capability(StrEnum):
    """What a carrier can offer and a pass can need."""

    WEIGHTS = "weights"
    RUN = "run"
    GRAPH = "graph"
    TRAIN = "train"
    BLOCKS = "blocks"  # its blocks run one at a time, which serves passes by block


class Runner(Protocol):
    """A model that is ready to be run."""

    @property
    def runtime(self) -> str:
        """Name and version of what executes it, such as ``onnxruntime 1.22 (CPU)``."""
        ...

    def run(self, batch: Batch) -> Batch:
        """Run one batch; inputs and outputs by name."""
        ...


class Carrier(Protocol):
    """One model at one point of the pipeline. Carriers are values: changes give a new carrier."""

    @property
    def kind(self) -> str:
        """``torch``, ``onnx`` or ``checkpoint``."""
        ...

    @property
    def offers(self) -> frozenset[Capability]:
        """What passes may ask of it."""
        ...

    @property
    def folder(self) -> Path | None:
        """The Hugging Face directory that it came from; tokenizer and config lie there."""
        ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The model's inputs; none where there is no graph."""
        ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The model's outputs."""
        ...

    def layers(self) -> tuple[Layer, ...]:
        """The layers in the order of execution (of storage, where there is no graph)."""
        ...

    def weight(self, layer: Layer) -> torch.Tensor:
        """The layer's weight in its stored shape; its codes, where it has been quantized."""
        ...

    def tensors(self) -> Mapping[str, StoredTensor]:
        """Everything that a checkpoint of the model holds, by name; nothing is read yet."""
        ...

    def with_weights(self, changes: Mapping[str, torch.Tensor]) -> Carrier:
        """Return a carrier with some parameters (by name, stored shape) replaced."""
        ...

    def with_changes(self, changes: Mapping[str, WeightChange]) -> Carrier:
        """Return a carrier with some float weights (by parameter name) changed.

        Of a model that is streamed, nothing is computed before the weights are read.
        """
        ...

    def with_codes(self, changes: Mapping[str, WeightCodes]) -> Carrier:
        """Return a carrier with some float weights (by parameter name) stored as codes.

        Nothing is computed before the codes are read.
        """
        ...

    def graph(self) -> ir.Model:
        """The model in ONNX IR. Shared: clone it before changing it."""
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

        A PyTorch carrier adapts its module where it can, and else executes the graph, which can
        be trained too.

        Args:
            graph: the smaller model; what it does not change has the names that it has here.
            kept: for each parameter that becomes smaller and each axis, the positions that remain.
            planned: sizes are all that counts: no weight is read, nothing is run and so nothing
                compared, and the result's weights mean nothing. It cannot be run or saved.
            probe: what an adapted module is compared with the graph on; made-up values by default.

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

        A PyTorch carrier then holds a module that executes the graph. Where there is none, for an
        operator that PyTorch has not or weights that are codes, it is :meth:`with_graph`.

        Args:
            graph: the changed model; what it does not change has the names that it has here.
            parameters: names of new float initializers that are trained, besides those that were.
            planned: sizes are all that counts, as in :meth:`with_channels`.
            probe: what the module is compared with the graph on; made-up values by default.

        Raises:
            SpecError: the carrier has no graph.
        """
        ...

    def runner(self, taps: Sequence[str] = ()) -> Runner:
        """Return something that runs the model and also yields the graph values ``taps``."""
        ...

    def save(self, directory: Path) -> None:
        """Write what :meth:`restore` needs into an empty directory."""
        ...

    def restore(self, directory: Path) -> Carrier:
        """Return the carrier that was saved there by one of this carrier's descendants."""
        ...
