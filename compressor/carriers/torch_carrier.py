"""The carrier of PyTorch modules: a factory and a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves

from compressor.carriers.code_files import load_codes, save_codes
from compressor.carriers.lowering import attach_weights, lower
from compressor.carriers.matching import check_names, load_into
from compressor.carriers.onnx_carrier import OnnxCarrier, graph_with_codes, restore_graph
from compressor.carriers.ort_runner import OrtRunner, graph_runner
from compressor.carriers.weight_files import read_weights
from compressor.carriers.writing import system_errors
from compressor.errors import ModelError, SpecError
from compressor.graph.clean import clean, infer_shapes
from compressor.graph.layers import graph_layers
from compressor.types.carrier import Capability, Carrier
from compressor.types.layers import Layer
from compressor.types.quantized import WeightCodes
from compressor.types.stored import StoredTensor
from compressor.types.tensors import Array, Batch, TensorSpec

_STATE = "weights.safetensors"


class TorchCarrier:
    """A PyTorch module in evaluation mode.

    Args:
        module: the network.
        inputs: its inputs' names, shapes and dtypes.
        lowered: the module's float graph, where it is known already.
        codes: what is stored in place of some of the module's weights, by their names.
        folder: the Hugging Face directory that it came from.
        changed: names of the tensors that are no longer those of the factory and checkpoint.
    """

    kind = "torch"

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: Sequence[TensorSpec],
        lowered: ir.Model | None = None,
        codes: Mapping[str, WeightCodes] | None = None,
        folder: Path | None = None,
        changed: frozenset[str] = frozenset(),
    ):
        self.module = module.eval()
        self.inputs = tuple(inputs)
        self.folder = folder
        self._lowered = lowered
        self._codes = dict(codes or {})
        self._changed = changed

    @property
    def offers(self) -> frozenset[Capability]:
        """Everything; codes are not trained, though."""
        return frozenset(Capability) - ({Capability.TRAIN} if self._codes else set())

    @cached_property
    def _graph(self) -> ir.Model:
        if not self._codes:
            return self._float_graph
        return graph_with_codes(self._float_graph, self._codes, self._float_weight)

    @cached_property
    def _float_graph(self) -> ir.Model:
        if self._lowered is not None:
            return self._lowered
        graph = lower(self.module, self.inputs)
        clean(graph)
        infer_shapes(graph)
        attach_weights(graph, self.module)
        return graph

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The model's outputs; asks for the graph."""
        return OnnxCarrier(self._graph).outputs

    def load(self, checkpoint: Path) -> None:
        """Fill the module, and so the lowered graph, with a checkpoint's weights.

        Raises:
            ModelError: the checkpoint is unusable or does not fit the module.
        """
        load_into(self.module, read_weights(checkpoint), str(checkpoint))

    def layers(self) -> tuple[Layer, ...]:
        """The layers in the order of execution."""
        return graph_layers(self._graph)

    def weight(self, layer: Layer) -> torch.Tensor:
        """The layer's weight in its stored shape; its codes, where it has been quantized."""
        if layer.weight in self._codes:
            return OnnxCarrier(self._graph).weight(layer)
        return self._float_weight(layer)

    def _float_weight(self, layer: Layer) -> torch.Tensor:
        weight: torch.Tensor = self.module.state_dict()[layer.weight]
        return weight

    def tensors(self) -> dict[str, StoredTensor]:
        """The module's parameters and persistent buffers; a shared one under its first name."""
        found: dict[str, StoredTensor] = {}
        seen = set()
        for name, tensor in self.module.state_dict().items():
            place = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if tensor.numel() and place in seen:
                continue
            seen.add(place)
            read = partial(_itself, tensor)
            shape, codes = tuple(tensor.shape), self._codes.get(name)
            found[name] = StoredTensor(name, shape, tensor.dtype, read, codes)
        return found

    def with_weights(self, changes: Mapping[str, torch.Tensor]) -> TorchCarrier:
        """Return a carrier with some parameters replaced.

        Raises:
            KeyError: the module has no float parameter of a name.
        """
        quantized = sorted(changes.keys() & self._codes.keys())
        if quantized:
            raise KeyError(f"parameter {quantized[0]!r} is stored as codes")
        module = _copied(self.module, changes)
        unknown = module.load_state_dict(dict(changes), strict=False).unexpected_keys
        if unknown:
            raise KeyError(f"no parameter {unknown[0]!r}")
        graph = self._float_graph.clone()
        attach_weights(graph, module)
        changed = self._changed | changes.keys()
        return TorchCarrier(module, self.inputs, graph, self._codes, self.folder, changed)

    def with_codes(self, changes: Mapping[str, WeightCodes]) -> TorchCarrier:
        """Return a carrier of the same module that stores some weights as codes.

        Raises:
            KeyError: the module has no parameter of a name.
        """
        unknown = sorted(changes.keys() - self.module.state_dict().keys())
        if unknown:
            raise KeyError(f"no parameter {unknown[0]!r}")
        codes = {**self._codes, **changes}
        return TorchCarrier(
            self.module, self.inputs, self._float_graph, codes, self.folder, self._changed
        )

    def graph(self) -> ir.Model:
        """The lowered module. Shared: clone it before changing it."""
        return self._graph

    def with_graph(self, graph: ir.Model) -> OnnxCarrier:
        """Return a carrier of the changed graph; the module stays behind."""
        return OnnxCarrier(graph)

    def runner(self, taps: Sequence[str] = ()) -> OrtRunner:
        """Start ONNX Runtime on the lowered module; ``taps`` are yielded as further outputs."""
        return graph_runner(self._graph, taps)

    def module_outputs(self, batch: Batch) -> list[Array]:
        """Run the module itself; its output tensors in the order of the graph's outputs."""
        tensors = {i.name: torch.from_numpy(batch[i.name]) for i in self.inputs}
        named = set(inspect.signature(self.module.forward).parameters)
        with torch.inference_mode():
            if named.issuperset(tensors):
                result = self.module(**tensors)
            else:
                result = self.module(*tensors.values())
        leaves = tree_leaves(result)
        return [leaf.numpy() for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def save(self, directory: Path) -> None:
        """Write the tensors that passes have changed, and the codes."""
        state = self.module.state_dict()
        tensors = {name: state[name].contiguous().clone() for name in sorted(self._changed)}
        with system_errors():
            save_file(tensors, directory / _STATE)
        save_codes(self._codes, self._float_weight, directory)

    def restore(self, directory: Path) -> Carrier:
        """Return the carrier saved there: of the same module, or of a graph made from it."""
        if not (directory / _STATE).exists():
            return restore_graph(directory)
        tensors = load_file(directory / _STATE)
        return self.with_weights(tensors).with_codes(load_codes(directory))


def _copied(module: torch.nn.Module, changes: Collection[str]) -> torch.nn.Module:
    """Copy a module, except for the tensors that will not change: the two share those."""
    held = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    replaced = {id(held[name]) for name in changes if name in held}
    return deepcopy(module, {id(t): t for t in held.values() if id(t) not in replaced})


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


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
        raise SpecError(
            key,
            f"the factory returned a {type(module).__name__}",
            "return a torch.nn.Module",
        )
    if not inputs:
        raise SpecError(
            "model.inputs",
            "is empty, a module does not know its own inputs",
            "write e.g. inputs: {image: {shape: [batch, 3, 32, 32], dtype: float32}}",
        )
    return TorchCarrier(module, inputs)


def check_checkpoint(carrier: TorchCarrier, checkpoint: Path) -> None:
    """Compare a checkpoint's header with the module, reading no weights.

    Raises:
        ModelError: names or shapes differ.
    """
    headers = read_weights(checkpoint, headers_only=True)
    if not headers:
        raise ModelError(f"checkpoint {str(checkpoint)!r}", "holds no tensors", "save it again")
    check_names(carrier.module, headers, str(checkpoint))
