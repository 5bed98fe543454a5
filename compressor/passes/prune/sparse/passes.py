"""``prune-nm``, ``prune-wanda`` and ``prune-sparsegpt``: one pruner behind three names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from compressor.errors import SpecError
from compressor.graph.sparse_kernels import sparse_notes
from compressor.passes.prune.batch_statistics import check_normalized, re_estimated
from compressor.passes.prune.sparse.layers import choose_layers
from compressor.passes.prune.sparse.patterns import Pattern, n_of_m
from compressor.passes.prune.sparse.pruning import Criterion, Pruner, requests_for
from compressor.passes.prune.sparse.reordering import plan_orders
from compressor.run.weight_pass import Changes, Choice, Treatment, WeightPass, WeightRows
from compressor.types.carrier import Capability, Carrier
from compressor.types.layers import Layer
from compressor.types.passes import LayerRule, Outcome, PassContext
from compressor.types.statistics import Block

DEFAULT_SPARSITY = 0.5
UNOBSERVED = "by magnitude: its input is not a value that calibration sees"


class NmRule(LayerRule):
    """A per-layer rule of ``prune-nm``."""

    n: int | None = Field(default=None, ge=1, description="overrides the pass's n")
    m: int | None = Field(default=None, ge=2, description="overrides the pass's m")


class SparseRule(LayerRule):
    """A per-layer rule of a pass that prunes single weights or N of M."""

    sparsity: float | None = Field(
        default=None, gt=0, lt=1, description="overrides the pass's value"
    )
    n: int | None = Field(default=None, ge=1, description="overrides the pass's value")
    m: int | None = Field(default=None, ge=2, description="overrides the pass's value")


def nm_pattern(n: int, m: int, place: str = "") -> Pattern:
    """Return the pattern that keeps ``n`` of ``m`` weights; ``place`` names the rule in messages.

    Raises:
        SpecError: all or none would stay.
    """
    if n >= m:
        raise SpecError(
            f"{place}n: {n}, m: {m}",
            f"keeps all of every {m} weights" if n == m else f"cannot keep {n} of {m} weights",
            "give an n below m, such as n: 2, m: 4",
        )
    return n_of_m(n, m)


def sparse_pattern(
    sparsity: float | None, n: int | None, m: int | None, place: str = ""
) -> Pattern | None:
    """Return the pattern that options give, if any; ``place`` names the rule in messages.

    Raises:
        SpecError: they contradict each other, or one of ``n`` and ``m`` is missing.
    """
    if n is None and m is None:
        return None if sparsity is None else Pattern(sparsity)
    if n is None or m is None:
        given, missing = ("m", "n") if n is None else ("n", "m")
        raise SpecError(
            f"{place}{given}: {m if n is None else n}",
            f"is given without {missing}",
            "give both, such as n: 2, m: 4, or give sparsity",
        )
    if sparsity is not None:
        raise SpecError(
            f"{place}sparsity: {sparsity:g}",
            f"is given together with n: {n}, m: {m}, which is a sparsity of {1 - n / m:g}",
            "give one of them",
        )
    return nm_pattern(n, m, place)


def rule_place(rule: LayerRule) -> str:
    """Name a rule in front of one of its options, for messages."""
    return f"layer rule {rule.match!r}: "


class PatternPruning(WeightPass):
    """Prune each layer to a pattern: a share of single weights, or N of every M."""

    widens: ClassVar[bool] = False  # a mask needs no wider floats

    permute: bool = Field(
        default=False,
        description="first reorder channels, so that groups keep more magnitude; the network "
        "computes the same. Needs a graph, and n and m",
    )

    @property
    @abstractmethod
    def _criterion(self) -> Criterion:
        """How weights are chosen."""

    @property
    def _solves(self) -> bool:
        """Whether weights that stay are solved once they are chosen."""
        return False

    @abstractmethod
    def _patterns(self, carrier: Carrier) -> dict[str, Treatment]:
        """Return the pattern of each layer, or why it is kept."""

    @property
    def required(self) -> frozenset[Capability]:
        """What a carrier must offer for the criterion, and to reorder channels."""
        if self.by_block:
            return self.needs | {Capability.RUN, Capability.GRAPH}
        return self.needs | ({Capability.GRAPH} if self.permute else set())

    @property
    def by_block(self) -> bool:
        """Whether the criterion needs to see what flows into each block once others are pruned."""
        return self._criterion != "magnitude" or self._solves

    @property
    def in_blocks(self) -> bool:
        """Whether nothing but each block's inputs has to be seen."""
        return self.by_block and not self.permute and not self.replays

    def choose(self, carrier: Carrier, context: PassContext) -> Choice:
        """Return each layer's pattern, and what the criterion has to know of its input.

        Raises:
            SpecError: options or a rule do not fit the model, or the criterion sees no input.
        """
        treatments = self._patterns(carrier)
        patterns = {name: t.setting for name, t in treatments.items() if not t.kept}
        requests = {}
        if patterns:
            requests = requests_for(carrier, patterns, self._criterion, solves=self._solves)
        orders = plan_orders(carrier, patterns) if self.permute else None
        stay = {} if orders is None else orders.reasons
        pruner = Pruner(self._criterion, self._solves, orders)
        for name in patterns:
            unseen = UNOBSERVED if self.by_block and name not in requests else ""
            remark = "; ".join(filter(None, (unseen, stay.get(name, ""))))
            treatments[name] = replace(
                treatments[name],
                remark=remark,
                request=requests.get(name),
                setting=(patterns[name], pruner),
            )
        return Choice(treatments, self._notes(patterns, context), pruner)

    def change(
        self, rows: WeightRows, treatment: Treatment, statistics: Mapping[str, Any]
    ) -> Tensor:
        """Return rows with zeros in them, chosen by magnitude or by what the layer sees."""
        pattern, pruner = treatment.setting
        pruned: Tensor = pruner.pruned(rows, pattern, treatment.request, statistics)
        return pruned

    def change_layers(
        self, carrier: Carrier, choice: Choice, layers: Sequence[Layer], block: Block
    ) -> Changes:
        """Prune a block's layers, their groups counted in the new order of channels."""
        choice.work.find_orders(carrier)
        changes = super().change_layers(carrier, choice, layers, block)
        choice.work.forget()
        return changes

    def conclude(self, carrier: Carrier, choice: Choice, changes: Changes) -> Outcome:
        """Move channels to their new places, and count the zeros."""
        layers = choice.layers(carrier)
        zeros = 0
        for layer in layers:
            pruned = changes.weights[layer.weight]
            if isinstance(pruned, Tensor):
                zeros += pruned.numel() - int(torch.count_nonzero(pruned))
            else:  # it is streamed, and not known yet
                pattern, _ = choice.treatments[layer.name].setting
                zeros += round(layer.parameters * pattern.sparsity)
        total = sum(layer.parameters for layer in layers)
        counted = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
        share = 100 * zeros / max(total, 1)
        notes = [f"{zeros:,} of {total:,} weights of {counted} are zero ({share:.1f} %)"]
        reordered = choice.work.reordered
        if reordered is not None:
            notes.append(reordered.note())
            stored = carrier.tensors()
            for name in reordered.axes:
                tensor = changes.weights.get(name)
                tensor = tensor if isinstance(tensor, Tensor) else stored[name].read()
                changes.weights[name] = reordered.applied(name, tensor)
        changes.notes += tuple(notes)
        return super().conclude(carrier, choice, changes)

    def _notes(self, patterns: Mapping[str, Pattern], context: PassContext) -> tuple[str, ...]:
        found = {str(p) if p.m else "" for p in patterns.values()}
        return sparse_notes(context.targets, found)


