"""``quantize-static``: integer weights and activations, with ranges from calibration data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial, reduce
from itertools import chain
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
import torch
from pydantic import Field

from compressor.graph.codes import attach_codes
from compressor.graph.editing import Editor
from compressor.graph.layers import moment_request
from compressor.graph.stored_weights import is_quantized
from compressor.models.layer_uses import MIXED, computed_weights, paired_positions
from compressor.passes.fuse.patterns import with_gemms
from compressor.passes.prepare.balance import span_requests
from compressor.passes.prepare.groups import scale_map
from compressor.passes.prepare.planned import nothing_to_scale, scalable
from compressor.passes.prepare.products import with_product_groups
from compressor.passes.prepare.scales import ScaleMap
from compressor.passes.quantize.cast.rewrite import in_single
from compressor.passes.quantize.code_training import Recipe
from compressor.passes.quantize.dynamic_operators import LstmWriter, integer_lstms
from compressor.passes.quantize.maths.pairs import without_overflow
from compressor.passes.quantize.reconstruct import (
    Reconstructed,
    Start,
    check_reconstruction,
    reconstruct,
)
from compressor.passes.quantize.rounded_graph import RoundedValue
from compressor.passes.quantize.static.observing import choose_observer
from compressor.passes.quantize.static.options import (
    StaticActivationOptions,
    StaticRule,
    WeightOptions,
)
from compressor.passes.quantize.static.placement import kernel_notes, profile_for
from compressor.passes.quantize.static.preparing import Prepared, prepare, rounding_of, schemes_of
from compressor.passes.quantize.static.replayed import MOST_SAMPLES, Replay
from compressor.passes.quantize.static.rounding import FloatWeight, Rounding, round_weights
from compressor.passes.quantize.static.settings import Decision, StaticSettings
from compressor.passes.quantize.static.writing import (
    LeastScale,
    widened,
    write_static_codes,
)
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers, resolve_rules, skip_reason
from compressor.types.layers import Layer, QuantizedTensor
from compressor.types.passes import GraphPass, LayerOutcome, Outcome, PassContext, Survey
from compressor.types.statistics import Moments, Request

_BYTE = 8
_FEW = 4  # bits of a weight; with fewer, the first and last layers keep 8
_RECIPE = Recipe()
_MOST_COLUMNS = 5000  # a second moment of more columns takes over 100 MB


class QuantizeStatic(GraphPass):
    """Quantize weights and activations to integers with ranges from calibration data.

    QuantizeLinear and DequantizeLinear are put where the exports' target fuses them into integer
    kernels; weights are stored as integer codes. Activation ranges come from observers, weights are
    rounded so that the layer's output changes least. For target `ort-cpu`, an LSTM of 64 units or
    more becomes ONNX Runtime's ``DynamicQuantizeLSTM``. Weights of other recurrent layers and in
    branches and bodies, and large embedding tables, are stored as codes and computed as floats.
    Before ranges are found, channels are scaled as by `equalize` and `smooth`, if that lowers the
    predicted error.
    """

    name: ClassVar[str] = "quantize-static"
    version: ClassVar[int] = 32
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.GRAPH, Capability.RUN})
    source: ClassVar[str] = (
        "Jacob et al. 2017 (arXiv:1712.05877) sections 2 and 3; "
        "Frantar et al. 2022 (arXiv:2210.17323) for rounding; Nagel et al. 2020 "
        "(arXiv:2004.10568), Li et al. 2021 (arXiv:2102.05426) and Wei et al. 2022 "
        "(arXiv:2203.05740) for reconstruct; Nagel et al. 2019 (arXiv:1906.04721) section 4.1 "
        "for prepare"
    )

    weights: WeightOptions = Field(default_factory=WeightOptions, description="weights")
    activations: StaticActivationOptions = Field(
        default_factory=StaticActivationOptions, description="activations"
    )
    first_last: Literal[8, "same"] = Field(
        default=8,
        description="width of weights and inputs of the first and last layers if others have "
        "activations of less than 8 bits or weights of less than 4: they hold little of a network "
        "and much of the error; same treats them like the others; a rule overrides it",
    )
    prepare: Literal["auto", "none"] = Field(
        default="auto",
        description="auto scales channels as `equalize` and `smooth` do, where that lowers the "
        "predicted error; none changes no weight",
    )
    layers: tuple[StaticRule, ...] = Field(
        default=(),
        description="rules for single layers; the first that matches wins. A layer with a rule is "
        "quantized even if it is predicted to be faster as floats",
    )

    @property
    def replays(self) -> str:
        """What the pass itself runs the calibration data for: training, or to choose."""
        if self.weights.rounding == "reconstruct":
            return "to train the rounding"
        return "to choose the observer" if len(self.activations.observers) > 1 else ""

    def adapted(self, carrier: Carrier, context: PassContext) -> Carrier:
        """Return the model with float32 in place of half precision, and biases in products."""
        single = in_single(carrier)
        return with_gemms(single) if profile_for(context.targets).integer_bias else single

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Choose the layers, and ask for ranges and second moments."""
        settings = self._settings(context)
        settings.check()
        decision = settings.decide(carrier.graph())
        if self.weights.rounding == "reconstruct":
            check_reconstruction(decision.model, "weights.rounding")
        stored = decision.stored
        trained = ", trained" if self.weights.rounding == "reconstruct" else ""
        kept = {
            layer.name: "" if layer.name in stored else decision.reasons.get(layer.name, "")
            for layer in decision.layers
        }
        actions = {
            name: f"{scheme} x {decision.settings.activation_type(name)}{trained}"
            for name, scheme in decision.schemes.items()
        } | {name: str(scheme) for name, scheme in stored.items()}
        lstms = _integer_lstms(decision, context.targets)
        actions |= {x.name: f"{stored[x.name]} dynamic" for pair in lstms.values() for x in pair}
        planned = plan_layers(self.name, actions, kept, quantized=is_quantized(carrier.graph()))
        moments = chain.from_iterable(self._moment_requests(decision).values())
        asked = [*moments, *decision.requests()]
        notes = [
            *kernel_notes(context.targets, settings.symmetric),
            *decision.notes(carrier, context),
            *self._choice_notes(decision),
        ]
        rows = tuple(
            replace(row, reason=decision.reasons[row.name]) if row.name in decision.faster else row
            for row in planned
        )
        scales, rounding = self._scales(carrier), rounding_of(decision)
        if scales is not None:
            asked += span_requests(scales, rounding)
            may_scale = scalable(scales, rounding)
            rows = tuple(
                replace(row, remark=may_scale[row.name].remark) if row.name in may_scale else row
                for row in rows
            )
            if not may_scale:
                notes.append(nothing_to_scale(scales))
        requests = tuple({request.key: request for request in asked}.values())
        return Survey(rows, requests, (*notes, *computed_weights(carrier)))

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Quantize the chosen layers."""
        train = self.weights.rounding == "reconstruct"
        samples = context.samples
        replay = None if samples is None or samples.made_up else Replay(samples)
        prepared = self._prepared(carrier, context, statistics, replay)
        ready, gathered = prepared.carrier, prepared.statistics
        chosen = choose_observer(ready, prepared.decision, gathered, replay)
        del replay  # and the samples that it holds
        decision, weights, errors = self._quantized(
            prepared, context, observer=chosen.observer, train=train
        )
        rounded = {w.layer: (str(w.codes.scheme), w.sqnr) for w in round_weights(weights)}
        scaled = prepared.balance
        outcomes = []
        for layer in decision.layers:
            details = {"equalized_db": g} if (g := scaled.gains.get(layer.name)) else {}
            if layer.name in rounded:
                if pair := errors.get(layer.name):
                    details |= {"block_error": pair[1], "before": pair[0]}
                outcomes.append(LayerOutcome(layer.name, *rounded[layer.name], details))
            elif details:
                outcomes.append(LayerOutcome(layer.name, layer.dtype, None, details))
        notes = (*scaled.notes, *filter(None, [chosen.note]))
        quantized_model = carrier.with_graph(decision.model)
        return Outcome(quantized_model, tuple(outcomes), notes, rescale=scaled.rescale)

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Quantize lazily: no weight is read."""
        decision = self._settings(context).decide(carrier.graph())
        given = Prepared(carrier, statistics, decision)
        decision, *_ = self._quantized(given, context, observer=0, train=False)
        return carrier.with_graph(decision.model)

    def _choice_notes(self, decision: Decision) -> list[str]:
        """Return how the observer of activations will be chosen, if it is to be."""
        names = self.activations.observers
        if len(names) == 1 or not decision.placement.values:
            return []
        return [
            f"observer auto: {', '.join(names[:-1])} or {names[-1]}, by the error of the model's "
            f"outputs on up to {MOST_SAMPLES} calibration samples"
        ]

    def _scales(self, carrier: Carrier) -> ScaleMap | None:
        """Return what may be scaled, if anything is to be; layers that are skipped may not."""
        if self.prepare == "none":
            return None
        rules = resolve_rules(self.layers, carrier.layers())
        kept = {layer.weight for layer in carrier.layers() if skip_reason(rules[layer.name])}
        names = [x.name for x in carrier.layers() if x.is_linear and x.weight not in kept]
        parameters = carrier.tensors().keys() - kept
        scales = scale_map(carrier.graph(), parameters)
        return with_product_groups(scales, carrier.graph(), names, parameters)

    def _prepared(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],
        replay: Replay | None,
    ) -> Prepared:
        decide, scales = self._settings(context).decide, self._scales(carrier)
        given = Prepared(carrier, statistics, decide(carrier.graph()))
        if scales is None or replay is None:
            return given
        return prepare(given, scales, decide, self._moment_requests, replay)

    def _moment_requests(self, decision: Decision) -> dict[str, list[Request]]:
        """Ask for the second moments of what layers with codes multiply, by the layer's name.

        There is one for each node that reads the weight.
        """
        requests, coded = dict[str, list[Request]](), schemes_of(decision)
        for node, layer in decision.readers.items() if self.weights.rounding != "nearest" else ():
            looks_up = layer.is_table or layer.is_recurrent
            here = node.graph is decision.model.graph and layer.columns <= _MOST_COLUMNS
            if layer.name not in coded or looks_up or not here:
                continue
            if decision.reasons.get(layer.name) == MIXED:
                continue  # what suits one reader's inputs may harm the other
            request = moment_request(layer, node)
            if request is not None:
                requests.setdefault(layer.name, []).append(request)
        return requests

    def _settings(self, context: PassContext) -> StaticSettings:
        return StaticSettings(
            profile_for(context.targets),
            self.weights,
            self.activations,
            self.layers,
            faster=True,
            samples=context.shapes,
            wide_ends=self.first_last != "same"
            and (self.activations.bits < _BYTE or self.weights.bits < _FEW),
        )

    def _quantized(
        self,
        given: Prepared,
        context: PassContext,
        *,
        observer: int,
        train: bool,
    ) -> tuple[Decision, list[FloatWeight], Mapping[str, tuple[float, float]]]:
        """Quantize a copy of the graph; without training, weights are computed when asked for.

        Returns:
            What was decided; each weight, in the model's order; and errors of blocks, if trained.
        """
        statistics, planned = given.statistics, given.decision
        decision = self._settings(context).decide(planned.model.clone(), planned)
        asked = self._moment_requests(decision)
        moments: dict[str, Moments] = {
            name: reduce(Moments.joined, (statistics[r.key] for r in requests))
            for name, requests in asked.items()
            if all(statistics.get(r.key) is not None for r in requests)  # a preview has none
        }
        decision, pixels = decision.with_pixels(statistics, moments)
        model, schemes, stored = decision.model, schemes_of(decision), decision.stored
        layers = {layer.name: layer for layer, _ in decision.placement.layers}
        layers.update({layer.name: layer for layer in decision.layers if layer.name in stored})
        floats = {name: _matrix(layer, model) for name, layer in layers.items()}
        lstms = _integer_lstms(decision, context.targets)
        if decision.settings.avoids_overflow:
            schemes |= {
                x.name: replace(schemes[x.name], paired=paired_positions(x))
                for p in lstms.values()
                for x in p
            }
        rounding = Rounding(self.weights.range)

        def rounded(name: str, least: LeastScale = None) -> QuantizedTensor:
            return rounding.quantized(floats[name], schemes[name], moments.get(name), least)

        activations = decision.codes(pixels, statistics, observer)
        trained = Reconstructed({}, {}, {})
        if train:
            values = {
                name: RoundedValue(
                    activations[name].scale,
                    activations[name].zero_point,
                    decision.value_scheme(name),
                    exact=name in pixels,
                )
                for name in decision.placement.values
            }
            layers_here = [layer for layer in layers.values() if layer.name not in stored]
            starts = {layer.name: partial(rounded, layer.name) for layer in layers_here}
            start = Start(model, layers_here, starts, values, _RECIPE)
            trained = reconstruct(start, context, self.name)
            for name, value in trained.activations.items():
                bits, zero = value.scheme.bits, value.zero_point
                activations[name] = decision.settings.code(value.scale, zero, bits)

        def make_codes(layer: Layer, least: LeastScale) -> Callable[[], QuantizedTensor]:
            codes = trained.weights.get(layer.name)
            if codes is not None:
                return cache(partial(widened, without_overflow(codes), least))
            return cache(partial(rounded, layer.name, least))

        makers = write_static_codes(decision, activations, make_codes)
        editor = Editor(model)
        lstm_writer = LstmWriter(editor)
        for node, pair in lstms.items():
            rounds = [cache(partial(rounded, layer.name)) for layer in pair]
            made = lstm_writer.replace(node, pair, stored[pair[0].name], rounds)
            makers |= {x.name: codes.quantized for x, codes in zip(pair, made, strict=True)}
        for name, scheme in stored.items():
            if name not in makers:
                codes = cache(partial(rounded, name))
                makers[name] = attach_codes(editor, layers[name], scheme, codes).quantized
        weights = [
            FloatWeight(layer, floats[layer.name], makers[layer.name], moments.get(layer.name))
            for layer in decision.layers
            if layer.name in layers
        ]
        return decision, weights, trained.errors


def _integer_lstms(
    decision: Decision, targets: frozenset[str]
) -> Mapping[ir.Node, tuple[Layer, Layer]]:
    """Return the LSTM nodes that compute with integers, with their two layers."""
    byte = {n for n, s in decision.stored.items() if s.bits == _BYTE and s.symmetric}
    lstms = integer_lstms(decision.model, byte, targets)
    schemes = decision.stored
    return {n: (w, r) for n, (w, r) in lstms.items() if schemes[w.name] == schemes[r.name]}


def _matrix(layer: Layer, model: ir.Model) -> Callable[[], torch.Tensor]:
    """Return what reads a weight as it is now, in canonical form, float32 ``[rows, columns]``."""
    tensor = model.graph.initializers[layer.weight].const_value
    assert tensor is not None
    return lambda: layer.canonical(torch.from_numpy(np.array(tensor.numpy()))).to(torch.float32)
