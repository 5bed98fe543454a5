"""Modules that only call another module."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from compressor.errors import SpecError

_WRAPPERS = (nn.DataParallel, DistributedDataParallel, AveragedModel)
_COMPILED = "_orig_mod"  # where torch.compile keeps the module


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module itself, without what compiles it, spreads it, or averages its parameters.

    Those take anything by ``*`` and ``**``, so that neither inputs nor sizes show on them.

    Raises:
        SpecError: it is TorchScript, which has no code that could be exported or changed.
    """
    inner: object = module
    while isinstance(inner, nn.Module):
        module = inner
        attribute = "module" if isinstance(module, _WRAPPERS) else _COMPILED
        inner = getattr(module, attribute, None)
    if isinstance(module, torch.jit.ScriptModule):
        raise SpecError(
            f"module {module.original_name}",
            "is TorchScript, of which PyTorch exports no graph",
            "give the module that was scripted or traced, or the ONNX file that "
            "torch.onnx.export(..., dynamo=False) writes of it",
        )
    return module
