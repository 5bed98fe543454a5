"""Fit a module's tensors to those of a checkpoint and of its graph, and run a graph in PyTorch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import cast

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from compressor.errors import ModelError, close_names, listed, not_finite
from compressor.graph.values import mark_of_code
from compressor.models.checkpoint.weight_files import read_weights
from compressor.models.element_types import of_numpy, to_numpy
from compressor.models.executor import GraphModule
from compressor.types.layers import StoredTensor, WeightCodes
from compressor.types.tensors import Batch

_OPTIONAL = "num_batches_tracked"
_GIVES_WAY = ".tensor"  # a submodule would have the tensor's name: no other tensor has this one
_PART = 1 << 22  # elements looked at together


def named_as_in(
    module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return tensors under a module's names: without the prefix of all, if only that is wrong.

    A training class, such as Lightning's, saves the network under the name of its attribute.
    """
    wanted = {name for name in module.state_dict(keep_vars=True) if not name.endswith(_OPTIONAL)}
    have = {name for name in tensors if not name.endswith(_OPTIONAL)}
    if not have or len(have) != len(wanted):
        return tensors
    start = len(min(have)) - len(min(wanted))  # sorted alike with and without a prefix
    prefix = min(have)[: max(start, 0)]
    if not prefix.endswith(".") or have != {prefix + name for name in wanted}:
        return tensors
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def check_names(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], path: str) -> None:
    """Compare names and shapes of a checkpoint with those of a module.

    Raises:
        ModelError: a tensor is missing, unexpected, or of another shape; the message names the
            closest ones.
    """
    expected = module.state_dict(keep_vars=True)
    missing = [n for n in expected if n not in tensors and not n.endswith(_OPTIONAL)]
    unexpected = [n for n in tensors if n not in expected]
    problems: list[str] = []
    if missing:
        problems.append(f"lacks {listed(missing)}")
    if unexpected:
        problems.append(f"has unexpected {listed(unexpected)}")
    pairs = [
        (m, close_names(m, [u for u in unexpected if tensors[u].shape == expected[m].shape], 1))
        for m in missing[:3]
    ]
    near = [f"{m!r} may be its {names[0]!r}" for m, names in pairs if names]
    if problems:
        raise ModelError(
            f"checkpoint {path!r}",
            " and ".join(problems),
            f"{'; '.join(near)}: save the tensors under the module's own names"
            if near
            else "check that the factory builds the network that was saved",
        )
    for name, tensor in tensors.items():
        if expected[name].is_floating_point() and not tensor.is_floating_point():
            raise ModelError(
                f"checkpoint {path!r}",
                f"has {name!r} as {str(tensor.dtype).removeprefix('torch.')}, the module expects "
                "floating point",
                "give the float checkpoint: codes of a quantized one have lost their scales",
            )
        if tensor.shape != expected[name].shape:
            raise ModelError(
                f"checkpoint {path!r}",
                f"has {name!r} with shape {list(tensor.shape)}, the factory's module expects "
                f"{list(expected[name].shape)}",
                "build the network with the sizes it was trained with (model.config)",
            )


def check_checkpoint(module: torch.nn.Module, checkpoint: Path) -> None:
    """Compare a checkpoint's header with the module, reading no weights.

    Raises:
        ModelError: names or shapes differ.
    """
    headers = read_weights(checkpoint, headers_only=True)
    if not headers:
        raise ModelError(f"checkpoint {str(checkpoint)!r}", "holds no tensors", "save it again")
    check_names(module, named_as_in(module, headers), str(checkpoint))


def load_into(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], path: str) -> None:
    """Copy a checkpoint's tensors into a module in place.

    Raises:
        ModelError: names or shapes differ, or a tensor holds NaN or infinity.
    """
    tensors = named_as_in(module, tensors)
    check_names(module, tensors, path)
    check_finite(tensors.items(), f"checkpoint {path!r}", dict(module.named_buffers()))
    load_tensors(module, tensors)


