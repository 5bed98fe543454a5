"""Experts as linear layers of their own, so that each can be calibrated.

``transformers`` stacks the experts of a block in one tensor and sends each token to a few of them,
which depends on the data. Here each expert is linear layers under the names that its checkpoint
has, all see all tokens, and what a token is not sent to does not count: a router may leave an
expert out of all calibration data, and its codes have to be found all the same. Those of Llama 4
see the tokens that they are sent: their router scales what they read. How many tokens each expert
is sent is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import SpecError
from compressor.models.transformers.experts import plain_forward

_NAME = re.compile(r"(.+)\.(\d+)\.(\w+)\.weight")
_GATED = 2  # layers whose rows lie in one tensor: the gate's and those that it multiplies


class Experts(nn.ModuleList):
    """The experts of a block; each has its layers under the names of the checkpoint.

    Attributes:
        sees_all: each sees all tokens, also those that are not sent to it.
        sent: how many tokens the router has sent to each since :meth:`reset`.
    """

    sees_all = True

    def reset(self) -> None:
        """Count anew."""
        self.sent = [0] * len(self)

    def _count(self, more: Callable[[], Tensor], at: Tensor) -> None:
        if at.device.type != "meta" and not torch.compiler.is_exporting():
            self.sent = [a + b for a, b in zip(self.sent, more().tolist(), strict=False)]


class SingleExperts(Experts):
    """Experts that the library stacks in memory, and that are told which tokens are theirs."""

    def __init__(self, fused: Any, leaves: Mapping[str, tuple[str, ...]]):
        super().__init__()
        self._gate = fused._apply_gate if fused.has_gate else fused.act_fn
        self._first = leaves["gate_up_proj" if fused.has_gate else "up_proj"]
        (self._last,) = leaves["down_proj"]
        for index in range(fused.num_experts):
            expert = nn.Module()
            for parameter, names in leaves.items():
                rows = getattr(fused, parameter)[index].chunk(len(names))
                for name, weight in zip(names, rows, strict=True):
                    expert.add_module(name, _linear(weight))
            self.append(expert)
        self.reset()

    def forward(self, hidden: Tensor, index: Tensor, shares: Tensor) -> Tensor:
        """Return what the chosen experts make of each token.

        Args:
            hidden: ``[tokens, features]``.
            index: the experts that each token is sent to, ``[tokens, k]``.
            shares: their shares, ``[tokens, k]``.
        """
        self._count(lambda: torch.bincount(index.flatten(), minlength=len(self)), index)
        total = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            inner = self._gate(torch.cat([getattr(expert, n)(hidden) for n in self._first], -1))
            share = torch.where(index == number, shares, 0).sum(-1, keepdim=True)
            total = total + getattr(expert, self._last)(inner) * share
        return total.to(hidden.dtype)


class SortedExperts(Experts):
    """Experts that the checkpoint stacks, and that are given their tokens one after the other.

    As in Llama 4, whose router makes 0 of the tokens that an expert is not sent.
    """

    sees_all = False

    def __init__(self, stacked: Any):
        super().__init__()
        self._act = (stacked.act_fn,)  # a module, which is not an expert
        for rows, down in zip(stacked.gate_up_proj, stacked.down_proj, strict=True):
            expert = nn.Module()
            gate, up = rows.T.chunk(_GATED)
            for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down.T)):
                expert.add_module(name, _linear(weight))
            self.append(expert)
        self.reset()

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what each expert makes of its tokens.

        Args:
            hidden: ``[experts * tokens, features]``.
        """
        parts = hidden.reshape(len(self), -1, hidden.shape[-1])
        self._count(lambda: (parts != 0).any(-1).sum(1), hidden)
        return torch.cat([self._made(e, x) for e, x in zip(self, parts.unbind(), strict=True)])

    def _made(self, expert: Any, tokens: Tensor) -> Tensor:
        made: Tensor = expert.down_proj(
            expert.up_proj(tokens) * self._act[0](expert.gate_proj(tokens))
        )
        return made


class _Elsewhere(nn.Module):
    """Calls experts that lie at another path of their block."""

    def __init__(self, experts: SingleExperts):
        super().__init__()
        self._experts = (experts,)  # in a tuple, it is not a part of this module

    def forward(self, *given: Tensor) -> Tensor:
        """Return the experts' outputs."""
        out: Tensor = self._experts[0](*given)
        return out


def single_experts(
    network: nn.Module, places: Mapping[str, str], merged: Iterable[str], rows: Any
) -> None:
    """Put single experts in the place of stacked ones; weights are views of the stacks.

    Experts that the checkpoint has in stacks, too, stay; each of them sees all tokens.

    Args:
        network: with its weights; it is changed.
        places: the parameter that each tensor of the checkpoint becomes a part of.
        merged: the tensors of single experts.
        rows: called with a tensor's name, returns its first row.

    Raises:
        SpecError: it is not clear which tensor became which part of a stack.
    """
    parts: dict[str, dict[str, dict[str, str]]] = {}  # module, parameter, leaf: a first tensor
    homes: dict[str, str] = {}
    for name in sorted(merged):
        found = _NAME.fullmatch(name)
        module, _, parameter = places[name].rpartition(".")
        if found is not None and int(found[2]) == 0:
            parts.setdefault(module, {}).setdefault(parameter, {})[found[3]] = name
            homes[module] = found[1]
    for path, fused in list(network.named_modules()):
        forward = plain_forward(fused)
        if forward is None:
            continue
        if path not in parts or fused.is_transposed or fused.has_bias or fused.has_post_expert_norm:
            fused.forward = forward
            continue
        leaves = {
            parameter: _ordered(getattr(fused, parameter)[0], names, rows)
            for parameter, names in parts[path].items()
        }
        experts = SingleExperts(fused, leaves)
        network.set_submodule(path, _Elsewhere(experts) if homes[path] != path else experts)
        if homes[path] != path:
            _put(network, homes[path], experts)


def sorted_experts(network: nn.Module, paths: Iterable[str]) -> nn.Module:
    """Return a copy of a network with single experts in the place of those at some paths.

    The copy shares all weights; those of the experts are views.
    """
    copy = deepcopy(network, {id(t): t for t in (*network.parameters(), *network.buffers())})
    for path in paths:
        copy.set_submodule(path, SortedExperts(copy.get_submodule(path)))
    return copy


def experts_of(module: nn.Module) -> dict[str, Experts]:
    """Return the experts of a block by their path in it."""
    found = module.named_modules()
    return {path: part for path, part in found if isinstance(part, Experts)}


def _ordered(stack: Tensor, names: Mapping[str, str], rows: Any) -> tuple[str, ...]:
    """Return layers in the order in which their rows lie in a stack."""
    if len(names) == 1:
        return tuple(names)
    starts = [part[0] for part in stack.chunk(len(names))]
    for order in (tuple(names), tuple(reversed(list(names)))):
        first = [rows(names[leaf]).to(stack.dtype) for leaf in order]
        if len(names) == _GATED and all(map(torch.equal, starts, first)):
            return order
    raise SpecError(
        "model.checkpoint",
        f"has experts of the parts {', '.join(names)}, whose use is unknown",
        "write a spec with model.factory, which runs the whole model in memory",
    )


def _linear(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _put(network: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a path of which the last parts may not be there."""
    at = network
    *parents, last = path.split(".")
    for part in parents:
        if not hasattr(at, part):
            at.add_module(part, nn.Module())
        at = at.get_submodule(part)
    at.add_module(last, module)
