"""First-order Taylor scores: what removing a unit does to the outputs, by gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compressor.errors import DataError, ModelError
from compressor.models.executor import GraphModule
from compressor.passes.prune.criteria import Scores, position_sums, unit_sums
from compressor.types.channels import ChannelMap, Member
from compressor.types.tensors import Batch


def taylor_scores(
    model: ir.Model,
    channels: ChannelMap,
    members: Sequence[Member],
    batches: Iterable[Batch],
    seed: int,
) -> Scores:
    """Return the expected squared change of the outputs where a unit goes, to first order.

    P. Molchanov et al., Importance estimation for neural network pruning, 2019
    (arXiv:1906.10771), equation 8, take ``(sum of w dL/dw)^2`` over a unit's weights, ``L`` being
    the training loss. That needs labels, and is blind near a minimum. Here ``L = v . f(x)``, the
    outputs times random signs ``v``: its expectation over ``v`` is the sum over all outputs ``f``
    of ``(sum of w df/dw)^2``. Signs differ from sample to sample, so one gradient a batch does for
    all of its samples.

    Args:
        model: the graph.
        channels: its channels.
        members: the parameters' axes that count.
        batches: the calibration data.
        seed: of the signs.

    Returns:
        One score for each unit, the mean over samples.

    Raises:
        ModelError: an operator cannot be differentiated.
        DataError: there are no samples.
    """
    module = GraphModule(model)
    names = list(dict.fromkeys(m.parameter for m in members))
    weights = {n: module.get_buffer(n).detach().clone().requires_grad_() for n in names}
    generator = torch.Generator().manual_seed(seed)
    total, samples = np.zeros(channels.count), 0
    for batch in batches:
        inputs = {n: torch.from_numpy(batch[n].copy()) for n in module.input_names}
        gradients = _gradients(module, inputs, weights, generator)
        change = np.zeros(channels.count)
        for member in members:
            axis = channels.parameters[member.parameter][member.axis]
            gradient = gradients.get(member.parameter)
            if axis is None or gradient is None:
                continue
            products = weights[member.parameter].detach() * gradient
            change += unit_sums(position_sums(products, member.axis), axis, channels.count)
        total += np.square(change)
        samples += len(next(iter(batch.values())))
    if not samples:
        raise DataError("calibration data", "has no samples", "give at least one batch")
    return total / samples


def _gradients(
    module: GraphModule,
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    generator: torch.Generator,
) -> dict[str, Tensor]:
    with torch.enable_grad():
        outputs = module(**{**inputs, **weights}).values()
        projected = [_signed(o, generator) for o in outputs if o.requires_grad]
        if not projected:
            raise ModelError(
                "criterion taylor",
                "finds no output that depends on the weights differentiably",
                "choose another criterion, such as l2",
            )
        total = torch.stack(projected).sum()
        found = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
    return {n: g for n, g in zip(weights, found, strict=True) if g is not None}


def _signed(output: Tensor, generator: torch.Generator) -> Tensor:
    """Return the sum of an output's values times random signs."""
    signs = torch.randint(0, 2, output.shape, generator=generator).to(output.dtype) * 2 - 1
    return (output * signs).sum()
