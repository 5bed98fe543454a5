"""The devices of a training: CPUs, or GPUs that add in a fixed order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from compressor.errors import SpecError
from compressor.types.data import Ranks

if TYPE_CHECKING:
    from accelerate import Accelerator

_PRECISION = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


@contextmanager
def accelerated(precision: str, ranks: Ranks) -> Iterator[Accelerator]:
    """Yield what a training moves its network and its samples with.

    GPUs are used where there are any. There, the kernels are those that add in the same order each
    time, so that the same inputs give the same bytes; PyTorch warns of an operator that has none.

    Args:
        precision: of products: ``float32``, ``bfloat16`` or ``float16``.
        ranks: the processes that train together.

    Raises:
        SpecError: ``float16`` without a GPU, or fewer GPUs than processes.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    check_precision(precision)
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        _check_gpus(ranks)
    # One process may train several times, each time in another precision.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with _one_order_of_sums(on_gpus):
        yield Accelerator(
            mixed_precision=_PRECISION[precision],
            cpu=not on_gpus,
            step_scheduler_with_optimizer=False,
        )


def check_precision(precision: str) -> None:
    """Check that this machine can train with products in a number format.

    Raises:
        SpecError: ``float16`` without a GPU.
    """
    if precision == "float16" and not torch.cuda.is_available():
        raise SpecError(
            "precision", "is float16, which needs a GPU", "set bfloat16 or float32, or use a GPU"
        )


def _check_gpus(ranks: Ranks) -> None:
    """Check that each process of this machine has a GPU of its own, as nccl requires."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks.size > 1 else 1
    gpus = torch.cuda.device_count()
    if here > gpus:
        raise SpecError(
            f"{here} processes on this machine",
            f"train on GPUs, but it has {gpus}",
            f"start {gpus}, or set CUDA_VISIBLE_DEVICES to nothing to train on CPUs",
        )


@contextmanager
def _one_order_of_sums(on_gpus: bool) -> Iterator[None]:
    if not on_gpus:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    mode, tuned = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    torch.set_deterministic_debug_mode("warn")
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = tuned
