"""Make a module with fewer channels: cut tensors, set size attributes, compare outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy, deepcopy
from itertools import islice

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from compressor.errors import ModelError
from compressor.models.element_types import TORCH_DTYPES, from_numpy, of_numpy, to_numpy
from compressor.models.executor import GraphModule
from compressor.models.executor.node import Operators
from compressor.models.onnx.ort_runner import runner_of
from compressor.models.torch.lowering import call, example_inputs
from compressor.models.torch.matching import as_lowered, attach_weights, held_tensors
from compressor.models.torch.size_attributes import CONFIG, Attributes, Masks, readings, stated
from compressor.types.channels import Units
from compressor.types.tensors import Array, Batch, TensorSpec, tolerated

MOST_READINGS = 64


def run_module(module: torch.nn.Module, inputs: Sequence[TensorSpec], batch: Batch) -> list[Array]:
    """Run a module and return its output tensors in the order of its graph's outputs."""
    tensors = {i.name: of_numpy(batch[i.name]) for i in inputs}
    with torch.inference_mode():
        return [to_numpy(output) for output in call(module, tensors)]


def random_batch(inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Return a batch that most models take: normal floats, the ids 0 and 1, masks of ones.

    The same inputs always give the same batch.
    """
    rng = np.random.default_rng(0)
    batch: dict[str, Array] = {}
    for spec, example in zip(inputs, example_inputs(inputs).values(), strict=True):
        if example.is_floating_point():
            values: Array = rng.normal(size=tuple(example.shape))
        elif "mask" in spec.name:  # where everything is masked, nothing is computed
            values = np.ones(tuple(example.shape))
        else:
            values = rng.integers(0, 2, tuple(example.shape))
        batch[spec.name] = values.astype(spec.dtype)
    return batch


class Agreement:
    """Compares modules with a graph that is run once.

    Args:
        probe: what both are run on; random values by default.
    """

    def __init__(self, graph: ir.Model, inputs: Sequence[TensorSpec], probe: Batch | None = None):
        self._inputs = inputs
        self._batch = random_batch(inputs) if probe is None else probe
        self._wanted = list(runner_of(graph).run(self._batch).values())

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether the module's outputs are the graph's, within what its type rounds."""
        outputs = self._outputs(module)
        return outputs is not None and all(map(close, outputs, self._wanted))

    def fits(self, module: torch.nn.Module) -> bool:
        """Whether the module runs, and its outputs have the shapes of the graph's."""
        outputs = self._outputs(module)
        return outputs is not None and [o.shape for o in outputs] == [w.shape for w in self._wanted]

    def _outputs(self, module: torch.nn.Module) -> list[Array] | None:
        try:
            outputs = run_module(module, self._inputs, self._batch)
        except Exception:  # noqa: BLE001  # the user's forward, with sizes it may not be made for
            return None
        return outputs if len(outputs) == len(self._wanted) else None


def close(output: Array, reference: Array) -> bool:
    """Whether an output is the reference within what runtimes differ by, as its type rounds."""
    if output.shape != reference.shape:
        return False
    finite = np.isfinite(reference)
    if not np.array_equal(finite, np.isfinite(output)):
        return False
    wide = reference[finite].astype(np.float64)
    reach = float(np.abs(wide).max(initial=0.0))
    return bool(np.all(np.abs(output[finite] - wide) <= tolerated(reference) * reach))


def copied(module: nn.Module, changes: Collection[str]) -> nn.Module:
    """Copy a module; both share the tensors that are not named in ``changes``."""
    held = held_tensors(module)
    replaced = {id(held[name]) for name in changes if name in held}
    return deepcopy(module, {id(t): t for t in held.values() if id(t) not in replaced})


def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Copy a module with some tensors replaced, of any shape; both share the others.

    Tensors that are tied stay tied.

    Raises:
        KeyError: the module has no tensor of a name.
    """
    held = held_tensors(module)
    if unknown := sorted(tensors.keys() - held.keys()):
        raise KeyError(f"no parameter {unknown[0]!r}")
    memo = {id(tensor): tensor for tensor in held.values()}
    for name, tensor in tensors.items():
        old = held[name]
        memo[id(old)] = _parameter(tensor, old) if isinstance(old, nn.Parameter) else tensor
    return deepcopy(module, memo)


def with_unread(
    module: nn.Module,
    kept: Mapping[str, Mapping[int, Units]],
    read: Collection[str],
    inputs: Sequence[TensorSpec],
) -> Mapping[str, Mapping[int, Units]]:
    """Add parameters that a module's graph does not read: what gives no output of the module.

    Such are what wav2vec 2.0 masks with in training, and poolers that a class computes and does not
    return. No graph says which of their positions remain. Each axis keeps those that remain on most
    axes of its length in the module that holds the parameter, or in the nearest one around a layer
    that is computed; where there is none, all.

    Args:
        kept: the positions that remain, by tensor and axis.
        read: the names of the tensors that the module's graph reads.
        inputs: those of the module.
    """
    held, named = dict(module.named_parameters(remove_duplicate=False)), held_tensors(module)
    known = {id(named[name]) for name in {*read, *kept} & named.keys()}
    # Those of parametrizations make a weight that is read.
    unread = [n for n, t in held.items() if id(t) not in known and ".parametrizations." not in n]
    computed = _computed(module, inputs) if unread else frozenset()
    others = {name: tensor for name, tensor in held.items() if id(tensor) in known}
    whole = dict(kept)
    for name in unread:
        owner = name.rpartition(".")[0]
        usual = _usual_units(others, kept, owner)
        while not usual and owner and name.rpartition(".")[0] in computed:
            owner = owner.rpartition(".")[0]
            usual = _usual_units(others, kept, owner)
        axes = {axis: usual[n] for axis, n in enumerate(held[name].shape) if n in usual}
        if axes:
            whole[name] = axes
    return whole


def _usual_units(
    held: Mapping[str, Tensor], kept: Mapping[str, Mapping[int, Units]], path: str
) -> dict[int, Units]:
    """Return what remains on most axes of a length below a path, by the length, if not all does.

    The stream of a network may be as wide as its heads together, of which only some go. Where as
    many axes keep all, all remains.
    """
    start = f"{path}." if path else ""
    counts = Counter(
        (length, tuple(units.tolist()) if units is not None else None)
        for name, tensor in held.items()
        if name.startswith(start)
        for axis, length in enumerate(tensor.shape)
        for units in [kept.get(name, {}).get(axis)]
    )
    by_count = sorted(counts, key=lambda entry: (counts[entry], entry[1] is None), reverse=True)
    usual: dict[int, tuple[int, ...] | None] = {}
    for length, units in by_count:
        usual.setdefault(length, units)
    return {length: np.array(units) for length, units in usual.items() if units is not None}


def _computed(module: nn.Module, inputs: Sequence[TensorSpec]) -> frozenset[str]:
    """Return the paths of the modules that a forward calls; none if it refuses made-up values."""
    called: list[str] = []
    ends = [
        part.register_forward_pre_hook(lambda *_, path=path: called.append(path))
        for path, part in module.named_modules()
    ]
    try:
        run_module(module, inputs, random_batch(inputs))
    except Exception:  # noqa: BLE001  # the user's forward, with made-up values
        return frozenset()
    finally:
        for end in ends:
            end.remove()
    return frozenset(called)


def selected(module: nn.Module, kept: Mapping[str, Mapping[int, Units]]) -> dict[str, Tensor]:
    """Return the remaining parts of the tensors that become shorter, by all their names.

    Args:
        kept: the positions that remain, by parameter and axis. Names that the module does not
            have are constants of its graph.
    """

    def taken(tensor: Tensor, axis: int, positions: Units) -> Tensor:
        return tensor.index_select(axis, torch.from_numpy(np.asarray(positions)))

    return _shorter(module, kept, taken)


def shortened(module: nn.Module, kept: Mapping[str, Mapping[int, Units]]) -> dict[str, Tensor]:
    """Return tensors of the shapes of :func:`selected` that are views, so that none is read."""
    return _shorter(module, kept, lambda t, axis, positions: t.narrow(axis, 0, len(positions)))


def _shorter(
    module: nn.Module,
    kept: Mapping[str, Mapping[int, Units]],
    shorten: Callable[[Tensor, int, Units], Tensor],
) -> dict[str, Tensor]:
    held = held_tensors(module)
    shorter: dict[int, Tensor] = {}
    for name in held.keys() & kept.keys():
        tensor = held[name].detach()
        for axis, positions in kept[name].items():
            if len(positions) < tensor.shape[axis]:
                tensor = shorten(tensor, axis, positions)
        if tensor.shape != held[name].shape:
            shorter[id(held[name])] = tensor
    return {name: shorter[id(tensor)] for name, tensor in held.items() if id(tensor) in shorter}


def fitting_attributes(
    module: nn.Module,
    smaller: nn.Module,
    kept: Mapping[str, Mapping[int, Units]],
    agreement: Agreement,
) -> Attributes | None:
    """Set the size attributes of a module with smaller tensors so that it runs like its graph.

    Where no sizes of the modules themselves make it do so, those in their configurations are read
    too: the attention of Phi-3 cuts queries, keys and values apart by them.

    Args:
        smaller: its copy with fewer channels; on success its attributes are set.
        kept: the positions that remain, by parameter and axis.

    Returns:
        The attributes that were set; ``None`` where no reading of them agrees.
    """
    masks = removal_masks(module, kept)
    for configured in (False, True):
        for attributes in islice(readings(module, masks, configured=configured), MOST_READINGS):
            set_attributes(smaller, attributes)
            if agreement.holds(smaller):
                return attributes
            set_attributes(smaller, present(module, attributes))
    return None


def with_shorter(module: nn.Module, graph: ir.Model, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Copy a module with shorter tensors, which a smaller graph's initializers then refer to.

    The copy shares the other tensors.

    Raises:
        ValueError: a shape is another in the graph.
    """
    smaller = with_tensors(module, tensors)
    held = held_tensors(smaller)
    for name, value in graph.graph.initializers.items():
        if name in held and value.const_value is not None:
            here, there = list(value.const_value.shape.numpy()), list(as_lowered(held[name]).shape)
            if here != there:
                raise ValueError(
                    f"parameter {name!r} is {here} in the smaller graph, "
                    f"{there} by the positions that remain"
                )
    attach_weights(graph, smaller)
    return smaller


def set_attributes(module: nn.Module, attributes: Attributes) -> None:
    """Set attributes of submodules, in place; those of a configuration in a copy of their own."""
    modules = dict(module.named_modules())
    for path, values in attributes.items():
        part = modules[path]
        inner = [name for name in values if name.startswith(CONFIG)]
        if inner:
            part.config = copy(part.config)  # others hold it too
        for name, value in values.items():
            holder = part.config if name in inner else part
            setattr(holder, name.removeprefix(CONFIG), value)


def executable(graph: ir.Model) -> bool:
    """Whether :func:`trainable_graph` knows all operators of a graph; no weight is read."""
    try:
        check_executable(graph)
    except ModelError:
        return False
    return True


def check_executable(graph: ir.Model) -> None:
    """Compare a graph's operators with those that :func:`trainable_graph` knows.

    No weight is read.

    Raises:
        ModelError: naming the first that is not supported.
    """
    initializers = graph.graph.initializers.items()
    GraphModule(
        graph,
        without_data({n: v.const_value for n, v in initializers if v.const_value is not None}),
    )


def without_data(tensors: Mapping[str, ir.TensorProtocol]) -> dict[str, Tensor]:
    """Return tensors of the same shapes on the ``meta`` device, where PyTorch has their types."""
    return {
        name: torch.empty(
            [int(d) for d in tensor.shape.numpy()], dtype=TORCH_DTYPES[tensor.dtype], device="meta"
        )
        for name, tensor in tensors.items()
        if tensor.dtype in TORCH_DTYPES
    }


def trainable_graph(
    graph: ir.Model,
    module: nn.Module,
    added: Collection[str] = (),
    *,
    shared: bool = False,
    operators: Operators | None = None,
) -> GraphModule:
    """Return a module that executes a graph and can be trained like the module it came from.

    Parameters of the module are parameters of the result, under the same names; tied ones stay
    tied. Nothing is shared with the graph, which may be mapped from a file.

    Args:
        graph: its initializers have values.
        module: the network that it was lowered from, whatever its sizes.
        added: names of initializers that are parameters, too, though not of the module.
        shared: use the graph's tensors without a copy, for plans.
        operators: those of the graph that the executor does not have, by domain and name.

    Raises:
        ModelError: an operator is not supported.
    """
    held = held_tensors(module)
    made: dict[int, nn.Parameter] = {}
    parameters: dict[str, nn.Parameter] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in graph.graph.initializers.items():
        source = held.get(name)
        if value.const_value is None:
            continue
        tensor = from_numpy(value.const_value)
        tensor = tensor if shared else tensor.clone()
        if isinstance(source, nn.Parameter):
            if id(source) not in made:
                made[id(source)] = _parameter(tensor, source)
            parameters[name] = made[id(source)]
        elif name in added:
            parameters[name] = nn.Parameter(tensor)
        else:
            tensors[name] = tensor
    return GraphModule(graph, tensors, parameters, operators=operators)


def _parameter(tensor: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=like.requires_grad)


def removal_masks(module: nn.Module, kept: Mapping[str, Mapping[int, Units]]) -> Masks:
    """Return which positions remain on the axes that become shorter, by the tensor's ``id``."""
    held = held_tensors(module)
    masks: dict[int, dict[int, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]] = {}
    for name in held.keys() & kept.keys():
        for axis, positions in kept[name].items():
            mask = np.isin(np.arange(held[name].shape[axis]), positions)
            if not mask.all():
                masks.setdefault(id(held[name]), {})[axis] = mask
    return masks


def present(module: nn.Module, attributes: Attributes) -> Attributes:
    """Return the values that a module has of the attributes that others were found for."""
    modules = dict(module.named_modules())
    return {
        path: {name: stated(modules[path], name) for name in values}
        for path, values in attributes.items()
    }
