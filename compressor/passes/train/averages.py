"""The exponential moving average of a network's weights, which is kept in place of the last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compressor.passes.train.job import Regulator

_SINCE = "since:"
_FASTEST = 10  # steps behind which the average is whole, while a training is young


class Average(Regulator):
    """The moving average of parameters and statistics, updated after each step.

    B. T. Polyak and A. B. Juditsky, Acceleration of stochastic approximation by averaging, 1992,
    with exponentially falling weights; while a training is young, the average follows faster, by
    ``(1 + step) / (10 + step)``, as in TensorFlow's ``ExponentialMovingAverage``. What is no float,
    such as a counter, is taken as it is. Weights of 16 bits are averaged in float32: most steps of
    the average are smaller than what they can show. A weight of two axes or more that is zero stays
    zero in the average, so pruned networks stay pruned.

    Args:
        module: its state is averaged; it is not changed.
        decay: share of the average that a step leaves.
    """

    def __init__(self, module: nn.Module, decay: float):
        self._module = module
        self._decay = decay
        self._since = 0  # the step that the average began behind
        self._values = self._live()

    def _live(self) -> dict[str, Tensor]:
        state = self._module.state_dict()
        return {n: t.detach().to(_exact(t.dtype), copy=True) for n, t in state.items()}

    def restart(self, step: int) -> None:
        """Forget the past: weights have been reset after a step."""
        self._since = step + 1
        self._values = self._live()

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Move the average towards the weights."""
        age = step - self._since
        share = 1 - min(self._decay, (1 + age) / (_FASTEST + age))
        for name, live in self._module.state_dict().items():
            value = self._values[name]
            if value.is_floating_point():
                value.lerp_(live.detach().to(value.dtype), share)
            else:
                value.copy_(live)

    def weights(self) -> dict[str, Tensor]:
        """Return the average on the CPU, under the names of the module's state."""
        live = self._module.state_dict()
        kept = {
            name: torch.where(live[name].detach() == 0, torch.zeros_like(value), value)
            if value.ndim > 1 and value.is_floating_point()
            else value
            for name, value in self._values.items()
        }
        return {n: value.to("cpu", live[n].dtype, copy=True) for n, value in kept.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averaged weights inside the block."""
        before, averaged = self._live(), self.weights()
        with torch.no_grad():
            self._copy(averaged)
            try:
                yield
            finally:
                self._copy(before)

    def _copy(self, values: dict[str, Tensor]) -> None:
        for name, tensor in self._module.state_dict().items():
            tensor.copy_(values[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average, and the step that it began behind."""
        return {**self._values, _SINCE: torch.tensor(self._since)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what :meth:`state_dict` returned."""
        self._since = int(state[_SINCE])
        for name, value in self._values.items():
            value.copy_(state[name])


def _exact(dtype: torch.dtype) -> torch.dtype:
    narrow = dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    return torch.float32 if narrow else dtype
