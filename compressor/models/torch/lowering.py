"""Call a torch module, and lower it to ONNX IR once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.utils._pytree import tree_leaves

from compressor.errors import ModelError, message_lines
from compressor.models.executor.module import GraphModule
from compressor.models.garbage import without_collector
from compressor.models.torch.frozen_sizes import NUMBERS, check_sizes
from compressor.models.torch.inputs_by_name import bound, named_parameters, takes_names
from compressor.models.torch.masks import without_fast_paths, without_idle_masks
from compressor.models.torch.matching import attach_weights, give_way
from compressor.models.torch.parametrized import computed_by
from compressor.models.torch.program_state import assigned_buffers, check_stateless
from compressor.models.torch.recurrences import recurrences, whole_recurrences
from compressor.models.torch.translations import OtherCalls, translations
from compressor.models.transformers.experts import plain_experts
from compressor.progress import quiet_libraries
from compressor.types.tensors import TensorSpec

OPSET = 21
"""The opset of lowered graphs: the first with 4-bit and blocked Q/DQ. Exporters convert."""
_IMAGE_RANK, _FIRST_SPATIAL, _SOUND_RANK = 4, 2, 2
_LONGER = 64  # positions, where a few are a case of their own, or none
_SOUND = 8000  # samples of a waveform: half a second
_CHUNKS = ("chunk_size", "mamba_chunk_size")  # of sequences, in the configurations of transformers

_NO_GRAPH = "or use passes on weights alone, such as compress quantize on its directory"
_NO_FUNCTION = "No ONNX function"
_LEFT_OUT = "'NoneType' object"
_LENGTH = "SymbolicTensor"
_FAKE = "We found a fake tensor in the exported program"
_CLASS = "is not a known type"
_DIFFERENTIATES = (
    "forward may compute gradients, such as forces from an energy, which no graph holds: let it "
    f"return what it differentiates, such as the energy, alone, {_NO_GRAPH}"
)
_REMEDIES = {
    "data-dependent": "a graph cannot branch on values: let forward compute all branches and "
    f"choose with torch.where (all experts, not those that were hit), {_NO_GRAPH}",
    "complex-valued": "PyTorch's exporter cannot write that operator: use real and imaginary parts "
    f"in place of complex numbers in forward, {_NO_GRAPH}",
    _NO_FUNCTION: "PyTorch's exporter cannot write that operator: use another one in "
    f"forward, {_NO_GRAPH}",
    _LENGTH: "a length decides about an operator, such as the batch about the groups of a "
    "convolution: give every axis of model.inputs its number, that of samples too",
    "a static shape": NUMBERS,
    _FAKE: _DIFFERENTIATES,
    "functorch tensor": _DIFFERENTIATES,
    _CLASS: "return a dictionary or a tuple, or register the class where it is defined, by "
    "torch.export.register_dataclass(CLASS)",
    _LEFT_OUT: "an input that model.inputs leaves out may be needed where PyTorch traces forward: "
    f"name it there, such as attention_mask, {_NO_GRAPH}",
}
_USUAL_REMEDY = (
    "check model.inputs against the module's forward: they are all that it gets, and an axis that "
    "the network fixes needs its number"
)


def example_inputs(inputs: Sequence[TensorSpec], chunk: int = 0) -> dict[str, torch.Tensor]:
    """Return zero tensors of the inputs' shapes, with a different length for each dynamic axis.

    Heights, widths and waveforms are large enough for the strides and windows of usual networks.

    Args:
        chunk: how many positions of a sequence the network computes at a time. Lengths are above,
            since the exporter takes a single chunk for one that no length changes.
    """
    lengths: dict[str, int] = {}
    for spec in inputs:
        for index, axis in enumerate(spec.shape):
            if isinstance(axis, str):
                image = len(spec.shape) >= _IMAGE_RANK and index >= _FIRST_SPATIAL
                usual = 64 + 32 * len(lengths) if image else 2 + 3 * len(lengths)
                usual += _windows(spec) if index == len(spec.shape) - 1 else 0
                usual += chunk if index == 1 else 0
                lengths.setdefault(axis, usual)
    made: dict[str, torch.Tensor] = {}
    for spec in inputs:
        shape = [lengths[d] if isinstance(d, str) else int(d or 1) for d in spec.shape]
        made[spec.name] = torch.zeros(shape, dtype=getattr(torch, spec.dtype))
    return made


def _windows(spec: TensorSpec) -> int:
    """Return positions of a waveform, or of channels over time, that windows surely fit into."""
    rank = len(spec.shape)
    if not spec.dtype.startswith("float") or rank not in (_SOUND_RANK, _SOUND_RANK + 1):
        return 0
    if rank == _SOUND_RANK or spec.shape[1] in (1, 2):
        return _SOUND
    return _LONGER if isinstance(spec.shape[1], int) else 0


def lower(module: torch.nn.Module, inputs: Sequence[TensorSpec]) -> ir.Model:
    """Lower a module in evaluation mode; initializers are named after its parameters.

    Args:
        module: the network; its parameters are shared with the result, not copied.
        inputs: names, shapes and dtypes; a string in a shape is a dynamic axis.

    Raises:
        ModelError: the module cannot be exported.
    """
    if any(isinstance(part, GraphModule) for part in module.modules()):
        raise ModelError(
            f"module {type(module).__name__}",
            "executes a graph, and PyTorch cannot export it",
            "give the file or the module that it was made from, and all passes in one call: "
            "finetune and distill train between others",
        )
    module.eval()
    chunk = _chunk(module)
    with assigned_buffers(module) as assigned, named_parameters(module, [s.name for s in inputs]):
        example = example_inputs(inputs, chunk)
        program = _exported(module, inputs, example)
        if _takes_short_only(program):
            further = example_inputs(inputs, chunk + _LONGER)
            try:
                longer = _exported(module, inputs, further)
            except ModelError:  # it takes no longer ones
                longer = program
            if not _takes_short_only(longer):
                program, example = longer, further
    check_stateless(module, program.exported_program, assigned)
    check_sizes(module, program.exported_program, inputs, example)
    model = program.model
    keys = _keys(program.exported_program)
    give_way(model, module, [*(spec.name for spec in inputs), *keys])
    _name_outputs(model, keys)
    attach_weights(model, module)
    return model


def _exported(
    module: nn.Module, inputs: Sequence[TensorSpec], example: dict[str, torch.Tensor]
) -> torch.onnx.ONNXProgram:
    dynamic = {
        s.name: {i: d for i, d in enumerate(s.shape) if isinstance(d, str)} or None for s in inputs
    }
    args, kwargs, shapes = bound(module, example, dynamic)
    try:
        with (
            quiet_libraries(),
            redirect_stderr(StringIO()),
            without_collector(),
            _without_gradients(module),
            _without_signatures(),
            _without_traces(),
            without_fast_paths(),
            whole_recurrences(),
            plain_experts(module),
            without_idle_masks(),
            OtherCalls(),
        ):
            program = torch.onnx.export(
                module,
                args,
                kwargs=kwargs,
                dynamo=True,
                optimize=False,
                opset_version=OPSET,
                dynamic_shapes=shapes,
                input_names=[s.name for s in inputs],
                custom_translation_table={**translations(), **recurrences()},
                verbose=False,
            )
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, TypeError, ValueError) as error:
        cause = _root_cause(error)
        raise ModelError(
            f"module {type(module).__name__}",
            f"cannot be lowered to a graph ({cause})",
            _remedy(module, cause),
        ) from error
    if program is None:
        raise ModelError(
            f"module {type(module).__name__}", "was not exported", "use a newer PyTorch"
        )
    return program


def _takes_short_only(program: torch.onnx.ONNXProgram) -> bool:
    """Whether a graph holds for a few positions only, as forward pads what is below a window."""
    exported = program.exported_program
    ranges = {} if exported is None else exported.range_constraints
    axes = (bounds for symbol, bounds in ranges.items() if str(symbol).startswith("s"))
    return any(bounds.upper < _LONGER for bounds in axes)


def _remedy(module: nn.Module, cause: str) -> str:
    found = computed_by(module, cause) if _NO_FUNCTION in cause else None
    if found is not None:
        owner = ".".join(filter(None, ("network", found[0])))
        return (
            f"the parametrization of {'.'.join(filter(None, found))!r} calls it: make the trained "
            "weight a plain one by torch.nn.utils.parametrize.remove_parametrizations("
            f"{owner}, {found[1]!r}), save that, and build the network without the parametrization"
        )
    return next((r for part, r in _REMEDIES.items() if part in cause), _USUAL_REMEDY)


def _chunk(module: torch.nn.Module) -> int:
    """Return how many positions of a sequence a state space model computes at a time, or 0."""
    config = getattr(module, "config", None)
    sizes = (getattr(config, name, None) for name in _CHUNKS)
    return max(0, *(size for size in sizes if isinstance(size, int)), 0)


@contextmanager
def _without_gradients(module: torch.nn.Module) -> Iterator[None]:
    """Freeze all parameters while a graph is made.

    The exporter looks at a module more than once, with gradients and without, and the kernel that
    PyTorch chooses for attention, and so the order of its results in memory, depends on them.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _without_signatures() -> Iterator[None]:
    """Let the exporter have the domains of its functions without parsing their sources.

    It asks all 500 functions for their signatures and reads only the domain, which each has at
    hand. To parse the sources takes a third of a second.
    """
    from onnxscript import TracedOnnxFunction

    signature = "function_ir"
    parsed = vars(TracedOnnxFunction)[signature]
    setattr(TracedOnnxFunction, signature, property(lambda each: _Signature(each, parsed)))
    try:
        yield
    finally:
        setattr(TracedOnnxFunction, signature, parsed)


