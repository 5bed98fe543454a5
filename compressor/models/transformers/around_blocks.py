"""What lies around the blocks of a decoder: the table of tokens, norms, and the output layer.

The table and the output layer are a large part of a small model, and more than one block. They stay
in their files, in their own type: of the table the rows of the tokens at hand are widened, and of
the output layer a part at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_ROWS = 8192  # of the output layer that are widened at once
_TABLE, _OUTPUT = "table", "output"


@dataclass
class Around:
    """The parts of a network outside its blocks.

    Attributes:
        network: a class of ``transformers``.
        table: rows of the tokens, in their own type.
        output: the weight of the output layer; ``None`` where there is none.
        names: `table` or `output`, by the names of the parameters.
        tied: these are one.
    """

    network: Any
    table: Tensor
    output: Tensor | None
    names: Mapping[str, str]
    tied: bool

    @contextmanager
    def changed(self, values: Mapping[str, Tensor], *, untied: bool) -> Iterator[None]:
        """Use other parameters inside the block; where two names are of one, the last counts.

        Args:
            values: by their names in the network.
            untied: table and output layer are not one, though their class ties them.
        """
        tables, before = (self.table, self.output), dict[str, nn.Parameter]()
        for name, value in values.items():
            kind = self.names.get(name)
            if kind is None:
                before[name] = self._set(name, wide(value))
                continue
            for each in (_TABLE, _OUTPUT) if self.tied and not untied else (kind,):
                setattr(self, each, value)
        try:
            yield
        finally:
            self.table, self.output = tables
            for name, parameter in before.items():
                self._set(name, parameter)

    def _set(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Put a parameter in place, and return what was there."""
        place, _, leaf = name.rpartition(".")
        module = self.network.get_submodule(place)
        old: nn.Parameter = getattr(module, leaf)
        setattr(module, leaf, parameter)
        return old

    def look_up(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Widen the rows of the tokens at hand alone, before the table is read."""
        seen, places = torch.unique(args[0], return_inverse=True)
        module.weight = nn.Parameter(self.table[seen].to(torch.float32), requires_grad=False)
        return (places, *args[1:])

    def multiply(self, bias: Tensor | None, values: Tensor) -> Tensor:
        """Return the output layer's product, whose gradient for the values is known."""
        assert self.output is not None
        whole: Tensor = _Product.apply(values, self.output)  # type: ignore[no-untyped-call]  # by PyTorch
        return whole if bias is None else whole.add_(bias.to(torch.float32))


def wide(parameter: Tensor) -> nn.Parameter:
    """Return a parameter in float32 that is not trained."""
    return nn.Parameter(parameter.detach().to(torch.float32), requires_grad=False)


def widen(network: Any, blocks: str) -> Around:
    """Make the parts outside the blocks compute in float32, and return them.

    Args:
        network: a class of ``transformers`` with mapped weights.
        blocks: where the list of blocks is in it.
    """
    table, output = network.get_input_embeddings(), network.get_output_embeddings()
    names: dict[str, str] = {}
    for path, module in network.named_modules():
        if module is table or module is output:
            names[f"{path}.weight"] = _TABLE if module is table else _OUTPUT
        if path.startswith(f"{blocks}.") or module in (table, output):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, wide(parameter))
    tied = output is not None and output.weight is table.weight
    product = None if output is None else output.weight.detach()
    around = Around(network, table.weight.detach(), product, names, tied)
    if output is not None:
        output.forward = partial(around.multiply, output.bias)
    table.padding_idx = None  # a place in the whole table, and for gradients only
    table.register_forward_pre_hook(around.look_up)
    return around


class _Product(torch.autograd.Function):
    """A product with a weight of which a part is widened at a time, backwards too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        """Return ``values @ weight.T``, float32 ``[..., rows]``."""
        ctx.weight = weight
        whole = values.new_empty((*values.shape[:-1], len(weight)))
        for part in _parts(weight):
            whole[..., part] = functional.linear(values, weight[part].to(torch.float32))
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient for the values; the weight has none."""
        (gradient,), weight = gradients, ctx.weight
        parts = (gradient[..., part] @ weight[part].to(torch.float32) for part in _parts(weight))
        whole = next(parts)
        for part in parts:
            whole += part
        return whole, None


def _parts(weight: Tensor) -> list[slice]:
    return [slice(start, start + _ROWS) for start in range(0, len(weight), _ROWS)]
