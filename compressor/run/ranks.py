"""Runs in several processes, as ``torchrun`` starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from compressor.errors import InputError, SpecError, first_line
from compressor.types.data import ALONE, Ranks, ValueT

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = timedelta(days=2)  # the first process measures alone while the others wait


class Group:
    """The processes of PyTorch's default process group."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def wait(self) -> None:
        """Wait until all processes have come here.

        Raises:
            InputError: one of them is gone.
        """
        import torch.distributed as dist

        with _others_are_there(self.rank):
            dist.barrier()

    def gathered(self, value: ValueT) -> list[ValueT]:
        """Return each process's value, in their order, to all of them.

        Raises:
            InputError: one of them is gone.
        """
        import torch.distributed as dist

        values: list[ValueT | None] = [None] * self.size
        with _others_are_there(self.rank):
            dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]  # every place has been filled


@contextmanager
def ranks() -> Iterator[Ranks]:
    """Yield this process's place among those that ``torchrun`` started; alone without it.

    Statistics and messages, which lie on the host, are exchanged with gloo; tensors on GPUs, such
    as gradients, with nccl.

    Raises:
        SpecError: the environment of ``torchrun`` is incomplete, or nobody answers.
    """
    present = [name for name in _VARIABLES if name in os.environ]
    if "WORLD_SIZE" not in present or int(os.environ["WORLD_SIZE"]) == 1:
        yield ALONE
        return
    if len(present) < len(_VARIABLES):
        missing = next(name for name in _VARIABLES if name not in present)
        raise SpecError(
            f"environment variable {missing}",
            "is not set, though WORLD_SIZE is",
            "start several processes with torchrun",
        )
    import torch
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise SpecError(
            f"rank {os.environ['RANK']}",
            f"cannot reach the others ({first_line(error)})",
            "start all processes with the same torchrun command",
        ) from error
    try:
        yield Group()
    finally:
        dist.destroy_process_group()


@contextmanager
def _others_are_there(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise InputError(
            f"rank {rank}",
            "has lost the other processes",
            "read their messages, fix the cause, and start all of them again",
        ) from error
