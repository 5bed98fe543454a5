"""Which channels to remove, by the error that remains once the other weights are solved.

A unit, such as a channel, is one or several columns of the weights that read it. Removing columns
``S`` of a weight ``W`` whose inputs have the second moment ``H``, and solving the others, costs
``tr(W_S ((H⁻¹)_SS)⁻¹ W_Sᵀ)``: B. Hassibi and D. Stork, Second order derivatives for network
pruning: Optimal Brain Surgeon, 1992, here for groups of columns. X. Meng et al., OSSCAR, 2024
(arXiv:2403.12983), pose the problem for channels. Units go one after the other, the cheapest first,
and weights and inverse are updated in between by block elimination, as E. Frantar and D. Alistarh
do for single weights (arXiv:2301.00774, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_DAMPING = 1e-3  # of the mean input power, added to it
_ROUNDS = 128  # in which units go; of more units several at a time
_CANDIDATES = 4  # units that are looked at for each that goes in a round
_GONE = 0.2  # share of a state's units; once more have gone, it is made smaller


@dataclass(frozen=True, eq=False)
class Reader:
    """Weights that read units, all of them the same.

    Attributes:
        weights: ``[rows, columns]``; each row as large as an error in it counts.
        moment: second moment of their inputs, ``[columns, columns]``.
        owners: the unit of each column, counted from 0; -1 for columns that stay, ``[columns]``.
    """

    weights: tuple[Tensor, ...]
    moment: Tensor
    owners: Tensor


def eliminate(readers: Sequence[Reader], units: int) -> tuple[list[int], list[float]]:
    """Return units in the order in which they go, and what is lost by the time each has gone.

    The loss is the squared error of a weight's output as a share of its squares, summed over
    weights. It never falls.
    """
    left = torch.arange(units)
    # Columns that stay have had their say once the moment is inverted.
    states = [_State.of(reader, units).part(left) for reader in readers]
    order: list[int] = []
    losses: list[float] = []
    gone: list[int] = []  # by their places in ``left``
    while len(order) < units:
        if len(gone) > _GONE * len(left):
            stays = torch.ones(len(left), dtype=torch.bool)
            stays[gone] = False
            states = [state.part(torch.nonzero(stays)[:, 0]) for state in states]
            left, gone = left[stays], []
        going = _cheapest(states, gone, min(-(-units // _ROUNDS), units - len(order)))
        before = losses[-1] if losses else 0.0
        gained = sum(state.remove(going) for state in states)
        gone += going
        order += left[going].tolist()
        losses += [before + gained * (n + 1) / len(going) for n in range(len(going))]
    return order, losses


def _cheapest(states: Sequence[_State], gone: Sequence[int], count: int) -> list[int]:
    """Return the units that go next; of several, each as if those before it had gone."""
    costs = torch.stack([state.costs() for state in states]).sum(0)
    costs[list(gone)] = torch.inf
    if count == 1:
        return [int(costs.argmin())]
    candidates = torch.argsort(costs, stable=True)[: _CANDIDATES * count]
    candidates = candidates[costs[candidates] < torch.inf]
    parts = [state.part(candidates) for state in states]
    chosen: list[int] = []
    while len(chosen) < count:
        costs = torch.stack([part.costs() for part in parts]).sum(0)
        costs[chosen] = torch.inf
        chosen.append(int(costs.argmin()))
        for part in parts:
            part.remove(chosen[-1:])
    return [int(candidates[place]) for place in chosen]


@dataclass(eq=False)
class _State:
    """Weights that read the same and the inverse of its moment, as units go.

    Attributes:
        weight: their rows, transposed, so that a column's lie together, ``[columns, rows]``.
        columns: those of each unit, ``[units, width]``. A unit with fewer than others is padded
            with spare columns, which weigh nothing.
    """

    weight: Tensor
    inverse: Tensor
    columns: Tensor

    @classmethod
    def of(cls, reader: Reader, units: int) -> _State:
        """Return the state before any unit has gone."""
        moment = reader.moment.to(torch.float64)
        weight = torch.cat([_of_power_one(w.to(torch.float64), moment) for w in reader.weights])
        diagonal = moment.diagonal()
        mean = float(diagonal.sum()) / max(int((diagonal > 0).sum()), 1)
        damped = moment + _DAMPING * (mean or 1.0) * torch.eye(len(moment), dtype=torch.float64)
        places = [torch.nonzero(reader.owners == unit)[:, 0] for unit in range(units)]
        width, count = max(map(len, places)), len(moment)
        spare = torch.arange(count, count + width)
        inverse = torch.eye(count + width, dtype=torch.float64)
        inverse[:count, :count] = _inverse(damped)
        return cls(
            functional.pad(weight.T, (0, 0, 0, width)),
            (inverse + inverse.T) / 2,
            torch.stack([torch.cat([p, spare[len(p) :]]) for p in places]),
        )

    def part(self, units: Tensor) -> _State:
        """Return the part of the state that decides among some units."""
        used, places = torch.unique(self.columns[units], return_inverse=True)
        return _State(self.weight[used], self.inverse[used[:, None], used], places)

    def costs(self) -> Tensor:
        """Return what each unit would cost, ``[units]``."""
        blocks = self.inverse[self.columns[:, :, None], self.columns[:, None, :]]
        parts = self.weight[self.columns]  # [units, width, rows]
        solved = torch.linalg.solve(blocks, parts @ parts.mT)
        costs: Tensor = solved.diagonal(dim1=1, dim2=2).sum(1)
        return costs.clamp(min=0.0)

    def remove(self, units: Sequence[int]) -> float:
        """Remove units, solve what remains, and return what that costs."""
        columns = torch.unique(self.columns[list(units)])
        rows, parts = self.inverse[columns], self.weight[columns]
        solved = torch.linalg.solve(rows[:, columns], torch.cat([rows, parts], 1))
        over, size = solved[:, : len(self.inverse)], len(self.inverse)
        self.weight.addmm_(over.T, parts, alpha=-1.0)
        self.inverse.addmm_(rows.T, over, alpha=-1.0)
        # Gone for good: they weigh nothing, and nothing depends on them.
        self.weight[columns] = 0.0
        self.inverse[columns] = 0.0
        self.inverse[:, columns] = 0.0
        self.inverse[columns, columns] = 1.0
        return max(float((parts * solved[:, size:]).sum()), 0.0)


def _of_power_one(weight: Tensor, moment: Tensor) -> Tensor:
    """Return a weight whose outputs' squares add up to 1; zeros if they are all zero."""
    power = float(((weight @ moment) * weight).sum())
    return weight * (power**-0.5 if power > 0 else 0.0)


def _inverse(moment: Tensor) -> Tensor:
    """Return the inverse of a symmetric matrix, which rounding may have made indefinite."""
    factor, failed = torch.linalg.cholesky_ex(moment)
    return torch.linalg.inv(moment) if failed else torch.cholesky_inverse(factor)