class _Signature:
    """The signature of an exporter's function, parsed where more than its domain is read."""

    def __init__(self, function: Any, parsed: property):
        self._function, self._parsed = function, parsed
        self.domain = function.opset.domain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parsed.__get__(self._function), name)


@contextmanager
def _without_traces() -> Iterator[None]:
    """Let the exporter not note which lines of code call each operator: nothing here reads that.

    To look them up takes an eighth of the time of a small network. PyTorch has the setting from
    2.12; none before reads it.
    """
    name = "do_not_emit_stack_traces"
    before = getattr(torch.fx.config, name, False)
    setattr(torch.fx.config, name, True)
    try:
        yield
    finally:
        setattr(torch.fx.config, name, before)


def _keys(program: torch.export.ExportedProgram | None) -> Sequence[str]:
    """Return the keys under which a module returns tensors; nothing if it returns no dictionary."""
    made = None if program is None else program.call_spec.out_spec
    if program is None or made is None or made.type not in (dict, OrderedDict):
        return ()
    if not all(child.is_leaf() for child in made.children()):
        return ()
    outputs = program.graph_signature.output_specs
    returned = [output.arg for output in outputs if output.kind == OutputKind.USER_OUTPUT]
    pairs = zip(made.context, returned, strict=True)
    keys = [key for key, value in pairs if isinstance(value, TensorArgument)]  # others are None
    return keys if all(isinstance(key, str) and key for key in keys) else ()


