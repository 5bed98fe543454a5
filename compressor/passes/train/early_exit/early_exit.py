"""``early-exit``: easy samples leave the network before its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Any, ClassVar, Literal

import onnx_ir as ir
import onnx_ir.passes.common as common
from pydantic import Field, model_validator
from torch import Tensor, nn

from compressor.errors import SpecError
from compressor.models.torch.lowering import NamedModule
from compressor.models.torch.smaller_module import trainable_graph
from compressor.passes.train.early_exit.batches import Batches
from compressor.passes.train.early_exit.cut import CutExit, cut, part_macs
from compressor.passes.train.early_exit.heads import (
    FrozenTrunk,
    HeadNames,
    SelfDistillation,
    WithHeads,
    folded,
    initial_parameters,
    with_confidences,
    with_heads,
)
from compressor.passes.train.early_exit.points import (
    Answer,
    Confidence,
    Exit,
    ExitPoint,
    find_answer,
    find_points,
)
from compressor.passes.train.early_exit.thresholds import (
    Thresholds,
    check_answers,
    choose_thresholds,
    collect,
    feature_statistics,
    macs_note,
    mean_latencies,
    nobody_leaves,
    share_notes,
)
from compressor.passes.train.engine import Trained, length, make_order, train
from compressor.passes.train.finetune import CROSS_ENTROPY, TaskLoss, loss_name
from compressor.passes.train.job import Job
from compressor.passes.train.preparing import (
    PREFIX,
    freeze,
    regulators,
    training_notes,
    training_record,
)
from compressor.passes.train.recipe import Recipe
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers, resolve_rules, skip_reason
from compressor.types.passes import LayerOutcome, Outcome, PassContext, Survey
from compressor.types.tensors import Array
from compressor.types.training import Training

_PROBED = 64  # samples whose answers are compared, and of which the time is taken


@dataclass(frozen=True)
class _Places:
    """A classifier's graph, and where samples may leave it."""

    graph: ir.Model
    batches: Batches
    answer: Answer
    points: tuple[ExitPoint, ...]

    def written(
        self,
        thresholds: Sequence[float],
        parameters: Sequence[Mapping[str, Array]],
        how: Confidence,
    ) -> ir.Model:
        """Return the graph that stops early; exits that let nobody leave are not in it."""
        known = zip(self.points, thresholds, parameters, strict=True)
        used = [CutExit(point, t, own) for point, t, own in known if t < inf]
        return cut(self.graph, used, how, self.batches, self.answer)


