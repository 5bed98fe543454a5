"""``early-exit``: easy samples leave the network before its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Any, ClassVar, Literal

import onnx_ir as ir
import onnx_ir.passes.common as common
from pydantic import Field, model_validator
from torch import nn

from compressor.errors import SpecError
from compressor.models.torch.smaller_module import trainable_graph
from compressor.passes.train.early_exit.cut import CutExit, cut, part_macs
from compressor.passes.train.early_exit.heads import (
    FrozenTrunk,
    SelfDistillation,
    WithHeads,
    folded,
    initial_parameters,
    with_confidences,
    with_heads,
)
from compressor.passes.train.early_exit.points import (
    Answer,
    Batches,
    Confidence,
    Exit,
    ExitPoint,
    find_answer,
    find_points,
)
from compressor.passes.train.early_exit.thresholds import (
    check_answers,
    choose_thresholds,
    collect,
    feature_statistics,
    nobody_leaves,
    threshold_notes,
)
from compressor.passes.train.engine import train
from compressor.passes.train.finetune import CROSS_ENTROPY, TaskLoss, check_smoothing, loss_name
from compressor.passes.train.job import PREFIX, Job, Trained
from compressor.passes.train.recipe import Course, Recipe
from compressor.run.timing.timing import already_open, measure
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers
from compressor.types.passes import LayerOutcome, Outcome, PassContext, Survey
from compressor.types.tensors import Array
from compressor.types.training import Training

_PROBED = 64  # samples whose answers are compared, and of which the time is taken
_SECONDS = 3.0  # in which the time is taken


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
        """Return the graph that stops early, without exits at which no sample leaves."""
        exits = zip(self.points, thresholds, parameters, strict=True)
        used = [CutExit(*entry) for entry in exits if entry[1] < inf]
        return cut(self.graph, used, how, self.batches, self.answer)


class EarlyExit(Recipe):
    """Let easy samples leave the network early.

    A head after each named layer learns from the labels and from the network's own answers. Each
    sample takes the answer of the first head that is confident enough. Thresholds are chosen on the
    calibration data so that the required share of the answers agrees with the full network.
    Everything after an exit lies in a branch of an ONNX `If`, which runs only for the remaining
    samples; the model's inputs and outputs do not change. Exits at which no sample would leave are
    omitted.
    """

    name: ClassVar[str] = "early-exit"
    version: ClassVar[int] = 4
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.GRAPH, Capability.RUN})
    replays: ClassVar[str] = "to choose how sure its exits have to be"
    estimated: ClassVar[bool] = True  # exits that no sample would take are left out
    source: ClassVar[str] = (
        "exits by confidence: Teerapittayanon et al. 2016 (arXiv:1709.01686); self-distillation: "
        "Zhang et al. 2019 (arXiv:1905.08094)"
    )

    exits: tuple[Exit, ...] = Field(min_length=1, description="where, in the order of execution")
    agreement: Annotated[float, Field(gt=0, le=100)] = Field(
        default=99.0,
        description="percent of the calibration samples that must get the full network's answer",
    )
    confidence: Confidence = Field(
        default="probability",
        description="how the confidence of a head is measured: its largest probability, the "
        "margin over the second largest, or the entropy of its probabilities",
    )
    train: Literal["heads", "all"] = Field(
        default="heads",
        description="heads leaves the network, and so its own answers, unchanged; all trains it "
        "with them",
    )
    alpha: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="weight of the labels in the heads' loss; the network's answers get the rest",
    )
    temperature: float = Field(
        default=3.0, gt=0, description="softens the network's answers from which heads learn"
    )

    @model_validator(mode="after")
    def _only_heads(self) -> EarlyExit:
        if self.train == "heads" and (self.prune is not None or self.layers):
            option = "prune" if self.prune is not None else "layers"
            raise ValueError(f"{option} needs train: all; with train: heads no layer is changed")
        return self

    @property
    def required(self) -> frozenset[Capability]:
        """The network itself can only be trained where it is a module."""
        return self.needs | ({Capability.TRAIN} if self.train == "all" else set())

    @property
    def labelled(self) -> bool:
        """Whether the training data must have a target: where a part of the loss is the task's."""
        return self.train == "all" or self.alpha > 0

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Find the places of the exits, and check that the graph can be cut there."""
        check_smoothing(self, loss_name(self.loss or CROSS_ENTROPY, None))
        places = self._places(carrier)
        self._untrained(places)
        exits = {
            point.layer.name: f"exit {point.number} follows, head {point.features} x "
            f"{places.answer.classes}"
            for point in places.points
        }
        trained = self.train == "all"
        reasons, actions = {}, {}
        for name, skipped in self.skip_reasons(carrier).items():
            reason = skipped if trained else "only heads are trained"
            reasons[name] = "" if name in exits else reason
            parts = ["train"] * (trained and not skipped) + [exits.get(name, "")]
            actions[name] = "; ".join(part for part in parts if part)
        return Survey(plan_layers(self.name, actions, reasons))

    def train_on(self, carrier: Carrier, context: PassContext, course: Course) -> Outcome:
        """Train the heads, choose their thresholds, and cut the graph.

        Raises:
            CompressorError: see :func:`compressor.passes.train.engine.train`; or there are no
                calibration data, or no sample would leave early.
        """
        training = course.training
        if training.samples.made_up:
            raise SpecError(
                f"pass {self.name!r}",
                "chooses thresholds, but there is no calibration data",
                "add data.calibration",
            )
        places = self._places(carrier)
        headed = self._with_heads(carrier, places, context.seed, training)
        # No metric looks at the heads: the best state is the one of least loss.
        course = replace(course, training=replace(training, metric=None))
        trained, carrier, headed = self._trained(carrier, course, headed)
        network = headed.model.clone()
        del network.graph.outputs[1:]
        common.RemoveUnusedNodesPass()(network)
        places = replace(places, graph=network, batches=Batches(network))
        cut = self._cut(carrier, places, headed, training, trained.notes(None))
        return replace(cut, training=trained.record())

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Return the model with every exit used."""
        return carrier.with_graph(self._untrained(self._places(carrier)))

    def _places(self, carrier: Carrier) -> _Places:
        graph = carrier.graph()
        batches = Batches(graph)
        answer = find_answer(graph, batches)
        return _Places(graph, batches, answer, find_points(graph, self.exits, batches, answer))

    def _untrained(self, places: _Places) -> ir.Model:
        """Return the graph with every exit used, whose heads have not learned anything."""
        classes = places.answer.classes
        parameters = [initial_parameters(point, classes, 0) for point in places.points]
        return places.written([1.0] * len(parameters), parameters, self.confidence)

    def _with_heads(
        self, carrier: Carrier, places: _Places, seed: int, training: Training
    ) -> WithHeads:
        """Add heads whose features are standardized by what they are on the calibration data."""
        classes = places.answer.classes
        starts = [initial_parameters(point, classes, seed) for point in places.points]
        first = with_heads(places.graph, places.points, places.answer, starts)
        names = [head.features for head in first.heads]
        runner = carrier.with_graph(first.model).runner(names)
        statistics = feature_statistics(runner, training.samples, names)
        for start, (mean, scale) in zip(starts, statistics, strict=True):
            start.update(mean=mean, scale=scale)
        return with_heads(places.graph, places.points, places.answer, starts)

    def _trained(
        self, carrier: Carrier, course: Course, headed: WithHeads
    ) -> tuple[Trained, Carrier, WithHeads]:
        """Train; return the model with trained weights, and its graph with the heads."""
        names = [name for head in headed.heads for name in head.parameters]
        inputs = tuple(i.name for i in carrier.inputs)
        outputs = tuple(v.name or "" for v in headed.model.graph.outputs)
        executing = carrier
        if self.train == "all":
            probe = course.training.samples.probe(_PROBED)
            executing = carrier.with_trainable_graph(headed.model, names, probe=probe)
            if Capability.TRAIN not in executing.offers:
                raise SpecError("train", "is all, and the graph cannot be trained", "set heads")
            module = executing.trainable()
            self.freeze(executing, module)
            watched = self.regulators(executing, module, course.steps)
        else:
            graph = trainable_graph(headed.model, nn.Module(), names)
            module, watched = FrozenTrunk(graph, inputs, outputs), ()
        job = Job(
            name=self.name,
            module=module,
            objective=self._objective(headed, course.training),
            inputs=inputs,
            outputs=outputs[:1],
            regulators=watched,
        )
        trained = train(job, course)
        tensors = {n.removeprefix(PREFIX): t for n, t in trained.tensors.items()}
        if self.train == "all":
            names_of = executing.tensors().keys()
            after = executing.with_weights({n: t for n, t in tensors.items() if n in names_of})
            return trained, after, replace(headed, model=after.graph().clone())
        copy = headed.model.clone()
        for name in names:
            copy.graph.initializers[name].const_value = ir.tensor(tensors[name].numpy(), name=name)
        return trained, carrier, replace(headed, model=copy)

    def _objective(self, headed: WithHeads, training: Training) -> SelfDistillation:
        exits = [head.logits for head in headed.heads]
        name = loss_name(self.loss or CROSS_ENTROPY, None)
        outputs = [(n,) for n in (*exits, headed.teacher)]
        *tasks, last = (TaskLoss(name, o, training, self.label_smoothing) for o in outputs)
        labelled = dict(zip(exits, tasks, strict=True)) if self.alpha > 0 else {}
        network = last if self.train == "all" else None
        return SelfDistillation(
            exits, headed.teacher, self.alpha, self.temperature, labelled, network
        )

    def _cut(
        self,
        carrier: Carrier,
        places: _Places,
        headed: WithHeads,
        training: Training,
        notes: Sequence[str],
    ) -> Outcome:
        """Choose thresholds and cut the graph; compare it with the model before."""
        flat, answers = with_confidences(headed, self.confidence, places.answer)
        runner, heads = carrier.with_graph(flat).runner(), [head.logits for head in headed.heads]
        sure, same = collect(runner, training.samples, heads, headed.teacher)
        costs = part_macs(places.graph, places.points, places.answer)
        chosen = choose_thresholds(sure, same, self.agreement, costs)
        if not sum(chosen.left):
            raise nobody_leaves(self.agreement, sure, same, costs)
        parameters = [folded(headed.model, head) for head in headed.heads]
        after = carrier.with_graph(places.written(chosen.values, parameters, self.confidence))
        probe = training.samples.probe(_PROBED)
        check_answers(after.runner(), runner.run(probe), probe, answers, chosen.values)
        notes = [*notes, *threshold_notes(places.points, chosen, self.agreement, costs)]
        if training.ranks.rank == 0:
            whole = carrier.with_graph(places.graph).runner()
            models = already_open({"early": after.runner(), "full": whole})
            count = len(next(iter(probe.values())))
            alone = [{n: a[i : i + 1] for n, a in probe.items()} for i in range(count)]
            times = measure(models, alone, _SECONDS)
            early, full = (times.summary(name)["mean"] for name in models)
            notes.append(
                f"mean latency at batch 1 in ONNX Runtime, over {times.inputs} calibration "
                f"samples: {early:.3g} ms with exits, {full:.3g} ms without "
                f"({early / full:.2f} of it)"
            )
        exits = zip(places.points, chosen.values, chosen.shares, strict=False)
        rows = {
            f"exit{point.number}": {"after": point.after, "threshold": value, "leave": share}
            for point, value, share in exits
        }
        layers = tuple(
            LayerOutcome(layer.name, layer.dtype, details=rows.get(layer.name, {"trained": True}))
            for layer in after.layers()
            if layer.name in rows or self.train == "all"
        )
        return Outcome(after, layers, tuple(notes))
