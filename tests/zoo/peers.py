"""What ONNX Runtime's quantizer and Torch-Pruning make of a case."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.zoo.compare import error_db, leaves, opened

if TYPE_CHECKING:
    from tests.zoo.one import Work

_STEPS = 16  # of Torch-Pruning, until the multiply-accumulates are half
_HALF = 0.55


def quantized(work: Work, way: str) -> dict[str, Any]:
    """Quantize the float ONNX file with ONNX Runtime, prepared as its documentation asks."""
    source = work.folder / ("source.onnx" if work.case.kind == "file" else "float.onnx")
    if not source.exists():
        return {"skipped": "there is no float file"}
    prepared, target = work.folder / "prepared.onnx", work.folder / f"peer-{way}.onnx"
    logging.disable(logging.WARNING)
    try:
        _prepare(source, prepared)
        outputs = _made(work, prepared, target, way)
    finally:
        logging.disable(logging.NOTSET)
    return {"code": 0, "db": error_db(work.wanted, outputs), "bytes": target.stat().st_size}


def _made(work: Work, prepared: Path, target: Path, way: str) -> list[Any]:
    """Quantize with scales for each channel, or for each tensor where the file's opset is older."""
    from onnxruntime.quantization import quantize_dynamic

    from tests.benchmarks import peers

    for channels in (True, False):
        try:
            if way == "dynamic":
                quantize_dynamic(str(prepared), str(target), per_channel=channels)
            else:
                data = _calibration(work)
                peers.quantize(prepared, target, data, "MinMax", symmetric=False, channels=channels)
            result: list[Any] = opened(target).run(None, work.batch)
        except Exception:
            if channels:
                continue
            raise
        break
    return result


def _prepare(source: Path, prepared: Path) -> None:
    """Prepare a file as far as ONNX Runtime can."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    for skip in (False, True):
        try:
            quant_pre_process(str(source), str(prepared), skip_symbolic_shape=skip)
        except Exception:  # noqa: BLE001 - it raises these
            continue
        return
    shutil.copy(source, prepared)


def _calibration(work: Work) -> list[Any]:
    names = [i.name for i in work.inputs]
    if work.feeds:  # single steps with a state of zeros
        return [work.drawn(work.size, seed) for seed in range(4)]
    arrays = np.load(work.folder / "calibration.npz")
    rows = len(arrays[names[0]])
    return [
        {name: arrays[name][i : i + work.size] for name in names}
        for i in range(0, rows - work.size + 1, work.size)
    ]


def pruned(work: Work) -> dict[str, Any]:
    """Prune channels with Torch-Pruning until half of the multiply-accumulates remain."""
    import torch_pruning as tp

    module = work.module.requires_grad_(True)
    example = tuple(torch.from_numpy(a) for a in work.batch.values())
    layers = [m for m in module.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
    before = _work_of(module, example)
    pruner = tp.pruner.BasePruner(
        module,
        example,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=0.9,
        iterative_steps=_STEPS,
        ignored_layers=layers[-1:],
        output_transform=lambda result: sum(
            t.float().sum() for t in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(t)
        ),
    )
    share = 1.0
    for _ in range(_STEPS):
        pruner.step()
        share = _work_of(module, example) / before
        if share <= _HALF:
            break
    shapes = [a.shape for a in leaves(module(*example))]
    return {
        "code": 0,
        "share": round(share, 3),
        "shapes": shapes == [a.shape for a in work.wanted],
    }


def _work_of(module: torch.nn.Module, example: tuple[torch.Tensor, ...]) -> float:
    """Return its multiply-accumulates, or its parameters where Torch-Pruning cannot count them."""
    import torch_pruning as tp

    try:
        return float(tp.utils.count_ops_and_params(module, example)[0])
    except TypeError:  # of a layer that it does not know
        return float(sum(p.numel() for p in module.parameters()))
