"""A model made ready for training, and what training made of it."""

from __future__ import annotations

from typing import Any

from torch import nn

from compressor.errors import SpecError
from compressor.passes.prune.magnitude.magnitude import choose_layers
from compressor.passes.train.engine import Trained
from compressor.passes.train.job import Regulator
from compressor.passes.train.masks import GradualPruning, ZerosKept
from compressor.passes.train.optimizers import growth
from compressor.passes.train.recipe import Gradual, Recipe
from compressor.types.carrier import Carrier
from compressor.types.layer_rules import plan_layers, resolve_rules, skip_reason
from compressor.types.layers import Layer
from compressor.types.passes import LayerOutcome, LayerPlan, Outcome
from compressor.types.training import Measure

_MOST_LOSSES = 500
PREFIX = "module."
"""What stands before the model's own names in those of a :class:`NamedModule`."""


def plan_training(recipe: Recipe, carrier: Carrier) -> tuple[LayerPlan, ...]:
    """Return the plan's rows: which layers are trained, and which are pruned meanwhile.

    Raises:
        SpecError: a rule matches no layer, or nothing would be trained.
    """
    layers = carrier.layers()
    rules = resolve_rules(recipe.layers, [layer.name for layer in layers])
    reasons = {layer.name: skip_reason(rules[layer.name]) for layer in layers}
    actions = {layer.name: "train" for layer in layers}
    if recipe.prune is not None:
        for name in gradual_layers(recipe, recipe.prune, carrier):
            actions[name] = f"train, {100 * recipe.prune.target:g} % zero"
    return plan_layers(recipe.name, actions, reasons)


def gradual_layers(recipe: Recipe, options: Gradual, carrier: Carrier) -> dict[str, Layer]:
    """Return the layers that lose weights while they are trained, by name.

    Raises:
        SpecError: there is none.
    """
    each = options.scope == "local"
    chosen = choose_layers(carrier, options.target, options.block, (), each=each)
    rules = resolve_rules(recipe.layers, [layer.name for layer in carrier.layers()])
    found = {
        layer.name: layer
        for layer in carrier.layers()
        if layer.name in chosen.sparsity and not skip_reason(rules[layer.name])
    }
    if not found:
        raise SpecError(
            "prune",
            "touches no layer",
            "change its block or target, or the layers that are skipped",
        )
    return found


def freeze(recipe: Recipe, carrier: Carrier, module: nn.Module) -> None:
    """Keep skipped layers' weights and biases from being trained, in place.

    Args:
        recipe: has the rules.
        carrier: the model.
        module: what is trained; a :class:`NamedModule` of the model's module.

    Raises:
        SpecError: nothing is left to train.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    layers = carrier.layers()
    rules = resolve_rules(recipe.layers, [layer.name for layer in layers])
    for layer in layers:
        if skip_reason(rules[layer.name]):
            for name in (layer.weight, layer.bias):
                if name is not None and PREFIX + name in parameters:
                    parameters[PREFIX + name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise SpecError(
            f"pass {recipe.name!r}",
            "has nothing to train: the factory or the rules freeze every parameter",
            "leave requires_grad on, or change the rules",
        )


def regulators(
    recipe: Recipe, carrier: Carrier, module: nn.Module, steps: int
) -> tuple[Regulator, ...]:
    """Return what keeps zeros zero, and what prunes gradually."""
    parameters = dict(module.named_parameters())
    weights = {PREFIX + layer.weight: layer for layer in carrier.layers()}
    found: list[Regulator] = []
    kept = ZerosKept(module, [name for name in weights if name in parameters])
    if kept.masked:
        found.append(kept)
    if recipe.prune is not None:
        chosen = gradual_layers(recipe, recipe.prune, carrier)
        thinned = {
            name: layer
            for name, layer in weights.items()
            if layer.name in chosen and name in parameters
        }
        found.append(GradualPruning(module, thinned, recipe.prune, steps))
    return tuple(found)


def outcome(recipe: Recipe, carrier: Carrier, trained: Trained, metric: Measure | None) -> Outcome:
    """Return the model with the trained weights, and what is to be told about the training."""
    names = carrier.tensors().keys()
    changes = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in trained.tensors.items()
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) in names
    }
    rules = resolve_rules(recipe.layers, [layer.name for layer in carrier.layers()])
    layers = tuple(
        LayerOutcome(layer.name, layer.dtype, details={"trained": True})
        for layer in carrier.layers()
        if not skip_reason(rules[layer.name])
    )
    notes = training_notes(trained, metric)
    return Outcome(carrier.with_weights(changes), layers, notes, training_record(trained))


def training_record(trained: Trained) -> dict[str, Any]:
    """Return how the training went, for the report: the losses, thinned out where they are many."""
    steps = len(trained.losses)
    shown = range(0, steps, max(1, -(-steps // _MOST_LOSSES)))
    return {
        "steps": steps,
        "losses": [[step + 1, trained.losses[step]] for step in shown],
        "terms": dict(trained.terms),
        "validations": [list(entry) for entry in trained.validations],
        "best_step": trained.best_step,
    }


def training_notes(trained: Trained, metric: Measure | None) -> tuple[str, ...]:
    """Say how the training went."""
    steps = len(trained.losses)
    notes = [f"loss {trained.losses[0]:.4g} -> {trained.losses[-1]:.4g} over {steps:,} steps"]
    if trained.validations:
        name = "loss" if metric is None or metric.against_float else metric.name
        best = dict(trained.validations)[trained.best_step]
        notes.append(
            f"held-out {name}: {best:.4g} after step {trained.best_step:,}, whose weights are "
            f"kept; {trained.validations[-1][1]:.4g} at the end"
        )
    notes += [grown] if (grown := growth(trained.losses)) else []
    if trained.started:
        notes.append(f"went on from the state saved after step {trained.started:,}")
    return tuple(notes)