class EarlyExit(Recipe):
    """Let samples that are easy leave the network early.

    A head after each named layer learns from the labels and from the network's own answers. Each
    sample takes the answer of the first head that is sure enough: thresholds are chosen on the
    calibration data so that the wanted share of the answers is the full network's. What comes
    after an exit lies in a branch of an ONNX `If`, which is executed for the samples that are left,
    and not at all where none is; the model's inputs and outputs stay what they were. Exits that
    would let nobody leave are left out.
    """

    name: ClassVar[str] = "early-exit"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.GRAPH, Capability.RUN})
    source: ClassVar[str] = (
        "exits by confidence: Teerapittayanon et al. 2016 (arXiv:1709.01686); self-distillation: "
        "Zhang et al. 2019 (arXiv:1905.08094)"
    )

    exits: tuple[Exit, ...] = Field(min_length=1, description="where, in the order of execution")
    agreement: Annotated[float, Field(gt=0, le=100)] = Field(
        default=99.0,
        description="percent of the calibration samples that are to get the full network's answer",
    )
    confidence: Confidence = Field(
        default="probability",
        description="how sure a head is: its largest probability, by how much that exceeds the "
        "second (margin), or how little entropy its probabilities have",
    )
    train: Literal["heads", "all"] = Field(
        default="heads",
        description="heads leaves the network, and so its own answers, as they are; all trains it "
        "with them",
    )
    alpha: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="weight of the labels in what heads learn from; the network's answers have the "
        "rest",
    )
    temperature: float = Field(
        default=3.0, gt=0, description="softens the network's answers that heads learn from"
    )

    @model_validator(mode="after")
    def _only_heads(self) -> EarlyExit:
        if self.train == "heads" and (self.prune is not None or self.layers):
            given = "prune" if self.prune is not None else "layers"
            raise ValueError(f"{given} needs train: all; with train: heads no layer is changed")
        return self

    @property
    def required(self) -> frozenset[Capability]:
        """The network itself can only be trained where it is a module."""
        return self.needs | ({Capability.TRAIN} if self.train == "all" else set())

    @property
    def replays(self) -> str:
        """What calibration data are run for."""
        return "to choose how sure its exits have to be"

    @property
    def labelled(self) -> bool:
        """Whether the training data must have a target: where a part of the loss is the task's."""
        return self.train == "all" or self.alpha > 0

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:  # noqa: ARG002
        """Find the places of the exits, and check that the graph can be cut there."""
        self._loss()
        places = self._places(carrier)
        places.written(*self._untrained(places), self.confidence)
        exits = {
            point.layer.name: f"exit {point.number} follows, head {point.features} x "
            f"{places.answer.classes}"
            for point in places.points
        }
        rules = resolve_rules(self.layers, [layer.name for layer in carrier.layers()])
        trained = self.train == "all"
        reasons, actions = {}, {}
        for name, rule in rules.items():
            skipped = skip_reason(rule) if trained else "only heads are trained"
            reasons[name] = "" if name in exits else skipped
            parts = ["train"] * (trained and not skip_reason(rule)) + [exits.get(name, "")]
            actions[name] = "; ".join(part for part in parts if part)
        rows = plan_layers(self.name, actions, reasons)
        return Survey(rows)

    def apply_training(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],  # noqa: ARG002
        training: Training,
    ) -> Outcome:
        """Train the heads, choose their thresholds, and cut the graph.

        Raises:
            CompressorError: see :func:`compressor.passes.train.engine.train`; or there are no
                calibration data, or no sample would leave early.
        """
        if training.samples.made_up:
            raise SpecError(
                f"pass {self.name!r}",
                "chooses thresholds, and there is no calibration data",
                "add data.calibration",
            )
        places = self._places(carrier)
        given = self._with_heads(carrier, places, context.seed, training)
        trained, carrier, given = self._trained(carrier, context, training, given)
        network = _without_heads(given.model)
        places = replace(places, graph=network, batches=Batches(network))
        cut = self._cut(carrier, places, given, training, training_notes(trained, None))
        return replace(cut, training=training_record(trained))

    def preview(
        self,
        carrier: Carrier,
        context: PassContext,  # noqa: ARG002
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Carrier:
        """Return the model as it is if every exit is used."""
        places = self._places(carrier)
        return carrier.with_graph(places.written(*self._untrained(places), self.confidence))

    def _places(self, carrier: Carrier) -> _Places:
        graph = carrier.graph()
        batches = Batches(graph)
        answer = find_answer(graph, batches)
        return _Places(graph, batches, answer, find_points(graph, self.exits, batches, answer))

    def _untrained(self, places: _Places) -> tuple[list[float], list[dict[str, Array]]]:
        count = len(places.points)
        own = [initial_parameters(point, places.answer.classes, 0) for point in places.points]
        return [1.0] * count, own

    def _loss(self) -> str:
        return loss_name(self.loss or CROSS_ENTROPY, None)

    def _with_heads(
        self, carrier: Carrier, places: _Places, seed: int, training: Training
    ) -> WithHeads:
        """Add heads whose features are standardized by what they are on the calibration data."""
        classes = places.answer.classes
        starts = [initial_parameters(point, classes, seed) for point in places.points]
        first = with_heads(places.graph, places.points, places.answer, starts)
        names = [head.features for head in first.heads]
        runner = carrier.with_graph(first.model).runner(names)
        found = feature_statistics(runner, training.samples, names)
        for start, (mean, scale) in zip(starts, found, strict=True):
            start.update(mean=mean, scale=scale)
        return with_heads(places.graph, places.points, places.answer, starts)

    def _trained(
        self, carrier: Carrier, context: PassContext, training: Training, given: WithHeads
    ) -> tuple[Trained, Carrier, WithHeads]:
        """Train; return the model with trained weights, and its graph with the heads."""
        names = [name for head in given.heads for name in head.parameters]
        inputs = tuple(i.name for i in carrier.inputs)
        outputs = tuple(v.name or "" for v in given.model.graph.outputs)
        order = make_order(self, training, carrier.inputs, context.seed)
        executing = carrier
        if self.train == "all":
            executing = carrier.with_trainable_graph(given.model, names)
            if Capability.TRAIN not in executing.offers:
                raise SpecError("train", "is all, and the graph cannot be trained", "set heads")
            module = executing.trainable()
            freeze(self, executing, module)
            watched = regulators(self, executing, module, length(self, order))
        else:
            module, watched = _heads_only(given, names, inputs, outputs), ()
        job = Job(
            name=self.name,
            module=module,
            objective=self._objective(given, training),
            inputs=inputs,
            outputs=outputs[:1],
            regulators=watched,
        )
        # No metric looks at the heads: the best state is that of the least loss.
        trained = train(job, self, replace(training, metric=None), order)
        tensors = {n.removeprefix(PREFIX): t for n, t in trained.tensors.items()}
        if self.train == "all":
            known = executing.tensors().keys()
            own = executing.with_weights({n: t for n, t in tensors.items() if n in known})
            return trained, own, replace(given, model=own.graph().clone())
        return trained, carrier, replace(given, model=_with_tensors(given.model, names, tensors))

    def _objective(self, given: WithHeads, training: Training) -> SelfDistillation:
        exits = [head.logits for head in given.heads]
        name = self._loss()
        labelled = {n: TaskLoss(name, (n,), training) for n in exits} if self.alpha > 0 else {}
        network = TaskLoss(name, (given.teacher,), training) if self.train == "all" else None
        return SelfDistillation(
            exits, given.teacher, self.alpha, self.temperature, labelled, network
        )

    def _cut(
        self,
        carrier: Carrier,
        places: _Places,
        given: WithHeads,
        training: Training,
        notes: Sequence[str],
    ) -> Outcome:
        """Choose thresholds and cut the graph; compare it with the model that it was."""
        flat, answers = with_confidences(given, self.confidence, places.answer)
        every = carrier.with_graph(flat)
        runner, heads = every.runner(), [head.logits for head in given.heads]
        sure, same = collect(runner, training.samples, heads, given.teacher)
        costs = part_macs(places.graph, places.points, places.answer)
        found = choose_thresholds(sure, same, self.agreement, costs)
        if not sum(found.left):
            raise nobody_leaves(self.agreement, sure, same, costs)
        parameters = [_parameters(given.model, head) for head in given.heads]
        after = carrier.with_graph(places.written(found.values, parameters, self.confidence))
        probe = training.samples.probe(_PROBED)
        check_answers(after.runner(), runner.run(probe), probe, answers, found.values)
        notes = [
            *notes,
            *share_notes(places.points, found, self.agreement),
            macs_note(found, costs),
        ]
        if training.ranks.rank == 0:
            whole = carrier.with_graph(places.graph).runner()
            (early, full), count = mean_latencies([after.runner(), whole], probe)
            notes.append(
                f"mean latency at batch 1 in ONNX Runtime, over {count} calibration samples: "
                f"{early:.3g} ms with exits, {full:.3g} ms without ({early / full:.2f} of it)"
            )
        return Outcome(after, self._layers(after, places.points, found), tuple(notes))

    def _layers(
        self, after: Carrier, points: Sequence[ExitPoint], found: Thresholds
    ) -> tuple[LayerOutcome, ...]:
        rows = {
            f"exit{point.number}": {"after": point.after, "threshold": value, "leave": share}
            for point, value, share in zip(points, found.values, found.shares, strict=False)
        }
        return tuple(
            LayerOutcome(layer.name, layer.dtype, details=rows.get(layer.name, {"trained": True}))
            for layer in after.layers()
            if layer.name in rows or self.train == "all"
        )


def _heads_only(
    given: WithHeads, names: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]
) -> NamedModule:
    return FrozenTrunk(trainable_graph(given.model, nn.Module(), names), inputs, outputs)


def _with_tensors(model: ir.Model, names: Sequence[str], tensors: Mapping[str, Tensor]) -> ir.Model:
    copy = model.clone()
    for name in names:
        copy.graph.initializers[name].const_value = ir.tensor(tensors[name].numpy(), name=name)
    return copy


def _without_heads(model: ir.Model) -> ir.Model:
    """Return the network alone, with the weights that it has beside its heads."""
    copy = model.clone()
    del copy.graph.outputs[1:]
    common.RemoveUnusedNodesPass()(copy)
    return copy


def _parameters(model: ir.Model, head: HeadNames) -> dict[str, Array]:
    """Return a head's parameters under the names that heads are made from."""
    found = {}
    for key, name in head.tensors.items():
        tensor = model.graph.initializers[name].const_value
        assert tensor is not None
        found[key] = tensor.numpy()
    return folded(found)
