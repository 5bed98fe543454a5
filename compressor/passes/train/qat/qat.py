"""``qat``: training with fake quantization, stored as ``quantize-static`` stores it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from compressor.errors import SpecError, listed
from compressor.models.element_types import from_numpy
from compressor.models.torch.lowering import NamedModule
from compressor.models.torch.smaller_module import check_executable, trainable_graph
from compressor.passes.quantize.maths.affine import absmax_parameters, quantize
from compressor.passes.quantize.static.options import (
    ActivationOptions,
    QuantizeRule,
    WeightSettings,
)
from compressor.passes.quantize.static.placement import kernel_notes, profile_for
from compressor.passes.quantize.static.predictions import base_of
from compressor.passes.quantize.static.settings import Decision, StaticSettings
from compressor.passes.quantize.static.writing import LeastScale, write_static_codes
from compressor.passes.train.distill.distilling import (
    Distillation,
    DistilledLoss,
    distilled_loss,
    opened_teacher,
)
from compressor.passes.train.engine import train
from compressor.passes.train.finetune import check_smoothing, loss_name, task_loss
from compressor.passes.train.job import PREFIX, Job, Objective, ParameterGroup
from compressor.passes.train.qat.graph import fake_quantized
from compressor.passes.train.qat.networks import (
    check_factors,
    find_points,
    make_networks,
    placeholders,
    with_factors,
)
from compressor.passes.train.qat.operators import TRAINING
from compressor.passes.train.qat.writing import NormsFrozen, Prepared, ScalesInRange
from compressor.passes.train.recipe import Course, Recipe
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers
from compressor.types.layers import Layer, QuantizedTensor
from compressor.types.passes import LayerPlan, Outcome, PassContext, Survey
from compressor.types.training import Training

_OTHERS = frozenset({"float16", "bfloat16", "float64"})
_RECURRENT = "not trained; quantize-static behind it stores recurrent weights in 8 bits"


class QatWeightOptions(WeightSettings):
    """How weights are quantized."""

    range: Literal["min-max", "mse"] = Field(
        default="mse",
        description="what scales start from: the full range, or the range of least squared error",
    )


class QatRule(QuantizeRule):
    """Per-layer settings of ``qat``."""


class Qat(Recipe):
    """Train weights and ranges while the network computes with quantized values.

    The graph is fused, and all layers that rules do not skip are quantized, with the ranges of the
    calibration data; the plan names those that `quantize-static` would leave floats. Then weights,
    scales and zero points are trained and stored as integers: the result has the form that
    `quantize-static` writes, with trained values.
    """

    name: ClassVar[str] = "qat"
    version: ClassVar[int] = 15
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.TRAIN, Capability.GRAPH, Capability.RUN}
    )
    replays: ClassVar[str] = "for the ranges of activations"
    source: ClassVar[str] = (
        "Esser et al. 2020, LSQ (arXiv:1902.08153); Bhalgat et al. 2020, LSQ+ (arXiv:2004.09576), "
        "for zero points; Jacob et al. 2017 (arXiv:1712.05877) section 3"
    )

    weights: QatWeightOptions = Field(default_factory=QatWeightOptions, description="weights")
    activations: ActivationOptions = Field(
        default_factory=ActivationOptions, description="activations"
    )
    scales: Literal["learned", "fixed"] = Field(
        default="learned",
        description="learned trains scales and zero points with the weights; fixed leaves them as "
        "calibration found them",
    )
    scale_rate: float = Field(
        default=1.0,
        gt=0,
        description="factor on the learning rate of scales and zero points",
    )
    batch_norm: Literal["folded", "live"] = Field(
        default="folded",
        description="folded trains the fused graph; live keeps normalizing by batches, and "
        "quantizes weights as they will be once batch norms are folded",
    )
    freeze_batch_norm: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="with batch-norm: live, share of the training after which batch norms use "
        "their running statistics",
    )
    distill: Distillation | None = Field(
        default=None, description="learn from a teacher's outputs, as `distill` does"
    )
    layers: tuple[QatRule, ...] = Field(
        default=(),
        description="rules for single layers; the first that matches wins; skip: true leaves "
        "layers in floating point and their weights alone",
    )

    @model_validator(mode="after")
    def _freezing_needs_norms(self) -> Qat:
        if self.batch_norm == "folded" and "freeze_batch_norm" in self.model_fields_set:
            raise ValueError("freeze-batch-norm is for batch-norm: live")
        return self

    @property
    def other_models(self) -> Mapping[str, Mapping[str, Any]]:
        """The teacher, if it is not the spec's model."""
        named = {} if self.distill is None else self.distill.named_models
        return {f"distill.{option}": keys for option, keys in named.items()}

    def check_models(self, carrier: Carrier, others: Mapping[str, Carrier]) -> None:
        """Compare a teacher's outputs with the model's."""
        if self.distill is None:
            return
        for other in others.values():
            self.distill.check_teacher(carrier, other)

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Choose the layers; check the loss, the options and the operators."""
        name = loss_name(self.loss, context.metric) if self.labelled else None
        check_smoothing(self, name)
        adapts = self.distill.planned_notes(carrier, context.source) if self.distill else ()
        settings = self._settings(context)
        settings.check()
        _check_type(carrier)
        networks = make_networks(carrier, live=self._live, evaluate=False)
        check_executable(networks.trained)
        decision = settings.decide(networks.folded)
        actions = {
            layer: f"{scheme} x {decision.settings.activation_type(layer)}, trained"
            for layer, scheme in decision.schemes.items()
        }
        inner = carrier.with_graph(networks.trained)
        for layer in self.pruned_layers(inner):
            actions[layer] = actions.get(layer, "train") + self.pruned_note
        recurrent = {layer.name: _RECURRENT for layer in inner.layers() if layer.is_recurrent}
        skipped = self.skip_reasons(inner) | recurrent
        reasons = {n: decision.reasons.get(n, "") for n in skipped} | recurrent
        rows = plan_layers(self.name, actions, reasons)
        rows = tuple(
            row
            if row.touched or skipped[row.name]
            else LayerPlan(row.name, actions.get(row.name, "train"), row.reason)
            for row in rows
        )
        note = f"trained with {name} as loss"
        if self.distill is not None:
            part = f", {self.distill.alpha:g} {name}" if name else ""
            share = f"{1 - self.distill.alpha:g} of the loss" if self.distill.alpha else "the loss"
            note = f"{share} is against a teacher{part}"
        notes = kernel_notes(context.targets, settings.symmetric)
        faster = replace(settings, faster=True, samples=context.shapes).decide(networks.folded)
        gain = _faster_as_floats(faster, carrier, context)
        return Survey(rows, notes=(note, *adapts, *notes, *self.pruned_notes(context), *gain))

    def train_on(self, carrier: Carrier, context: PassContext, course: Course) -> Outcome:
        """Calibrate, train, and quantize.

        Raises:
            CompressorError: see :func:`compressor.passes.train.engine.train`; or there are no
                calibration data, or a range is not finite.
        """
        training = course.training
        prepared = self.prepared(carrier, context, training)
        # Copies: training changes the module's own tensors in place.
        start = {name: tensor.clone() for name, tensor in prepared.module.state_dict().items()}
        untrained = carrier.with_graph(prepared.written(start)[0])
        job = self.job(prepared, carrier, context, course)
        trained = train(job, course)
        graph, layers = prepared.written(trained.tensors)
        notes = trained.notes(training.metric)
        if isinstance(job.objective, DistilledLoss):
            notes += job.objective.teacher.notes()
        return Outcome(carrier.with_graph(graph), layers, notes, trained.record(), untrained)

    def prepared(self, carrier: Carrier, context: PassContext, training: Training) -> Prepared:
        """Return the network with fake quantization, its ranges calibrated.

        Raises:
            CompressorError: see :meth:`apply_training`.
        """
        settings = self._settings(context)
        networks = make_networks(carrier, live=self._live)
        check_factors(networks)
        decision = settings.decide(networks.folded)
        if not self._live:
            networks = with_factors(networks, carrier, decision.schemes)
        requests = decision.requests()
        statistics = training.collect(
            carrier.with_graph(networks.folded), training.samples.batches(), requests
        )
        points = find_points(networks, settings, statistics, self.weights.range)
        quantized = fake_quantized(networks, points, learned=self.scales == "learned")
        layers = [layer for layer in networks.layers().values() if not layer.is_recurrent]
        tensors = [name for x in layers for name in (x.weight, x.bias) if name is not None]
        source = carrier.trainable()
        assert isinstance(source, NamedModule)
        trained = {*tensors, *quantized.trained}
        graph = trainable_graph(quantized.graph, source.module, trained, operators=TRAINING)
        outputs = tuple(output.name for output in carrier.outputs)
        module = NamedModule(graph, [i.name for i in carrier.inputs], outputs)
        self.freeze(carrier.with_graph(networks.trained), module)
        return Prepared(module, graph, networks, points, quantized, settings, statistics)

    def job(
        self, prepared: Prepared, carrier: Carrier, context: PassContext, course: Course
    ) -> Job:
        """Return what is trained, and with which loss."""
        steps, module, training = course.steps, prepared.module, course.training
        inner = carrier.with_graph(prepared.networks.trained)
        regulators = [
            *self.regulators(inner, module, steps),
            ScalesInRange(module, prepared.quantized, prepared.points.activations),
        ]
        if self._live:
            regulators.append(NormsFrozen(prepared.graph, round(self.freeze_batch_norm * steps)))
        if self.distill is None:
            objective: Objective = task_loss(self, carrier, training, context)
        else:
            teacher = opened_teacher(self.distill, training, "distill.teacher")
            objective = distilled_loss(self.distill, teacher, carrier, module, course, context)
        scales = frozenset(PREFIX + name for name in prepared.quantized.trained)
        return Job(
            name=self.name,
            module=module,
            objective=objective,
            inputs=module.inputs,
            outputs=module.outputs,
            regulators=regulators,
            groups=(ParameterGroup(scales, self.scale_rate),),
        )

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Quantize lazily: no weight is read."""
        settings = self._settings(context)
        networks = make_networks(carrier, live=False, evaluate=False)
        decision = settings.decide(networks.folded)
        model, schemes = decision.model, decision.schemes
        made_up = placeholders(decision.requests())

        def make_codes(layer: Layer, least: LeastScale) -> Callable[[], QuantizedTensor]:
            del least
            tensor = model.graph.initializers[layer.weight].const_value
            scheme = schemes[layer.name]

            def make() -> QuantizedTensor:
                assert tensor is not None
                matrix = layer.canonical(from_numpy(tensor))
                return quantize(matrix, *absmax_parameters(matrix, scheme), scheme)

            return make

        decision, pixels = decision.with_pixels(made_up, {})
        write_static_codes(decision, decision.codes(pixels, made_up), make_codes)
        return carrier.with_graph(model)

    @property
    def labelled(self) -> bool:
        """Whether the training data must have a target: unless all is learned from a teacher."""
        return self.distill is None or self.distill.alpha > 0

    @property
    def scheduled(self) -> bool:
        """Whether more than the learning rate changes: batch norms are frozen, weights pruned."""
        return self._live or super().scheduled

    @property
    def _live(self) -> bool:
        return self.batch_norm == "live"

    def _settings(self, context: PassContext) -> StaticSettings:
        return StaticSettings(
            profile_for(context.targets), self.weights, self.activations, self.layers
        )


def _check_type(carrier: Carrier) -> None:
    """Check that a network computes in float32, somewhere at least.

    Raises:
        SpecError: all of its weights are of other floats; a cast leaves nothing to train.
    """
    types = {layer.dtype for layer in carrier.layers()}
    others = sorted(types & _OTHERS)
    if others and "float32" not in types:
        raise SpecError(
            "pass 'qat'",
            f"rounds values of float32, and the module computes in {' and '.join(others)}",
            "give a module of float32, as by module.float(), and data for it",
        )


def _faster_as_floats(
    decision: Decision, carrier: Carrier, context: PassContext
) -> tuple[str, ...]:
    """Return which layers `quantize-static` would leave floats; they are trained as integers."""
    choice = decision.choice
    if choice is None or not choice.floats:
        return ()
    base = base_of(carrier, context)
    every = {layer.name for layer in carrier.layers()} <= set(choice.floats)
    way = (
        "as floats, whose codes quantize-weights stores"
        if every
        else f"with skip: true for {listed(list(choice.floats))}"
    )
    return (
        f"predicted latency in ONNX Runtime over {base.name}: "
        f"{base.times(choice.integer_ratios)}; {base.times(choice.ratios)} {way}",
    )