def _name_outputs(model: ir.Model, keys: Sequence[str]) -> None:
    """Name outputs by ``keys``, or a single one ``output``, several ``output_0``, ``output_1``, ...

    An input or a parameter that is returned keeps its name, and so does what is returned twice; a
    key that an input or a submodule's parameter has is not used.
    """
    outputs = model.graph.outputs
    for index, value in enumerate(outputs):
        if value.producer() is None or value in outputs[:index]:
            copy = ir.node("Identity", [value])
            copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
            model.graph.append(copy)
            outputs[index] = copy.outputs[0]
    taken = set(model.graph.initializers) | {v.name for v in model.graph.inputs}
    for index, value in enumerate(outputs):
        usual = "output" if len(outputs) == 1 else f"output_{index}"
        key = keys[index] if len(keys) == len(outputs) else usual
        name = usual if key in taken else key
        if name not in taken:
            value.name = name


def _root_cause(error: BaseException) -> str:
    """Return the first sentence of the innermost cause, since the exporter wraps errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = message_lines(error)
    if not lines:
        return type(error).__name__
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    if _CLASS in said:  # what follows is about PyTorch's own code
        said = said.partition(". If")[0]
    return f"{type(error).__name__}: {said[:300]}"


def call(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Call a module with inputs by name, or by position if its forward uses other names.

    Returns:
        Its output tensors, in the order of the outputs of its graph.
    """
    args, named = arguments(module, tensors)
    result = module(*args, **named)
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def arguments(
    module: nn.Module, tensors: Mapping[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return inputs as a module is called with: by position, or by name if its forward has them.

    They are copies, for a forward may write into its inputs, and others read the samples after it.
    """
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    if takes_names(module, copies):
        return (), copies
    return tuple(copies.values()), {}


class NamedModule(nn.Module):
    """A module whose inputs and outputs have names.

    Args:
        inputs: names of its inputs, in the order of its forward.
        outputs: names of its outputs, in their order.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[str], outputs: Sequence[str]):
        super().__init__()
        self.module = module
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    def forward(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Run the network on inputs by name; return its outputs by name.

        Raises:
            ModelError: it does not return as many tensors as its graph.
        """
        results = call(self.module, {name: tensors[name] for name in self.inputs})
        if len(results) != len(self.outputs):
            raise ModelError(
                f"module {type(self.module).__name__}",
                f"returns {len(results)} tensors in training and {len(self.outputs)} in evaluation "
                f"({', '.join(self.outputs)})",
                "let its forward return the same in both",
            )
        return dict(zip(self.outputs, results, strict=True))
