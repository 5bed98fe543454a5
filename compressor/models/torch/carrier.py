"""The carrier of PyTorch modules: a factory and a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import onnx_ir as ir
import torch

from compressor.errors import ModelError, SpecError
from compressor.graph.layers import graph_layers
from compressor.graph.plain import make_plain
from compressor.models.checkpoint.weight_files import read_weights
from compressor.models.onnx.carrier import OnnxCarrier, graph_with_codes, restore_graph
from compressor.models.onnx.ort_runner import runner_of
from compressor.models.torch.computed_weights import with_computed_weights
from compressor.models.torch.derived_factors import fitted
from compressor.models.torch.lowering import NamedModule, lower
from compressor.models.torch.matching import attach_weights, load_into, load_tensors, stored_tensors
from compressor.models.torch.parametrized import of_originals, originals, with_originals
from compressor.models.torch.saved_module import (
    Alterations,
    holds_module,
    load_codes,
    restore_module,
    save_codes,
    save_module,
)
from compressor.models.torch.smaller_module import (
    Agreement,
    copied,
    executable,
    run_module,
    selected,
    shortened,
    trainable_graph,
    with_shorter,
    with_unread,
)
from compressor.models.torch.wrappers import unwrapped
from compressor.models.transformers.config import altered_config
from compressor.types.carrier import Capability, Carrier, Runner, WeightChange
from compressor.types.channels import Units
from compressor.types.layers import Layer, StoredTensor, WeightCodes
from compressor.types.tensors import Array, Batch, TensorSpec


class TorchCarrier:
    """A PyTorch module in evaluation mode.

    Args:
        inputs: its inputs' names, shapes and dtypes.
        lowered: the module's float graph, if known already.
        codes: the codes stored in place of some of the module's weights, by their names.
        folder: the Hugging Face directory that it came from.
        altered: how the module differs from what factory and checkpoint made.
    """

    kind = "torch"

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: Sequence[TensorSpec],
        lowered: ir.Model | None = None,
        codes: Mapping[str, WeightCodes] | None = None,
        folder: Path | None = None,
        altered: Alterations | None = None,
    ):
        self.module = module.eval()
        self.inputs = tuple(inputs)
        self.folder = folder
        self._lowered = lowered
        self._codes = dict(codes or {})
        self._altered = altered or Alterations()

    @property
    def offers(self) -> frozenset[Capability]:
        """Everything; codes are not trained, though."""
        return frozenset(Capability) - ({Capability.TRAIN} if self._codes else set())

    @property
    def executes_graph(self) -> bool:
        """The module was replaced by one that executes the graph.

        This happens where channels were removed or layers replaced. The module is trained like any
        other, but its forward is not the factory's: it returns a dictionary of outputs by name.
        """
        return self._altered.executes_graph

    @cached_property
    def _graph(self) -> ir.Model:
        graph, _ = self._with_computed
        return graph_with_codes(graph, self._codes, self._float_weight) if self._codes else graph

    @cached_property
    def _with_computed(self) -> tuple[ir.Model, frozenset[str]]:
        own = self.module.state_dict().keys()
        if self._altered.planned:  # its graph holds them already
            return self.lowered, frozenset({x.weight for x in graph_layers(self.lowered)} - own)
        return with_computed_weights(self.lowered, own)

    @property
    def computed_weights(self) -> frozenset[str]:
        """The names of weights that the module computes of parameters, as weight norm does."""
        return self._with_computed[1]

    @cached_property
    def lowered(self) -> ir.Model:
        """The graph as the module computes it, weights that it makes of parameters included."""
        if self._lowered is not None:
            return self._lowered
        graph = lower(self.module, self.inputs)
        make_plain(graph)
        attach_weights(graph, self.module)
        return graph

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The model's outputs, from its graph."""
        return OnnxCarrier(self._graph).outputs

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The content of ``config.json``, for a module from a Hugging Face directory; else empty.

        Raises:
            SpecError: no configuration states the sizes that the module has since it lost channels.
        """
        return altered_config(self.module, self.folder, self._altered, self.inputs)

    def with_own_weights(self) -> Self:
        """Return this carrier; its graph refers to the module's tensors from now on."""
        attach_weights(self.lowered, self.module)
        return self

    def load(self, checkpoint: Path) -> None:
        """Load a checkpoint's weights into the module, and so into the lowered graph.

        Raises:
            ModelError: the checkpoint is unusable or does not fit the module.
        """
        load_into(self.module, read_weights(checkpoint), str(checkpoint))
        for computed in ("_with_computed", "_graph"):
            vars(self).pop(computed, None)

    @cached_property
    def _layers(self) -> tuple[Layer, ...]:
        return graph_layers(self._graph)

    def layers(self) -> tuple[Layer, ...]:
        """The layers in the order of execution; the graph is walked once."""
        return self._layers

    def weight(self, layer: Layer) -> torch.Tensor:
        """The layer's weight in its stored shape; its codes, where it has been quantized."""
        if layer.weight in self._codes:
            return OnnxCarrier(self._graph).weight(layer)
        return self._float_weight(layer)

    def _float_weight(self, layer: Layer) -> torch.Tensor:
        stored = self.module.state_dict().get(layer.weight)
        return OnnxCarrier(self._with_computed[0]).weight(layer) if stored is None else stored

    def _storing(self, weights: Collection[str]) -> TorchCarrier | OnnxCarrier:
        """Return a carrier that stores weights which the module does not, if any of these are."""
        graph, _ = self._with_computed
        unstored = {x.weight for x in graph_layers(graph)} - self.module.state_dict().keys()
        return self._executing(graph.clone()) if unstored & set(weights) else self

    def tensors(self) -> dict[str, StoredTensor]:
        """The module's parameters and persistent buffers; a shared one under its first name."""
        return stored_tensors(self.module, self._codes)

    def with_weights(self, changes: Mapping[str, torch.Tensor]) -> TorchCarrier | OnnxCarrier:
        """Return a carrier with some parameters replaced.

        A weight that a parametrization computes is changed by its originals where they give just
        that weight; else a module that executes the graph stores it.

        Raises:
            KeyError: the module has no float parameter of a name.
        """
        changes = of_originals(self.module, changes, self.computed_weights)
        if (storing := self._storing(changes)) is not self:
            return storing.with_weights(changes)
        if quantized := sorted(changes.keys() & self._codes.keys()):
            raise KeyError(f"parameter {quantized[0]!r} is stored as codes")
        module = copied(self.module, changes)
        if unknown := load_tensors(module, changes):
            raise KeyError(f"no parameter {unknown[0]!r}")
        graph = self.lowered.clone()
        attach_weights(graph, module)
        return self._changed(module, graph, self._altered.adding(changes), self._codes)

    def with_changes(self, changes: Mapping[str, WeightChange]) -> TorchCarrier | OnnxCarrier:
        """Return a carrier with some float weights changed; the changes are computed now.

        Raises:
            KeyError: the module has no float parameter of a name.
        """
        return self.with_weights(
            {n: change.stored(self._float_weight(change.layer)) for n, change in changes.items()}
        )

    def with_codes(self, changes: Mapping[str, WeightCodes]) -> TorchCarrier | OnnxCarrier:
        """Return a carrier of the same module that stores some weights as codes.

        Raises:
            KeyError: the module has no parameter of a name.
        """
        if (storing := self._storing(changes)) is not self:
            return storing.with_codes(changes)
        if unknown := sorted(changes.keys() - self.module.state_dict().keys()):
            raise KeyError(f"no parameter {unknown[0]!r}")
        codes = {**self._codes, **changes}
        return self._changed(self.module, self.lowered, self._altered, codes)

    def graph(self) -> ir.Model:
        """The lowered module. Shared: clone it before changing it."""
        return self._graph

    def with_graph(self, graph: ir.Model) -> OnnxCarrier:
        """Return a carrier of the changed graph; the module stays behind."""
        return OnnxCarrier(graph)

    def with_channels(
        self,
        graph: ir.Model,
        kept: Mapping[str, Mapping[int, Units]],
        *,
        planned: bool = False,
        probe: Batch | None = None,
    ) -> TorchCarrier | OnnxCarrier:
        """Return a carrier of a smaller module, or of one that executes the smaller graph.

        The module's size attributes are adapted; of several readings, the first is taken whose
        outputs on a small batch are the graph's. If there is none, as with sizes hard-coded in
        ``forward``, a module that executes the graph replaces it, and if that cannot be made, the
        graph alone. Plans assume a module that can be adapted if the graph could be executed.

        Raises:
            SpecError: weights are stored as codes.
        """
        if self._codes:
            raise SpecError(
                "removal of channels",
                f"weight {min(self._codes)!r} is stored as codes already",
                "prune before quantizing",
            )
        graph = graph.clone()
        computed = self.computed_weights
        whole = with_originals(self.module, kept, computed)
        if whole is None:
            return self._executing(graph, planned=planned, probe=probe)
        whole = with_unread(self.module, whole, self.lowered.graph.initializers, self.inputs)
        if planned and executable(graph):
            tensors = shortened(self.module, whole)
            altered = replace(self._altered.adding(tensors, {}), planned=True)
            return self._changed(with_shorter(self.module, graph, tensors), graph, altered)
        inverted = originals(self.module, graph, computed & kept.keys())
        if self.executes_graph or inverted is None:
            return self._executing(graph, probe=probe)
        tensors = selected(self.module, whole) | inverted
        module = with_shorter(self.module, graph, tensors)
        agreement = Agreement(graph, self.inputs, probe)
        found = fitted(self.module, module, whole, agreement)
        if found is None:
            return self._executing(graph, agreement=agreement)
        sizes, scaled = found
        lowered = None if computed or scaled else graph  # it is not what the module computes
        return self._changed(module, lowered, self._altered.adding({*tensors, *scaled}, sizes))

    def with_trainable_graph(
        self,
        graph: ir.Model,
        parameters: Collection[str],
        *,
        planned: bool = False,
        probe: Batch | None = None,
    ) -> TorchCarrier | OnnxCarrier:
        """Return a carrier of a module that executes the graph, or else of the graph alone."""
        if self._codes:
            return self.with_graph(graph)
        return self._executing(graph.clone(), parameters, planned=planned, probe=probe)

    def _executing(
        self,
        graph: ir.Model,
        parameters: Collection[str] = (),
        *,
        planned: bool = False,
        agreement: Agreement | None = None,
        probe: Batch | None = None,
    ) -> TorchCarrier | OnnxCarrier:
        """Return a carrier of a module that executes a graph; both hold the same tensors.

        Args:
            parameters: names of new initializers that are trained.
            agreement: that of the graph, if it has been run already.
            probe: what the graph is run on, if it has not.
        """
        parameters = {*parameters, *self.computed_weights}
        try:
            module = trainable_graph(graph, self.module, parameters, shared=planned)
        except ModelError:  # an operator that ONNX Runtime has and we have not
            return self.with_graph(graph)
        if not planned:
            agreement = agreement or Agreement(graph, self.inputs, probe)
            if not agreement.holds(module.eval()):
                return self.with_graph(graph)
        attach_weights(graph, module)
        trained = self._altered.parameters.union(parameters) & graph.graph.initializers.keys()
        altered = Alterations(executes_graph=True, parameters=frozenset(trained))
        return self._changed(module, graph, altered)

    def _changed(
        self,
        module: torch.nn.Module,
        graph: ir.Model | None,
        altered: Alterations,
        codes: Mapping[str, WeightCodes] | None = None,
    ) -> TorchCarrier:
        return TorchCarrier(module, self.inputs, graph, codes, self.folder, altered)

    def trainable(self) -> NamedModule:
        """Copy the module; the copy takes inputs and returns outputs by name.

        Parameters of the copy are trained where the factory's are.

        Raises:
            SpecError: weights are stored as codes.
        """
        if self._codes:
            raise SpecError(
                "training",
                f"is not possible: weight {min(self._codes)!r} is stored as codes",
                "train before quantizing",
            )
        inputs, outputs = [i.name for i in self.inputs], [o.name for o in self.outputs]
        return NamedModule(deepcopy(self.module), inputs, outputs)

    def runner(self, taps: Sequence[str] = ()) -> Runner:
        """Start a runtime for the lowered module that also returns the values ``taps``."""
        return runner_of(self._graph, taps)

    def module_outputs(self, batch: Batch) -> list[Array]:
        """Run the module itself; return its output tensors in the order of the graph's outputs."""
        return run_module(self.module, self.inputs, batch)

    def save(self, directory: Path) -> None:
        """Write the tensors that passes have changed, the new sizes, and the codes."""
        graph = self.lowered if self._altered.channels_removed else None
        save_module(self.module, self._altered, graph, directory)
        save_codes(self._codes, self._float_weight, directory)

    def restore(self, directory: Path) -> Carrier:
        """Return the carrier saved there: of the same module, or of a graph made from it."""
        if not holds_module(directory):
            return restore_graph(directory)
        module, altered, graph = restore_module(directory, self.module)
        if graph is None:
            graph = self.lowered.clone()
            attach_weights(graph, module)
        return self._changed(module, graph, altered, load_codes(directory))


def open_module(
    factory: Callable[..., Any],
    config: Mapping[str, Any],
    inputs: Sequence[TensorSpec],
    key: str,
) -> TorchCarrier:
    """Build a module by its factory.

    Raises:
        SpecError: the factory fails or does not return a module.
    """
    try:
        module = factory(**config)
    except (Exception, SystemExit) as error:
        raise SpecError(
            key, f"the factory raised {type(error).__name__}: {error}", "call it in a Python shell"
        ) from error
    if not isinstance(module, torch.nn.Module):
        kind = type(module).__name__
        raise SpecError(key, f"the factory returned a {kind}", "return a torch.nn.Module")
    if not inputs:
        remedy = "write e.g. inputs: {image: {shape: [batch, 3, 32, 32], dtype: float32}}"
        problem = "is empty, a module does not know its own inputs"
        raise SpecError("model.inputs", problem, remedy)
    return TorchCarrier(unwrapped(module), inputs)
