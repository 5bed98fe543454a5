"""``archive``: sparsity, bits and values of all weights searched for the smallest file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import onnx_ir as ir
from pydantic import Field, model_validator
from torch import Tensor

from compressor.errors import ModelError, SpecError
from compressor.graph.codes import obstacle
from compressor.models.layer_uses import inner_layers, kept_tables, recurrences
from compressor.models.torch.smaller_module import check_executable
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.maths.kmeans import clustered
from compressor.passes.train.archive.coded_network import codebook_scheme
from compressor.passes.train.archive.live_norms import move_biases
from compressor.passes.train.archive.rounds import best
from compressor.passes.train.archive.search import Search, summary
from compressor.passes.train.distill.distilling import (
    Distillation,
    opened_teacher,
)
from compressor.passes.train.finetune import check_smoothing, loss_name
from compressor.passes.train.recipe import Course, Recipe
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers
from compressor.types.layers import Layer, QuantizedTensor, WeightCodes, sqnr_db
from compressor.types.passes import LayerOutcome, Outcome, PassContext, Survey
from compressor.types.training import Training


class Archive(Recipe):
    """Search for the smallest archive that keeps the metric, by pruning, codebooks and training.

    The pass works in rounds. Each removes bytes where they cost least: every weight may be zero or
    one of a few values of its layer. Its error is priced by its effect on the outputs, and its code
    by the bytes that the archive's coder takes. One price for all layers decides how many weights
    of each are zero and how many values the others have; biases and other vectors are coded in the
    same way. Meanwhile the network is trained towards the outputs of the original, first with these
    zeros and then with these values. Rounds halve the bytes until one loses more than
    `max-metric-drop` on `data.search`; later ones remove less and are longer. The result is the
    smallest round that should show no significant loss on other samples. Batch norms normalize by
    batches during training, and are left with a scale and a shift. Export the result with the
    format `archive`.
    """

    name: ClassVar[str] = "archive"
    version: ClassVar[int] = 9
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.TRAIN, Capability.GRAPH, Capability.RUN}
    )
    searches: ClassVar[bool] = True
    source: ClassVar[str] = (
        "Han et al. 2016 (arXiv:1510.00149); entropy-constrained codebooks: Chou et al. 1989 and "
        "Choi et al. 2017 (arXiv:1612.01543); zeros that may come back: Guo et al. 2016 "
        "(arXiv:1608.04493); distillation: Hinton et al. 2015 (arXiv:1503.02531)"
    )

    max_metric_drop: float = Field(
        default=0.0,
        ge=0,
        description="how much the metric may lose on data.search, in its unit (points for "
        "shares), against the network before the pass; 0 allows no loss",
    )
    rounds: int = Field(default=14, ge=1, description="rounds, at most")
    epochs: float = Field(default=4.0, gt=0, description="epochs of the first round")
    bits: int = Field(
        default=5,
        ge=1,
        le=8,
        description="width of the widest code: 2^bits - 1 values at the start",
    )
    float_bits: int = Field(
        default=5,
        ge=3,
        le=24,
        description="significant bits of the values of weights, biases and other vectors",
    )
    learning_rate: float = Field(
        default=1e-3,
        gt=0,
        description="largest learning rate; it is halved until a first step changes the outputs "
        "by no more than a tenth of their variance",
    )
    distill: Distillation = Field(
        default_factory=lambda: Distillation(alpha=0.3, temperature=2.0),
        description="how the network learns from its original, or from another teacher",
    )

    @model_validator(mode="after")
    def _in_rounds(self) -> Archive:
        for option in ("prune", "validation", "patience"):
            if getattr(self, option):
                raise ValueError(f"{option} is not for this pass: its rounds prune and judge")
        return self

    @property
    def estimated(self) -> bool:
        """Whether a plan can only guess the size: it is what the search finds."""
        return True

    @property
    def other_models(self) -> Mapping[str, Mapping[str, Any]]:
        """The teacher, if it is not the network that the pass is given."""
        return {f"distill.{option}": keys for option, keys in self.distill.named_models.items()}

    def check_models(self, carrier: Carrier, others: Mapping[str, Carrier]) -> None:
        """Compare a teacher's outputs with the model's."""
        for other in others.values():
            self.distill.check_teacher(carrier, other)

    @property
    def labelled(self) -> bool:
        """Whether the training data must have a target: unless all is learned from a teacher."""
        return self.distill.alpha > 0

    @property
    def scheduled(self) -> bool:
        """Whether more than the learning rate changes with the steps: codes do."""
        return True

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Choose the layers; check the loss, the metric and the operators.

        Raises:
            SpecError: a rule matches no layer, nothing is left, or there is no metric.
        """
        if context.metric is None:
            raise SpecError(
                f"pass {self.name!r}",
                "judges rounds by the metric, but there is none",
                "add metric",
            )
        name = loss_name(self.loss, context.metric) if self.labelled else None
        check_smoothing(self, name)
        graph = _fused(carrier, evaluate=False)
        check_executable(graph)
        inner = carrier.with_graph(graph)
        reasons = self._reasons(inner)
        action = f"codebook of at most {1 << self.bits} values, zeros, trained"
        rows = plan_layers(self.name, dict.fromkeys(reasons, action), reasons)
        unit = f"{self.max_metric_drop:g} below the network before the pass"
        notes = (
            f"at most {self.rounds} rounds, the first of {self._length}: each takes bytes away and "
            f"trains; one is kept if the metric on data.search is for sure at most {unit}",
            "the bytes are found by the search; the prediction is that of its start",
            *self.distill.planned_notes(carrier, carrier),
        )
        return Survey(rows, notes=notes)

    @property
    def _length(self) -> str:
        return f"{self.epochs:g} epochs" if self.steps is None else f"{self.steps} steps"

    def _reasons(self, inner: Carrier) -> dict[str, str]:
        """Return for each layer of the fused graph why it is not coded; empty if it is."""
        kept = {**inner_layers(inner), **kept_tables(inner), **recurrences(inner)}
        skipped = self.skip_reasons(inner)
        opset = inner.graph().opset_imports.get("", 0)
        return {
            x.name: skipped[x.name]
            or kept.get(x.name, "")
            or obstacle(x, codebook_scheme(self.bits), opset)
            or ""
            for x in inner.layers()
        }

    def _coded_layers(self, inner: Carrier) -> dict[str, Layer]:
        reasons = self._reasons(inner)
        return {x.weight: x for x in inner.layers() if not reasons[x.name]}

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Code the fused graph lazily, as the search starts; no weight is read."""
        inner = carrier.with_graph(_fused(carrier, evaluate=False))

        scheme = codebook_scheme(self.bits)

        def codes(matrix: Tensor) -> QuantizedTensor:
            return clustered(matrix.float(), scheme)

        layers = self._coded_layers(inner)
        return inner.with_codes({n: WeightCodes(x, scheme, codes) for n, x in layers.items()})

    def train_on(self, carrier: Carrier, context: PassContext, course: Course) -> Outcome:
        """Search, round by round.

        Raises:
            CompressorError: see :func:`compressor.passes.train.engine.train`; or no round keeps the
                limit.
        """
        inner = carrier.with_graph(_fused(carrier))
        layers = self._coded_layers(inner)
        teacher = self._teacher(carrier, course.training)
        search = Search(self, carrier, inner, layers, teacher, context, course)
        rounds = search.run()
        chosen = best(rounds, self.max_metric_drop)
        if chosen < 0:
            nearest = min(rounds, key=lambda one: one.drop)
            raise ModelError(
                f"pass {self.name!r}",
                f"found no archive that loses at most {self.max_metric_drop:g}: of "
                f"{len(rounds)} rounds, the one that loses least loses {nearest.drop:.3g} ± "
                f"{nearest.error:.2g}",
                "allow a larger max-metric-drop, more epochs, or more samples in data.search",
            )
        network = search.network(chosen)
        outcomes = []
        for name, codes in network.quantized().items():
            layer = layers[name]
            before = layer.canonical(inner.weight(layer)).float()
            zeros = float((codes.dequantize() == 0).float().mean())
            details = {"trained": True, "zeros": zeros, "values": int(codes.codes.max()) + 1}
            loss = sqnr_db(before, codes.dequantize())
            outcomes.append(LayerOutcome(layer.name, str(codes.scheme), loss, details))
        notes = (*self._slower(*search.rate), *summary(rounds, self.max_metric_drop, chosen))
        return Outcome(network.written(inner), tuple(outcomes), notes)

    def _slower(self, rate: float, taken: float) -> tuple[str, ...]:
        """Say that the learning rate is lower than the option, if it is."""
        if rate == self.learning_rate:
            return ()
        return (
            f"learning rate {rate:g}: a first step at {self.learning_rate:g} would take "
            f"{100 * taken:.0f} % of the variance of the outputs, and may take 10 %",
        )

    def _teacher(self, carrier: Carrier, training: Training) -> Carrier:
        """Return the teacher: the network that the pass is given, unless one is named."""
        named = self.distill.teacher is not None
        return opened_teacher(self.distill, training, "distill.teacher") if named else carrier


def _fused(carrier: Carrier, *, evaluate: bool = True) -> ir.Model:
    """Return a fused graph whose batch norms stay; without ``evaluate``, of the right structure."""
    fuse, lowered = Fuse(batch_norm=False), carrier.kind == "torch"
    draft = fuse.fused(carrier.graph(), lowered=lowered)
    if not evaluate:
        return draft.model
    graph = draft.computed()
    move_biases(graph)
    return graph
