"""The work of ``low-rank`` on one model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from compressor.errors import DataError, ModelError, SpecError
from compressor.graph.layers import moment_request
from compressor.models.executor.dtypes import TORCH_DTYPES
from compressor.models.sizes import model_macs, model_parameters
from compressor.passes.factor.budget import Budget
from compressor.passes.factor.choice import Candidate, Choice
from compressor.passes.factor.decomposition import Decomposition, decompose, rank_for, shares
from compressor.passes.factor.factored_graph import Factors, factor_names, factored
from compressor.progress import Progress
from compressor.types.carrier import Capability, Carrier
from compressor.types.matrices import sqnr_db
from compressor.types.passes import LayerOutcome, Outcome
from compressor.types.statistics import Blocks, Moments, Request

_ROWS_PER_COLUMN = 16  # input vectors for each of their elements, from which moments are found


def seen_inputs(choice: Choice) -> dict[str, Request]:
    """Return the request for what flows into each layer, by its name, where there is one."""
    found = {
        c.layer.name: moment_request(c.layer, c.node, _ROWS_PER_COLUMN) for c in choice.candidates
    }
    return {name: request for name, request in found.items() if request is not None}


def planned(carrier: Carrier, choice: Choice, ranks: Mapping[str, int]) -> Carrier:
    """Return a model whose factors have the right sizes; no weight is read."""
    factors = []
    for candidate in choice.candidates:
        layer, rank = candidate.layer, ranks[candidate.layer.name]
        tensor = carrier.graph().graph.initializers[layer.weight].const_value
        assert tensor is not None
        nothing = torch.zeros((), dtype=TORCH_DTYPES[tensor.dtype])
        down, up = nothing.expand(rank, layer.columns), nothing.expand(layer.rows, rank)
        factors.append(Factors(layer, down, up))
    graph, names = factored(carrier.graph(), factors)
    return carrier.with_trainable_graph(graph, names, planned=True)


class Factoring:
    """Decompositions of a model's layers, and the model that ranks make of them.

    Args:
        carrier: the model.
        choice: which layers can become two.
        energy: the share of the energy that layers without a rank keep; ``None`` where their
            ranks are chosen together, by :meth:`choose_ranks`.
    """

    def __init__(self, carrier: Carrier, choice: Choice, energy: float | None):
        self._carrier = carrier
        self._choice = choice
        self._energy = energy
        self._found: dict[str, Decomposition] = {}
        self._ranks: dict[str, int | None] = {}
        self._notes: list[str] = []

    def by_weights(self, progress: Progress) -> None:
        """Decompose all layers by their weights alone.

        Raises:
            ModelError: a weight is not finite.
        """
        candidates = self._choice.candidates
        with progress.stage("low-rank: decompose", len(candidates)) as advance:
            for done, candidate in enumerate(candidates):
                self._decompose(candidate, None)
                advance(done + 1)

    def by_inputs(self, blocks: Blocks) -> None:
        """Decompose layers by what they do to the inputs that blocks show, the others as they are.

        Raises:
            ModelError: a weight is not finite.
            DataError: calibration found nothing about a layer's input.
        """
        requests = seen_inputs(self._choice)
        waiting = {c.layer.name: c for c in self._choice.candidates}
        for block in blocks:
            for candidate in [c for c in waiting.values() if c.layer.weight in block.weights]:
                request = requests.get(candidate.layer.name)
                seen = None if request is None else _moment(candidate, request, block.statistics)
                self._decompose(candidate, seen)
                del waiting[candidate.layer.name]
        assert not waiting, "every weight is read in some block"

    def choose_ranks(self, budget: Budget) -> None:
        """Choose the ranks that no option gives."""
        kept: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = {
            c.layer.name: shares(self._found[c.layer.name].energies)[: c.most].numpy()
            for c in self._choice.candidates
        }
        self._ranks.update(budget.ranks(kept))

    def outcome(self) -> Outcome:
        """Put the factors in place of the layers.

        Raises:
            SpecError: all layers stay whole.
        """
        factors = []
        for candidate in self._choice.candidates:
            rank = self._ranks[candidate.layer.name]
            if rank is not None:
                up, down = self._found[candidate.layer.name].factors(rank)
                factors.append(Factors(candidate.layer, down.contiguous(), up.contiguous()))
        if not factors:
            raise SpecError(
                "pass 'low-rank'",
                f"touches no layer: {self._notes[0] if self._notes else 'the target is met'}",
                "lower energy, or remove the pass",
            )
        graph, names = factored(self._carrier.graph(), factors)
        after = self._carrier.with_trainable_graph(graph, names)
        taken = self._carrier.graph().graph.initializers
        rows = [row for one in factors for row in self._described(one, taken)]
        self._note_whole()
        self._note_sizes(after)
        return Outcome(after, tuple(rows), tuple(self._notes))

    def _decompose(self, candidate: Candidate, moment: torch.Tensor | None) -> None:
        layer = candidate.layer
        matrix = layer.canonical(self._carrier.weight(layer))
        if not bool(torch.isfinite(matrix).all()):
            raise ModelError(
                f"layer {layer.name!r}",
                "its weight holds values that are NaN or infinite",
                "the training diverged or the file is damaged; use an earlier checkpoint",
            )
        most = candidate.rank or candidate.most
        found = decompose(matrix, most, moment)
        self._found[layer.name] = found
        rank = candidate.rank
        if rank is None and self._energy is not None:
            needed = rank_for(found.energies, self._energy)
            rank = needed if needed <= candidate.most else None
            if rank is None:
                self._notes.append(
                    f"layer {layer.name!r} stays whole: energy {self._energy:g} takes rank "
                    f"{needed} of {candidate.full}, and up to {candidate.most} two are smaller"
                )
        self._ranks[layer.name] = rank

    def _described(self, factors: Factors, taken: Mapping[str, Any]) -> tuple[LayerOutcome, ...]:
        layer, found = factors.layer, self._found[factors.layer.name]
        matrix = layer.canonical(self._carrier.weight(layer)).to(torch.float32)
        product = factors.up.to(torch.float32) @ factors.down.to(torch.float32)
        details = {
            "rank": factors.rank,
            "full_rank": len(found.energies),
            "energy": found.kept(factors.rank),
        }
        down, up = factor_names(layer.name, taken)
        scheme = f"{layer.dtype}, rank {factors.rank} of {len(found.energies)}"
        return (
            LayerOutcome(down, scheme, details={"rank": factors.rank}),
            LayerOutcome(up, scheme, sqnr_db(matrix, product), details),
        )

    def _note_whole(self) -> None:
        """Say which layers no option leaves whole, but the choice of ranks."""
        if self._energy is None:
            whole = [name for name, rank in self._ranks.items() if rank is None]
            if whole:
                self._notes.append(f"the target leaves whole: {', '.join(whole)}")

    def _note_sizes(self, after: Carrier) -> None:
        for name, count in (("MACs", model_macs), ("parameters", model_parameters)):
            before, now = count(self._carrier), count(after)
            if before and now is not None:
                self._notes.append(f"{name} {before:,} -> {now:,} ({100 * now / before:.1f} %)")
        if Capability.TRAIN in self._carrier.offers - after.offers:
            self._notes.append("the result cannot be trained: PyTorch has no form of its graph")


def _moment(candidate: Candidate, request: Request, statistics: Mapping[str, Any]) -> torch.Tensor:
    found = statistics.get(request.key)
    if not isinstance(found, Moments):
        raise DataError(
            f"layer {candidate.layer.name!r}",
            f"calibration found nothing about its input {request.tensor!r}",
            "skip the layer, or leave weighted out",
        )
    return found.second[0]
