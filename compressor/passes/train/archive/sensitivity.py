"""Sensitivity of the outputs to errors of weights, tracked while the network loses weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from compressor.passes.train.archive.coded_network import CodedNetwork
from compressor.passes.train.job import PREFIX, Micro
from compressor.passes.train.losses import signed_sum

_DAMPING = 0.1  # of what an element's row and column are worth, added to its sensitivity
_MEMORY = 32  # gradients over which the mean goes that follows the network


class Sensitivities:
    """Sensitivity of the outputs to errors of weights, in the weights' shapes.

    The diagonal of the Gauss-Newton matrix of half the squared error of the outputs, for a sample:
    the mean square of the gradient of all outputs, each with a random sign (M. Hutchinson, 1989).
    To learn from a network at a high temperature is to match its outputs so (Hinton et al. 2015,
    arXiv:1503.02531, section 2.1). The loss itself would say little: where all training samples are
    answered well, its gradient is next to nothing. Little is known of a single weight from few
    samples, so a share of what its row and its column say together is added (N. Shazeer and M.
    Stern, Adafactor, 2018, arXiv:1804.04235, section 3).

    A network that has lost nine weights of ten is another one: what feeds a unit that nothing reads
    any more is worth nothing. So the mean is over the last gradients.

    Args:
        network: of which they are.
    """

    def __init__(self, network: CodedNetwork):
        self._network = network
        self._means: dict[str, Tensor] = {}

    def measure(self, micros: Iterable[Micro], advance: Callable[[int], None]) -> None:
        """Take the mean over samples of the network as it is; ``advance`` counts them."""
        sums: dict[str, Tensor] = {}
        samples = 0
        for count, micro in enumerate(micros):
            for name, found in self._squares(micro, count).items():
                sums[name] = sums[name] + found if name in sums else found
            samples += len(micro.rows)
            advance(count + 1)
        self._means = {name: found / max(samples, 1) for name, found in sums.items()}

    def follow(self, micro: Micro, step: int) -> None:
        """Update the moving average with a few samples."""
        for name, found in self._squares(micro, step).items():
            mean = self._means[name].to(found.device)
            self._means[name] = mean.lerp(found / max(len(micro.rows), 1), 1 / _MEMORY)

    def of(self, name: str) -> Tensor:
        """Return the sensitivities of a tensor."""
        mean = self._means[name]
        return mean + _DAMPING * _rank_one(mean)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors to save."""
        return dict(self._means)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what :meth:`state_dict` returned."""
        self._means = dict(state)

    def _squares(self, micro: Micro, seed: int) -> dict[str, Tensor]:
        """Return the squares of the gradient of the outputs' sum, with random signs."""
        module = self._network.module
        parameters = dict(module.named_parameters())
        names = self._network.coded
        wanted = [parameters[PREFIX + name] for name in names]
        moved, signs = micro.to(wanted[0].device), torch.Generator().manual_seed(seed)
        training = module.training
        module.eval()
        outputs = module(**{name: moved.tensors[name] for name in module.inputs})
        module.train(training)
        floats = (out for out in outputs.values() if out.is_floating_point())
        gradients = torch.autograd.grad(signed_sum(floats, signs), wanted)
        return {n: g.float().square() for n, g in zip(names, gradients, strict=True)}


def _rank_one(values: Tensor) -> Tensor:
    """Return the products of the means of rows and columns that have the same sums, not below."""
    if values.ndim < 2:
        return values.mean().expand(values.shape)
    flat = values.flatten(2) if values.ndim > 2 else values[..., None]
    rows, columns = flat.mean((1, 2), keepdim=True), flat.mean((0, 2), keepdim=True)
    product = rows * columns / flat.mean().clamp(min=torch.finfo(torch.float32).tiny)
    return product.expand(flat.shape).reshape(values.shape)
