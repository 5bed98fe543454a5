"""Steps of an optimizer in float32 where a module's weights have 16 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

_EXACT = "exact"
_HALVES = (torch.float16, torch.bfloat16)


def step_in_float32(optimizer: Optimizer) -> None:
    """Let an optimizer move float32 copies of weights of 16 bits, which are rounded after each.

    In 16 bits, most steps are smaller than what a weight can show of them, and AdamW divides by
    squares of gradients that float16 takes for zero: P. Micikevicius et al., Mixed precision
    training, 2018 (arXiv:1710.03740), section 3.1. The copies are part of the optimizer's state. A
    weight that was changed in between, as by pruning, is taken as it is then.

    Args:
        optimizer: changed in place; none that only has parameters of other types.
    """
    narrow = {
        parameter: parameter.dtype
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.dtype in _HALVES
    }
    if not narrow:
        return

    def widened(*_: Any) -> None:
        for parameter in narrow:
            gradient, now, exact = parameter.grad, parameter.data, parameter.data.float()
            held = optimizer.state[parameter].pop(_EXACT, None)
            if held is not None:
                exact = torch.where(held.to(now.dtype) == now, held, exact)
            parameter.grad, parameter.data = None, exact
            parameter.grad = None if gradient is None else gradient.float()

    def rounded(*_: Any) -> None:
        for parameter in narrow:
            optimizer.state[parameter][_EXACT] = parameter.data
        typed()

    def typed(*_: Any) -> None:
        for parameter, dtype in narrow.items():
            parameter.grad, parameter.data = None, parameter.data.to(dtype)

    def untyped(*_: Any) -> None:
        for parameter in narrow:
            parameter.grad, parameter.data = None, parameter.data.float()

    optimizer.register_step_pre_hook(widened)
    optimizer.register_step_post_hook(rounded)
    # What is loaded gets the type of the parameter.
    optimizer.register_load_state_dict_pre_hook(untyped)
    optimizer.register_load_state_dict_post_hook(typed)
