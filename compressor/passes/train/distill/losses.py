"""How far a student is from its teacher, one value a sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor.passes.train.finetune import masked_mean


def kl_divergence(
    student: Tensor, teacher: Tensor, temperature: float, counted: Tensor | None = None
) -> Tensor:
    """Return ``T² KL(teacher || student)`` of softened probabilities.

    G. Hinton et al., Distilling the knowledge in a neural network, 2015 (arXiv:1503.02531),
    section 2: both logits are divided by the temperature; the square keeps gradients as large as
    those of hard labels, whatever the temperature.

    Args:
        student: logits ``[N, ..., classes]``.
        teacher: likewise.
        temperature: ``T``.
        counted: which positions count, as many as there are rows of logits; all if left out.

    Returns:
        ``[N]``, in nats, the mean over the positions that count; 0 where none does.
    """
    classes = student.shape[-1]
    ours = functional.log_softmax(student.float().reshape(-1, classes) / temperature, dim=1)
    theirs = functional.log_softmax(teacher.float().reshape(-1, classes) / temperature, dim=1)
    each = functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=1)
    if counted is None:
        counted = torch.ones(len(each), dtype=torch.bool, device=each.device)
    return temperature**2 * masked_mean(each, counted.reshape(-1), len(student))


def mean_square(student: Tensor, teacher: Tensor) -> Tensor:
    """Return each sample's mean squared difference, ``[N]``.

    Of layers' outputs this is the hint of A. Romero et al., FitNets, 2015 (arXiv:1412.6550),
    equation 3, as a mean, so that a weight means the same for layers of every size.

    Args:
        student: ``[N, ...]``.
        teacher: likewise.
    """
    difference = student.float() - teacher.float()
    return difference.square().reshape(len(difference), -1).mean(dim=1)


def attention_map(values: Tensor, axis: int) -> Tensor:
    """Return where a layer is active.

    S. Zagoruyko and N. Komodakis, Paying more attention to attention, 2017 (arXiv:1612.03928),
    section 3.1: the sum of squares over channels, brought to length one.

    Args:
        values: a layer's output ``[N, ...]``.
        axis: that of the channels, or of the width of tokens.

    Returns:
        ``[N, positions]``.
    """
    return functional.normalize(values.float().square().sum(dim=axis).flatten(1), dim=1)


def attention_difference(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the squared distance of attention maps ``[N, positions]``: ``[N]``, 0 to 2.

    The paper's equation 2 has the distance itself, whose gradient is not defined where both maps
    are the same.
    """
    return (student - teacher).square().sum(dim=1)


def width_axis(rank: int, *, convolution: bool) -> int:
    """Return the axis of the channels of a layer's output, or of the width of tokens.

    Args:
        rank: how many axes the output has.
        convolution: a convolution made it; of three axes, channels are then the second.
    """
    return 1 if rank != 3 or convolution else 2


class Projection(nn.Module):
    """A trained linear map of one axis, which is a 1x1 convolution where that is the channels'.

    Args:
        axis: which one.
        width: its length.
        wanted: its length afterwards.
    """

    def __init__(self, axis: int, width: int, wanted: int):
        super().__init__()
        self._axis = axis
        self.linear = nn.Linear(width, wanted)

    def forward(self, values: Tensor) -> Tensor:
        """Map ``[..., width, ...]`` to ``[..., wanted, ...]``."""
        mapped: Tensor = self.linear(values.movedim(self._axis, -1))
        return mapped.movedim(-1, self._axis)