def load_tensors(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Copy tensors into a module in place, as those of its own version.

    ``state_dict()`` notes the version of each submodule beside the tensors. Without it, a
    submodule whose ``_load_from_state_dict`` reads older states, too, takes the oldest for given.

    Args:
        tensors: by the names of its ``state_dict()``; the module keeps those that are not given.

    Returns:
        The names that it does not have.
    """
    state = OrderedDict(tensors)
    if (versions := getattr(module.state_dict(), "_metadata", None)) is not None:
        state._metadata = versions  # type: ignore[attr-defined]  # where PyTorch has it
    # Names with dots look to PyTorch as if they were of submodules that a graph's module lacks.
    unexpected: list[str] = module.load_state_dict(state, strict=False).unexpected_keys
    return unexpected


def held_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, tied ones under each of their names.

    Those of the module itself have a second name, see :func:`give_way`.
    """
    held = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return held | {name + _GIVES_WAY: tensor for name, tensor in held.items() if "." not in name}


def give_way(model: ir.Model, module: torch.nn.Module, taken: Collection[str]) -> None:
    """Rename initializers that inputs or outputs have the names of, as a graph has each name once.

    They get the second name that :func:`held_tensors` gives the module's tensors. Tensors of
    submodules keep theirs.

    Args:
        model: as PyTorch exported it: its initializers are the module's own tensors, and have
            other names where an input has theirs.
        taken: names of inputs and outputs.
    """
    held = held_tensors(module)
    wanted = {id(held[name]): name for name in taken if name + _GIVES_WAY in held}
    for value in tuple(model.graph.initializers.values()):
        name = wanted.get(id(getattr(value.const_value, "raw", None)))
        if name is not None and (value.name == name or value.name not in held):
            value.name = name + _GIVES_WAY


def stored_tensors(
    module: torch.nn.Module, codes: Mapping[str, WeightCodes]
) -> dict[str, StoredTensor]:
    """Return parameters and persistent buffers; a shared one under its first name.

    Args:
        codes: what is stored in place of some of them, by their names.
    """
    tensors: dict[str, StoredTensor] = {}
    seen = set()
    for name, tensor in module.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        shape, read = tuple(tensor.shape), tensor.detach
        tensors[name] = StoredTensor(name, shape, tensor.dtype, read, codes.get(name))
    return tensors


def as_lowered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a module's tensor as its graph holds it: complex numbers as pairs in a last axis.

    The memory is shared.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def attach_weights(model: ir.Model, module: torch.nn.Module) -> None:
    """Make a lowered model's initializers refer to the module's current parameters.

    Those that the module does not hold are constants of its code, and are marked so.
    """
    state = held_tensors(module)  # the graph may use any name of a tied weight
    for name, value in model.graph.initializers.items():
        if name in state:
            tensor = as_lowered(state[name].detach())
            value.const_value = tensor_adapters.TorchTensor(tensor, name=name)
        else:
            mark_of_code(value)


def check_finite(
    tensors: Iterable[tuple[str, torch.Tensor]], subject: str, may_be_infinite: Collection[str] = ()
) -> None:
    """Raise ``ModelError`` for the first tensor that holds NaN or infinity.

    Args:
        tensors: names and tensors, one read at a time.
        subject: where they come from, for the message.
        may_be_infinite: names of tensors, such as masks, that may hold infinity.
    """
    for name, tensor in tensors:
        if not tensor.is_floating_point():
            continue
        flat = tensor.reshape(-1)
        bad = 0
        for start in range(0, len(flat), _PART):  # in parts: the comparison needs memory too
            part = flat[start : start + _PART]
            if part.itemsize == 1:  # torch does not compare floats of eight bits
                part = part.to(torch.float32)
            wrong = part.isnan() if name in may_be_infinite else ~part.isfinite()
            bad += int(wrong.sum())
        if bad:
            raise not_finite(subject, f"tensor {name!r} holds {bad} values")


class TorchRunner:
    """A module that executes a graph, as a runner.

    Args:
        module: such as ``compressor.load`` returns.
        how: where it comes from, for reports.
    """

    def __init__(self, module: torch.nn.Module, how: str = "compressor.load"):
        self._module = cast("GraphModule", module)
        self.runtime = f"torch {torch.__version__} ({how})"

    def run(self, batch: Batch) -> Batch:
        """Run one batch; arrays that the model does not take are ignored.

        Raises:
            ModelError: an input is missing or of another shape or dtype.
        """
        taken = {
            name: of_numpy(array)
            for name, array in batch.items()
            if name in self._module.input_names
        }
        with torch.inference_mode():
            outputs = self._module(**taken)
        return {name: to_numpy(tensor) for name, tensor in outputs.items()}
