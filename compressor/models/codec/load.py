"""Open a compressed model: ``model.json`` and safetensors, memory-mapped, no pickle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch import Tensor

from compressor import catalog
from compressor.errors import ModelError, SpecError, first_line
from compressor.files import settle
from compressor.graph.values import all_nodes
from compressor.models.codec.forms import DESCRIPTION
from compressor.models.codec.headers import WEIGHTS, ShardHeader
from compressor.models.codec.reading import (
    Description,
    read_description,
    read_tensors,
    stored_headers,
    written_with,
)
from compressor.models.executor import (
    GraphModule,
    unknown_operators,
)
from compressor.models.onnx.module import RuntimeModule, in_runtime, onnx_module
from compressor.types.arguments import check_arguments
from compressor.types.exporter import PackedFormat

_ONNX = ".onnx"
_READ = (".json", ".safetensors")  # besides
_CALLER = 2  # calls up from a function that `load` calls: where a warning belongs
_RUNTIME_DOMAINS = ("com.microsoft.", "ai.onnx.ml.")


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    mmap: bool = True,
    dequantize: Literal["on-use", "once"] = "on-use",
    verify: bool = True,
) -> torch.nn.Module:
    """Load a compressed model, or any ONNX file, as a module in evaluation mode.

    Nothing is unpickled and no code of the model's author runs. Weights stay in the file until an
    operator reads them. Those that are packed or sparse are decoded then, and quantized layers
    stay quantized in memory. In ``state_dict()`` they are lazy tensors, which are computed at each
    use; ``clone()`` makes an ordinary one. The files have to stay as they are while the module is
    in use. The graph is compiled at the first call, unless ``model.json`` is not as it was written.

    A graph with operators that PyTorch does not run here is executed by ONNX Runtime on the CPU,
    with the weights in its memory: a warning names the operators, and the module's ``runtime`` the
    runtime. Such a module has an empty ``state_dict()`` and no gradients. Older opsets of an ONNX
    file than PyTorch runs here are converted.

    Example:
        >>> model = compressor.load("out/resnet20-edge")
        >>> logits = model(torch.zeros(1, 3, 32, 32))["logits"]

    Args:
        path: the directory that holds ``model.json``, or else one ``.onnx`` file or archive; that
            file or the ``.safetensors`` file beside it; an ``.onnx`` file of whatever origin; or an
            archive, all of which is read at once.
        device: where the weights go; anything but ``cpu`` reads and decodes them at once.
        mmap: map the files. Without, they are read at once, from the first byte to the last, and
            may go away; that suits a slow network disk.
        dequantize: ``on-use`` decodes and dequantizes a weight each time it is used and keeps
            nothing of it, which takes least memory; ``once`` keeps what the first call computed
            from weights alone, which takes the memory of the float model and least time.
        verify: compare each tensor with its checksum in ``model.json`` when it is first read;
            what is not as it was written raises ``ModelError`` there. Files of ONNX, and of
            versions that wrote no checksums, are not compared.

    Returns:
        A module that takes the model's inputs by position or name, and returns its outputs by
        name.

    Raises:
        SpecError: there is no such device or choice, an argument is of another type, or ONNX
            Runtime is to run on another device than ``cpu``.
        ModelError: a file is missing, cut, of another schema, or does not fit the other one; or
            an ONNX file breaks ONNX's rules, takes or gives text, or has operators of which nobody
            here knows.
    """
    check_arguments(load, locals())
    device = str(device)
    if dequantize not in ("on-use", "once"):
        raise SpecError(f"dequantize {dequantize!r}", "is not a choice", "use on-use or once")
    path = _found(Path(path))
    packed = packed_format(path)
    if packed is not None:
        with packed.unpacked(path) as folder:
            # What is unpacked has been compared with its hash.
            return load(folder, device=device, mmap=False, dequantize=dequantize, verify=False)
    once = dequantize == "once"
    if path.suffix.lower() == _ONNX:
        module = onnx_module(path, device=device, mmap=mmap, once=once, stacklevel=_CALLER)
        return _moved(module, device)
    if path.is_file() and path.suffix.lower() not in _READ:
        raise ModelError(
            f"model {str(path)!r}",
            "is no file that load reads",
            "open it in its own runtime, or give a file of format onnx or safetensors, or the "
            "folder of one",
        )
    description, headers = _opened(path)
    read = partial(read_tensors, description, headers, verify=verify)
    unknown = unknown_operators(_operators(description.graph))
    if unknown:
        return _in_runtime(description, partial(read, mapped=True), unknown, device)
    if written_with(description, headers):
        # The exporter has compiled this very graph; here it is compiled when it is first used.
        module = GraphModule.deferred(
            description.model,
            read(mapped=mmap),
            description.inputs,
            description.outputs,
            keeps_constants=once,
        )
    else:
        model = description.model()
        module = GraphModule(model, read(mapped=mmap), keeps_constants=once)
    return _moved(module.eval(), device)


def _found(path: Path) -> Path:
    """Return the only ONNX file or archive of a directory without ``model.json``, or the path."""
    if not path.is_dir() or (path / DESCRIPTION).exists():
        return path
    files = sorted(file for file in path.iterdir() if file.is_file())
    models = [f for f in files if f.suffix.lower() == _ONNX or packed_format(f) is not None]
    return models[0] if len(models) == 1 else path


def _moved(module: torch.nn.Module, device: str) -> torch.nn.Module:
    """Move a module to a device; raise ``SpecError`` if it is not usable."""
    if device == "cpu":
        return module
    try:
        return module.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        problem = f"is not usable ({first_line(error)})"
        raise SpecError(f"device {device!r}", problem, "use cpu") from error


def check(path: str | Path) -> None:
    """Check that a compressed model can be loaded, its graph included; no weight is read.

    Args:
        path: as :func:`load` takes it.

    Raises:
        ModelError: as :func:`load`.
    """
    description, headers = _opened(path)
    tensors = read_tensors(description, headers, mapped=True)
    check_graph(description.model(), tensors)


def check_graph(model: ir.Model, tensors: Mapping[str, Tensor]) -> None:
    """Check that :func:`load` could run a graph; no weight is read.

    Args:
        model: the graph.
        tensors: its initializers by name, in whatever memory.

    Raises:
        ModelError: neither PyTorch nor ONNX Runtime has an operator, or PyTorch has all of them
            and does not take an attribute or type.
    """
    functions = {(function.domain, function.name) for function in model.functions.values()}
    called = [node for function in model.functions.values() for node in function]
    operators = {(node.domain, node.op_type) for node in (*all_nodes(model.graph), *called)}
    unknown = unknown_operators(sorted(operators - functions))
    if not unknown or any("." in n and not n.startswith(_RUNTIME_DOMAINS) for n in unknown):
        GraphModule(model, tensors)


def _operators(document: Any) -> Iterator[tuple[str, str]]:
    """Yield domain and name of each operator in a graph in JSON, functions' bodies included."""
    if isinstance(document, list):
        for item in document:
            yield from _operators(item)
    elif isinstance(document, Mapping):
        functions = document.get("functions")
        named = functions if isinstance(functions, list) else []
        local = {(str(f.get("domain", "")), f.get("name")) for f in named if isinstance(f, Mapping)}
        if isinstance(name := document.get("opType"), str):
            yield str(document.get("domain", "")), name
        for item in document.values():
            if isinstance(item, list | Mapping):
                yield from (pair for pair in _operators(item) if pair not in local)


