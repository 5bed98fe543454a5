"""The largest learning rate whose first step leaves a network's outputs about as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

import torch
from torch import Tensor, nn

from compressor.models.torch.lowering import NamedModule
from compressor.passes.train.job import Micro
from compressor.passes.train.losses import signed_sum

_MOST = 0.1  # of what the outputs tell, that one step may take
_HALVINGS = 10


def gentle_rate(module: NamedModule, micros: Sequence[Micro], rate: float) -> tuple[float, float]:
    """Halve a learning rate until the first step at it leaves the outputs what they tell.

    The first step of Adam moves each weight by the whole rate, against the sign of its gradient
    (D. Kingma and J. Ba, 2014, arXiv:1412.6980, section 2.1), and those after it nearly so. Where
    no batch norm does, nothing sets right what many layers then do together, and the deeper a
    network is, the more that is. The step that is tried follows the gradient of the outputs, each
    with a random sign, as the loss against a teacher is at its minimum where training begins.

    Args:
        module: the network as it is given; it is left as it was.
        micros: some training samples, a few at once.
        rate: the largest learning rate.

    Returns:
        The learning rate, and the share of the variance of the outputs that the first step at the
        largest one would take.
    """
    training = module.training
    module.train()  # batch norms normalize by batches
    buffers = {name: tensor.clone() for name, tensor in module.named_buffers()}
    weights = [p for p in module.parameters() if p.requires_grad]
    directions = _directions(module, weights, micros)
    before = [weight.detach().clone() for weight in weights]
    first, lost = 0.0, 0.0
    with torch.no_grad():
        exact = [_outputs(module, micro) for micro in micros]
        for halving in range(_HALVINGS + 1):
            for weight, old, direction in zip(weights, before, directions, strict=True):
                weight.copy_(old - rate * direction)
            lost = _lost(exact, [_outputs(module, micro) for micro in micros])
            first = lost if halving == 0 else first
            if lost <= _MOST:
                break
            rate /= 2
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)
        for name, tensor in module.named_buffers():
            tensor.copy_(buffers[name])
    module.train(training)
    return rate, first


def _directions(
    module: NamedModule, weights: Sequence[nn.Parameter], micros: Sequence[Micro]
) -> list[Tensor]:
    """Return the signs of the gradient of all outputs, each with a random sign."""
    sums = [torch.zeros_like(weight) for weight in weights]
    random = torch.Generator().manual_seed(0)
    for micro in micros:
        signed = signed_sum(_outputs(module, micro).values(), random)
        gradients = torch.autograd.grad(signed, weights, allow_unused=True)
        for total, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                total += gradient
    return [total.sign() for total in sums]


def _outputs(module: NamedModule, micro: Micro) -> dict[str, Tensor]:
    moved = micro.to(next(module.parameters()).device)
    found = module(**{name: moved.tensors[name] for name in module.inputs})
    return {name: out for name, out in found.items() if out.is_floating_point()}


def _lost(exact: Sequence[Mapping[str, Tensor]], found: Sequence[Mapping[str, Tensor]]) -> float:
    """Return the squared error as a share of the variance over samples, the worst of outputs."""
    errors, variances = dict[str, float](), dict[str, float]()
    for ours, theirs in zip(exact, found, strict=True):
        for name, out in ours.items():
            error = float((theirs[name] - out).double().square().sum())
            errors[name] = errors.get(name, 0.0) + error
            around = float((out - out.mean(0)).double().square().sum())
            variances[name] = variances.get(name, 0.0) + around
    shares = [errors[name] / v for name, v in variances.items() if v > 0]
    return max((s if isfinite(s) else torch.inf for s in shares), default=0.0)