class PruneNm(PatternPruning):
    """Keep at most N of every M weights that follow each other along the input channels.

    GPUs multiply with 2:4 weights at up to twice the speed. Groups are counted as TensorRT's
    sparse kernels want it: in a linear layer along its input features; in a convolution along its
    input channels, at each output channel and position of the kernel. Layers whose input channels
    do not divide into groups are kept, and so are tables and a language model's output layer.
    TensorRT has sparse kernels for 2:4 alone, and uses them where they are faster: in float16 or
    int8, with hundreds of channels.

    `magnitude` keeps the largest weights and needs nothing else. `wanda` counts each weight times
    the norm of its input; `sparsegpt` also changes the weights that stay, to make up for those
    that go. Both need calibration data and a model that runs, and work through it block by block.
    So does `reconstruct`, which solves the weights that stay once they are chosen, whatever the
    criterion.

    With `permute` channels change places first, in everything that writes, normalizes and reads
    them, so that the largest weights are spread over the groups. The plan says which layers'
    channels must stay where they are.
    """

    name: ClassVar[str] = "prune-nm"
    version: ClassVar[int] = 2
    source: ClassVar[str] = (
        "Mishra et al. 2021 (arXiv:2104.08378); TensorRT Developer Guide, Structured Sparsity; "
        "wanda: Sun et al. 2023 (arXiv:2306.11695); sparsegpt: Frantar & Alistarh 2023 "
        "(arXiv:2301.00774); reconstruct: Meng et al. 2024 (arXiv:2406.07831); permute: Pool & Yu "
        "2021 (NeurIPS)"
    )

    n: int = Field(default=2, ge=1, description="how many of every m weights stay")
    m: int = Field(default=4, ge=2, description="weights in a group")
    criterion: Criterion = Field(default="magnitude", description="which weights of a group stay")
    reconstruct: bool = Field(
        default=False,
        description="solve the weights that stay, each row by least squares, so that the layer's "
        "output changes least on the calibration data",
    )
    re_estimate: bool = Field(
        default=False,
        description="re-estimate batch-norm statistics on the calibration data afterwards",
    )
    layers: tuple[NmRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    @property
    def _criterion(self) -> Criterion:
        return self.criterion

    @property
    def _solves(self) -> bool:
        return self.reconstruct

    @property
    def required(self) -> frozenset[Capability]:
        """What estimates statistics anew needs a model that runs."""
        runs = {Capability.RUN, Capability.GRAPH} if self.re_estimate else set()
        return super().required | runs

    @property
    def replays(self) -> str:
        """What calibration data are run for."""
        return "to re-estimate batch-norm statistics" if self.re_estimate else ""

    def choose(self, carrier: Carrier, context: PassContext) -> Choice:
        """Return each layer's pattern, and what the criterion has to know of its input.

        Raises:
            SpecError: see above, or there are no statistics that could be estimated anew.
        """
        if self.re_estimate:
            check_normalized(carrier.graph())
        return super().choose(carrier, context)

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Return the pruned model, its batch-norm statistics estimated anew if that is wanted."""
        outcome = super().apply(carrier, context, statistics)
        if not self.re_estimate or context.samples is None:
            return outcome
        note = "batch-norm statistics were re-estimated on the calibration data"
        after = re_estimated(outcome.carrier, context.samples.batches())
        return replace(outcome, carrier=after, notes=(*outcome.notes, note))

    def _patterns(self, carrier: Carrier) -> dict[str, Treatment]:
        return choose_layers(carrier, nm_pattern(self.n, self.m), self.layers, self._of_rule)

    def _of_rule(self, rule: NmRule) -> Pattern | None:
        if rule.n is None and rule.m is None:
            return None
        return nm_pattern(rule.n or self.n, rule.m or self.m, rule_place(rule))


class SparsePruning(PatternPruning):
    """Prune a share of each layer's weights, or N of M, by what flows into the layer."""

    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.WEIGHTS, Capability.RUN, Capability.GRAPH}
    )

    sparsity: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of a layer's weights that becomes zero; 0.5 unless n and m are set",
    )
    n: int | None = Field(
        default=None, ge=1, description="in place of sparsity: how many of every m weights stay"
    )
    m: int | None = Field(
        default=None,
        ge=2,
        description="weights in a group, consecutive along the input channels",
    )
    layers: tuple[SparseRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    def _patterns(self, carrier: Carrier) -> dict[str, Treatment]:
        everywhere = sparse_pattern(self.sparsity, self.n, self.m) or Pattern(DEFAULT_SPARSITY)
        if self.permute and not everywhere.m:
            raise SpecError(
                "permute",
                "has no effect where single weights are pruned",
                "set n and m, or remove permute",
            )
        return choose_layers(
            carrier,
            everywhere,
            self.layers,
            lambda rule: sparse_pattern(rule.sparsity, rule.n, rule.m, rule_place(rule)),
        )


class PruneWanda(SparsePruning):
    """Prune the weights that are least in size times the norm of their input.

    Weights are compared within each output row, or with n and m within each group. Remaining
    weights are not changed. The pass needs calibration data and a model that runs. It works block
    by block, so that each layer sees the outputs of pruned layers before it. It holds one number
    per column of each layer's input, so it fits where `prune-sparsegpt` needs too much memory or
    time. Tables and a language model's output layer are kept; a layer whose input calibration does
    not see is pruned by magnitude, and the plan says so.
    """

    name: ClassVar[str] = "prune-wanda"
    source: ClassVar[str] = "Sun et al. 2023 (arXiv:2306.11695)"

    @property
    def _criterion(self) -> Criterion:
        return "wanda"


class PruneSparsegpt(SparsePruning):
    """Prune the weights that change a layer's output least, and let the others make up for them.

    What a weight costs, and how the others change, follows from the second moment of the layer's
    inputs. Without n and m the cheapest of 128 columns at a time go, so that rows may keep
    different numbers of weights. The pass needs calibration data and a model that runs. It works
    block by block, so that each layer sees the outputs of pruned layers before it. Tables and a
    language model's output layer are kept; a layer whose input calibration does not see is pruned
    by magnitude, and the plan says so.
    """

    name: ClassVar[str] = "prune-sparsegpt"
    version: ClassVar[int] = 2
    source: ClassVar[str] = "Frantar & Alistarh 2023 (arXiv:2301.00774)"

    @property
    def _criterion(self) -> Criterion:
        return "sparsegpt"
