"""Open a compressed model: ``model.json`` and safetensors, memory-mapped, no pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from compressor import catalog
from compressor.errors import SpecError
from compressor.models.codec.description import DESCRIPTION, Description, read_description
from compressor.models.codec.headers import ShardHeader
from compressor.models.codec.weights import read_tensors, stored_headers, written_with
from compressor.models.executor import DeferredGraphModule, GraphModule
from compressor.types.exporter import PackedFormat


def load(
    path: str | Path,
    *,
    device: str = "cpu",
    mmap: bool = True,
    dequantize: Literal["on-use", "once"] = "on-use",
) -> torch.nn.Module:
    """Load a compressed model as a module in evaluation mode.

    Nothing is unpickled and no code of the model's author runs. Weights stay in the file until an
    operator reads them. Those that are packed or sparse are decoded then, and quantized layers
    stay quantized in memory. In ``state_dict()`` they are lazy tensors, which are computed at each
    use; ``clone()`` makes an ordinary one. The files have to stay as they are while the module is
    in use. The graph is compiled at the first call, unless ``model.json`` is not as it was written.

    Args:
        path: the directory that holds ``model.json``, that file, or an archive, all of which is
            read at once.
        device: where the weights go; anything but ``cpu`` reads and decodes them at once.
        mmap: map the files. Without, they are read at once, from the first byte to the last, and
            may go away; that suits a slow network disk.
        dequantize: ``on-use`` decodes and dequantizes a weight each time it is used and keeps
            nothing of it, which takes least memory; ``once`` keeps what the first call computed
            from weights alone, which takes the memory of the float model and least time.

    Returns:
        A module that takes the model's inputs by position or name, and returns its outputs by
        name.

    Raises:
        SpecError: there is no such device or choice.
        ModelError: a file is missing, cut, of another schema, or does not fit the other one.
    """
    if dequantize not in ("on-use", "once"):
        raise SpecError(f"dequantize {dequantize!r}", "is no choice", "use on-use or once")
    packed = packed_format(Path(path))
    if packed is not None:
        with packed.unpacked(Path(path)) as folder:
            return load(folder, device=device, mmap=False, dequantize=dequantize)
    once = dequantize == "once"
    description, headers = _opened(path)
    module: GraphModule
    if written_with(description, headers):
        # The exporter has compiled this very graph; here it is compiled when it is first used.
        module = DeferredGraphModule(
            description.model,
            read_tensors(description, headers, mmap),
            description.inputs,
            description.outputs,
            keeps_constants=once,
        )
    else:
        model = description.model()
        tensors = read_tensors(description, headers, mmap)
        module = GraphModule(model, tensors, keeps_constants=once)
    module.eval()
    if device == "cpu":
        return module
    try:
        return module.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise SpecError(f"device {device!r}", f"is not usable ({reason})", "use cpu") from error


def check(path: str | Path) -> None:
    """Check that a compressed model can be loaded, its graph included; no weight is read.

    Args:
        path: as :func:`load` takes it.

    Raises:
        ModelError: as :func:`load`.
    """
    description, headers = _opened(path)
    model = description.model()
    GraphModule(model, read_tensors(description, headers, mapped=True))


def _opened(path: str | Path) -> tuple[Description, tuple[ShardHeader, ...]]:
    file = Path(path)
    if file.is_dir():
        file /= DESCRIPTION
    description = read_description(file)
    return description, stored_headers(description, file.parent)


def packed_format(path: Path) -> PackedFormat | None:
    """Return the format of a file that holds the files of another export, if it is one."""
    if path.is_file():
        for name in catalog.names("format"):
            known: PackedFormat = catalog.load("format", name)()
            if known.holds(path):
                return known
    return None
