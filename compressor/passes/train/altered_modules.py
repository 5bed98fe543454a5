"""Changes to a module while it is trained: activation checkpointing and synchronized norms."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from compressor.errors import SpecError


def checkpoint_blocks(module: nn.Module) -> None:
    """Make a network's repeated blocks keep only their inputs for backward, in place.

    T. Chen et al., Training deep nets with sublinear memory cost, 2016 (arXiv:1604.06174). Networks
    of `transformers` have their own switch; elsewhere, blocks are the members of the outermost
    lists and sequences of modules.

    Raises:
        SpecError: there are no such blocks, or they have batch norms, which would count each batch
            twice.
    """
    able = next((m for m in module.modules() if hasattr(m, "gradient_checkpointing_enable")), None)
    if able is not None and getattr(able, "supports_gradient_checkpointing", False):
        able.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return
    blocks = _blocks(module)
    if not blocks:
        raise SpecError(
            "checkpointing", "is true, but the network has no list of blocks", "remove it"
        )
    for block in blocks:
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in block.modules()):
            raise SpecError(
                "checkpointing",
                "is true, but the blocks have batch norms, whose statistics would be updated twice",
                "remove it, or use micro-batch to save memory",
            )
    wrapped = {id(block) for block in blocks}
    apply_activation_checkpointing(
        module,
        partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        lambda candidate: id(candidate) in wrapped,
    )


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Return the members, with parameters, of the outermost lists of modules."""
    blocks: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            blocks += [m for m in child if next(m.parameters(), None) is not None]
        else:
            blocks += _blocks(child)
    return blocks


class SynchronizedNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm whose batch is that of all processes together, on CPUs and GPUs alike.

    PyTorch's ``SyncBatchNorm`` computes the same (S. Ioffe and C. Szegedy, 2015, arXiv:1502.03167,
    algorithm 1, over all processes' samples), on GPUs alone. Each process must call it as often as
    the others do.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Take any input ``[N, channels, ...]``."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``[N, channels, ...]``, and move the running statistics."""
        if not self.training:
            return super().forward(input)
        axes = [axis for axis in range(input.ndim) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(input.ndim)]
        ours = torch.tensor([input.numel() / input.shape[1]], device=input.device)
        sums = _summed(torch.cat([input.float().sum(axes), ours]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = input.float() - mean.reshape(shape)
        variance = _summed(centred.square().sum(axes)) / count
        self._move_statistics(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        result: Tensor = centred * (variance + self.eps).rsqrt().reshape(shape)
        if self.affine:
            result = result * self.weight.reshape(shape) + self.bias.reshape(shape)
        return result.to(input.dtype)

    @torch.no_grad()
    def _move_statistics(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        share = 1 / float(self.num_batches_tracked) if share is None else share
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def _summed(tensor: Tensor) -> Tensor:
    total: Tensor = _SumOfProcesses.apply(tensor)  # type: ignore[no-untyped-call]  # PyTorch's own
    return total


class _SumOfProcesses(torch.autograd.Function):
    """The sum of a tensor over all processes, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(context: object, tensor: Tensor) -> Tensor:
        del context
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        del context
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


def synchronize_norms(module: nn.Module) -> None:
    """Make a module's batch norms take their statistics over all processes, in place.

    Raises:
        SpecError: it has none.
    """
    norms = {
        (parent, name): child
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.modules.batchnorm._BatchNorm)
    }
    for (parent, name), norm in norms.items():
        setattr(parent, name, _synchronized(norm))
    if not norms:
        raise SpecError(
            "sync-batch-norm", "is true, but the network has no batch norm to train", "remove it"
        )


def _synchronized(norm: nn.modules.batchnorm._BatchNorm) -> SynchronizedNorm:
    """Return a norm with the same parameters, statistics and name space."""
    made = SynchronizedNorm(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats
    )
    made._parameters, made._buffers = norm._parameters, norm._buffers
    return made.train(norm.training)