def _in_runtime(
    description: Description,
    read: Callable[[], Mapping[str, Tensor]],
    unknown: tuple[str, ...],
    device: str,
) -> RuntimeModule:
    """Return a module that ONNX Runtime executes."""
    model = description.model()
    for name, tensor in read().items():
        value = model.graph.initializers[name]
        value.const_value = _as_onnx(tensor, description.tensors[name].dtype, name)
    reason = f"PyTorch does not run {', '.join(unknown)} here"
    return in_runtime(model, description.subject, reason, device, _CALLER + 1)


def _as_onnx(tensor: Tensor, dtype: ir.DataType, name: str) -> ir.TensorProtocol:
    tensor = tensor.clone()  # a lazy one has no memory, that of a file may go away
    if dtype.bitwidth < 8:  # unpacked in torch
        array = tensor.to(torch.float32).numpy().astype(dtype.numpy())
        return ir.Tensor(array, dtype=dtype, name=name)
    return tensor_adapters.TorchTensor(tensor, name=name)


def _opened(path: str | Path) -> tuple[Description, tuple[ShardHeader, ...]]:
    file = Path(path)
    if file.is_dir():
        file /= DESCRIPTION
    elif file.suffix == Path(WEIGHTS).suffix:
        file = file.with_name(DESCRIPTION)
    settle(file.parent)
    description = read_description(file)
    return description, stored_headers(description, file.parent)


def packed_format(path: Path) -> PackedFormat | None:
    """Return the format of a file that holds the files of another export, if it is one."""
    if path.is_file():
        for name in catalog.names("format"):
            packed: PackedFormat = catalog.load("format", name)()
            if packed.holds(path):
                return packed
    return None
