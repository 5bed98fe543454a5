"""Weights that lose bytes while they are trained: zeros first, then codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from compressor.passes.train.archive.coded_network import CodedNetwork
from compressor.passes.train.archive.coding import Coding, assigned, moved
from compressor.passes.train.archive.sensitivity import Sensitivities
from compressor.passes.train.job import Micro, Regulator

_EVERY = 10  # steps after which weights take other values; after more, too many do so at once
_THERE = 0.4  # share of the steps after which the bytes are to be what the round aims at
_CODED = 0.8  # share after which weights are the values of their codes
_SETTLED = 0.95  # share after which weights keep their values, and the values are trained
_MOST_DEARER = 2.0  # times the price before
_PRICE = "price"


class CodeAssignment(Regulator):
    """Lets weights take other values while they are trained, ever fewer bytes of them.

    The logarithm of the bytes falls, fast at first, to that of what the round aims at. Every time
    that weights choose their values, the price is moved by as much as the bytes are off.

    Until the bytes are there, only zeros count, and all other weights are floats (gradual pruning:
    M. Zhu and S. Gupta, 2017, arXiv:1710.01878; zeros may come back: Y. Guo et al., 2016,
    arXiv:1608.04493). To lose most weights and to have few values at once is more than a network
    can learn. Then weights become the values of their codes, little by little.

    Args:
        network: its module is what is trained.
        sensitivities: what errors of its weights cost; they are kept up to date.
        samples: returns a few samples for a step, for that.
        price: loss for each byte, at the beginning.
        target: bytes that all are to take.
        steps: of the training.
    """

    def __init__(
        self,
        network: CodedNetwork,
        sensitivities: Sensitivities,
        samples: Callable[[int], Micro],
        price: float,
        target: float,
        steps: int,
    ):
        self._network, self._sensitivities, self._samples = network, sensitivities, samples
        self._price = torch.tensor(price, dtype=torch.float64)
        codings = network.codings()
        self._zeros = {name: coding.zero for name, coding in codings.items()}
        self._begin = sum(coding.nbytes for coding in codings.values())
        self._target = target
        self._there, self._coded = _THERE * steps, _CODED * steps
        self._last = round(_SETTLED * steps)

    @property
    def price(self) -> float:
        """The price now."""
        return float(self._price)

    def wanted(self, step: int) -> float:
        """Return the bytes that are to be left at a step."""
        left = max(0.0, 1 - step / self._there) ** 2
        return float(self._target * max(1.0, self._begin / self._target) ** left)

    def share(self, step: int) -> float:
        """Return how much of a weight is the value of its code at a step."""
        return min(1.0, max(0.0, (step - self._there) / (self._coded - self._there)))

    def before(self, step: int) -> None:
        """Choose the value of each weight if it is time to."""
        self._network.decoder.share = share = self.share(step)
        if step % _EVERY or step >= self._last:
            return
        self._sensitivities.follow(self._samples(step), step)
        codings = self._network.codings(self._sensitivities.of)
        nbytes = sum(coding.nbytes for coding in codings.values())
        dearer = (nbytes / self.wanted(step)) ** 2  # bytes fall by less than the price rises
        self._price *= min(max(dearer, 1 / _MOST_DEARER), _MOST_DEARER)
        self._network.code({n: self._chosen(n, c, share) for n, c in codings.items()})

    def _chosen(self, name: str, coding: Coding, share: float) -> Coding:
        """Return a weight's new codes; values that are not trained yet suit the weights."""
        zero = self._zeros[name]
        chosen = replace(coding, codes=assigned(coding, self.price, zero))
        return moved(chosen, zero) if share < 1 else chosen

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Make zero zero again."""
        held = self._network.books_held()
        for name, place in self._zeros.items():
            held[name][place] = 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """Return the price, and what errors cost."""
        return {
            _PRICE: self._price,
            **{f"felt.{n}": t for n, t in self._sensitivities.state_dict().items()},
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take those of the interrupted training."""
        self._price = state[_PRICE]
        self._sensitivities.load_state_dict(
            {n.removeprefix("felt."): t for n, t in state.items() if n != _PRICE}
        )
