"""Record what one run of a graph calls.

What depends on no input is computed here, once. Each reader of codes dequantizes for itself, as
the tools expect that read such programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from torch.nn import functional

from compressor.errors import SpecError
from compressor.exporters.torch_program.calls import (
    Call,
    Codes,
    Known,
    Recorded,
    Stored,
    bounded,
    from_channel_codes,
    from_codes,
    gelu_by_tanh,
    prelu_of_halves,
    quantized,
    to_codes,
)
from compressor.exporters.torch_program.steps import (
    ALIKE,
    CLIP,
    DEQUANTIZE,
    GELU,
    GEMM,
    MATMUL,
    PRELU,
    QUANTIZE,
    RELU,
    SHAPE,
    SIZE,
    by_tanh,
    codes_of,
    function_of,
    refusal,
    stored_of,
)
from compressor.models.element_types import from_numpy
from compressor.models.executor.compiler import Compiler, flattened
from compressor.models.executor.program import ABSENT, Op, Step, run_step

_OFFSET = 128  # between codes of uint8 and of int8
_MATRIX = 2
_BYTES = (torch.int8, torch.uint8)


@dataclass
class Recorder:
    """Runs a graph once, and keeps what it calls.

    Args:
        planned: constants that are not computed yet are taken as zeros: only sizes count.
        alone: weights keep their codes also where activations have none.

    Attributes:
        widened: slots of quantized weights that are written as floats.
    """

    model: ir.Model
    planned: bool = False
    alone: bool = False
    widened: set[int] = field(default_factory=set)
    _buffers: dict[str, Tensor] = field(default_factory=dict)
    _names: dict[object, str] = field(default_factory=dict)  # of buffers
    _calls: list[Call] = field(default_factory=list)
    _known: dict[int, Tensor] = field(default_factory=dict)
    _unknown: set[int] = field(default_factory=set)  # of those, what is not computed yet
    _stored: dict[int, Stored] = field(default_factory=dict)
    _real: dict[int, Tensor] = field(default_factory=dict)  # what depends on inputs, in this run
    _codes: dict[int, Codes] = field(default_factory=dict)
    _dequantized: dict[int, tuple[int, Codes]] = field(default_factory=dict)  # codes behind floats
    _readers: dict[int, list[Step]] = field(default_factory=dict)
    _last: int = 0

    def record(self, inputs: Sequence[Tensor]) -> Recorded:
        """Return a module that computes the graph for inputs of these shapes.

        Raises:
            SpecError: a node cannot be exported; it is named.
            ModelError: the graph does not run on such inputs.
        """
        model = flattened(self.model)
        compiler = Compiler(model.opset_imports, {}, joins=False)
        program, captured = compiler.compile(model.graph)
        self._last = program.slots
        taken = program.inputs[: len(inputs)]
        for slot, value in zip(program.inputs[len(inputs) :], captured, strict=True):
            constant = compiler.constants.get(value)
            self._known[slot] = self._value(slot, value) if constant is None else constant
        self._real.update(zip(taken, inputs, strict=True))
        for step in program.steps:
            for slot in step.inputs:
                self._readers.setdefault(slot, []).append(step)
        with torch.no_grad():
            for step in program.steps:
                self._step(step)
            outputs = tuple(self._output(slot) for slot in program.outputs)
        module = Recorded(self._buffers, taken)
        module.calls, module.outputs = self._calls, outputs
        return module.eval()

    def _value(self, slot: int, value: ir.Value) -> Tensor:
        tensor = value.const_value
        assert tensor is not None
        if self.planned and isinstance(tensor, ir.LazyTensor):
            self._unknown.add(slot)
            tensor = ir.tensor(np.zeros(tensor.shape.numpy(), tensor.dtype.numpy()))
        return from_numpy(tensor)

    def _step(self, step: Step) -> None:
        function = function_of(step)
        if step.host is None:
            raise refusal(step, "chooses what it computes while it runs")
        if function is DEQUANTIZE and self._dequantize(step):
            return
        if all(slot == ABSENT or slot in self._known for slot in step.inputs):
            made = step.run(*(self._known.get(slot) for slot in step.inputs))
            self._keep(step, made, known=True)
        elif function is QUANTIZE:
            self._quantize(step)
        elif function in (SHAPE, SIZE):
            self._keep(step, step.run(self._floats(step.inputs[0])), known=True)
        elif (function in (GEMM, MATMUL) and self._linear(step)) or (
            function is CLIP and self._clip(step)
        ):
            return
        elif function is GELU and by_tanh(step):
            self._call(step, gelu_by_tanh, [self._operand(step, 0)])
        elif function is PRELU and self._beside_codes(step):
            self._call(step, prelu_of_halves, [self._operand(step, i) for i in range(2)])
        elif any(slot in self._codes for slot in step.inputs):
            self._through(step)
        elif function in ALIKE:
            self._call(step, step.run, [self._alike(step, i) for i in range(len(step.inputs))])
        else:
            self._call(step, step.run, [self._operand(step, i) for i in range(len(step.inputs))])

    def _dequantize(self, step: Step) -> bool:
        """Note what a DequantizeLinear gives; whether it is not to be computed here."""
        codes, scale = step.inputs[0], self._known.get(step.inputs[1])
        zero = self._known.get(step.inputs[2]) if len(step.inputs) > 2 else None
        if codes in self._codes and scale is not None:
            self._dequantized[step.outputs[0]] = codes, codes_of(step, scale, zero)
            return True
        array = self._known.get(codes)
        if array is None or scale is None:
            raise refusal(step, "has a scale that is computed")
        if array.dtype not in _BYTES:
            return False
        looked_at = torch.zeros(1) if zero is None else zero
        unknown = self._unknown.intersection(step.inputs[2:])
        stored = stored_of(step, array, scale, None if unknown else looked_at)
        if stored is None:
            self.widened.add(step.outputs[0])
            return False
        self._stored[step.outputs[0]] = stored
        return True

    def _quantize(self, step: Step) -> None:
        scale = self._known.get(step.inputs[1])
        zero = self._known.get(step.inputs[2]) if len(step.inputs) > 2 else None
        if scale is None:
            raise refusal(step, "has a scale that is computed")
        made = codes_of(step, scale, zero)
        operand = self._operand(step, 0)
        self._call(step, to_codes(made), [operand])
        self._codes[step.outputs[0]] = made

    def _linear(self, step: Step) -> bool:
        """Write a product with a constant matrix as PyTorch's linear; whether it is one."""
        a, b = step.inputs[:2]
        options = getattr(step.run, "keywords", {})
        plain = options.get("alpha", 1) == options.get("beta", 1) == 1
        if not plain or options.get("transA") or not (b in self._known or b in self._stored):
            return False
        held = self._stored.get(b)
        matrix = self._known[b] if held is None else held.codes
        if held is not None and not self._integer(step):
            self.widened.add(b)
            matrix, held = held.floats, None
        turned = not options.get("transB", False)
        if matrix.dim() != _MATRIX or a in self._codes:
            return False
        if held is not None and held.scale.numel() > 1 and held.axis != int(turned):
            return False
        count = matrix.shape[int(turned)]
        bias = step.inputs[2] if len(step.inputs) > _MATRIX else ABSENT
        if bias != ABSENT and (bias not in self._known or self._known[bias].numel() != count):
            return False
        weight: int | str
        if held is None:
            weight = self._buffer((b, turned), matrix.t() if turned else matrix)
        else:
            weight = self._weight((b, turned), held.transposed() if turned else held)
        third = (
            None if bias == ABSENT else self._buffer((bias, count), self._known[bias].reshape(-1))
        )
        self._call(step, functional.linear, [self._operand(step, 0), weight, third])
        return True

    def _clip(self, step: Step) -> bool:
        """Write limits as numbers; whether they are known."""
        bounds = step.inputs[1:]
        if any(slot != ABSENT and slot not in self._known for slot in bounds):
            return False
        low, high = (
            [None if x == ABSENT else float(self._known[x]) for x in bounds] + [None, None]
        )[:2]
        if step.inputs[0] in self._codes or not self._floats(step.inputs[0]).is_floating_point():
            return False
        codes, operand = self._codes_after(step), self._alike(step, 0)
        if codes is not None and codes.implies(low, high):
            low = high = None
        self._call(step, partial(bounded, low, high), [operand])
        return True

    def _alike(self, step: Step, place: int) -> int | str | Tensor | None:
        """Return an input with the codes that the result has, if it has codes.

        XNNPACK moves and bounds codes as they are. What a layer gives is quantized before it is
        bounded, since no layer takes limits over but those of a Relu.
        """
        how, operand, slot = self._codes_after(step), self._operand(step, place), step.inputs[place]
        if how is None or operand is None or isinstance(operand, Tensor):
            return operand
        held = self._dequantized.get(slot)
        if held is not None and held[1] == how:
            return operand
        if function_of(step) is RELU and held is None:
            return operand
        if isinstance(operand, str):
            codes: int | str = self._buffer((slot, how), quantized(how, self._buffers[operand]))
        else:
            codes = self._fresh()
            self._call(step, to_codes(how), [operand], [codes])
        made = self._fresh()
        self._call(step, partial(from_codes, how.scale, how.zero), [codes], [made])
        return made

    def _integer(self, step: Step) -> bool:
        """Whether XNNPACK computes a layer with codes: it reads, and gives, nothing else."""
        if self.alone:
            return True
        activations = [slot for slot in step.inputs if not (slot in self._known or slot == ABSENT)]
        stored = [self._stored[x] for x in activations if x in self._stored]
        read = [self._dequantized[x][1] for x in activations if x in self._dequantized]
        if len(stored) + len(read) < len(activations):
            return False
        after = step
        for _ in range(2):
            readers = self._readers.get(after.outputs[0], [])
            if (written := self._codes_after(after)) is not None:
                return all(weight.multiplies(codes, written) for weight in stored for codes in read)
            if len(readers) != 1 or function_of(readers[0]) not in (RELU, CLIP):
                return False
            (after,) = readers
        return False

    def _codes_after(self, step: Step) -> Codes | None:
        """Return what quantizes the result of a step, if nothing else reads it."""
        readers = self._readers.get(step.outputs[0], [])
        if len(readers) != 1 or function_of(readers[0]) is not QUANTIZE:
            return None
        scale, zero = (self._known.get(slot) for slot in (*readers[0].inputs[1:3], ABSENT)[:2])
        return None if scale is None else codes_of(readers[0], scale, zero)

    def _beside_codes(self, step: Step) -> bool:
        """Whether a step reads what codes give, or gives what becomes codes."""
        return step.inputs[0] in self._dequantized or self._codes_after(step) is not None

    def _through(self, step: Step) -> None:
        """Let an operator that moves codes move floats, which are quantized again as they were."""
        codes = {self._codes[slot] for slot in step.inputs if slot in self._codes}
        if len(codes) > 1:
            raise refusal(step, "reads codes of several scales")
        (how,) = codes
        operands: list[int | str | Tensor | None] = []
        for place, slot in enumerate(step.inputs):
            if slot in self._codes:
                operands.append(self._dequantize_again(slot, how))
            elif slot in self._known and self._known[slot].dtype in _BYTES:
                shift = _OFFSET * (self._known[slot].dtype == torch.uint8)
                floats = (self._known[slot].to(torch.float32) - shift - how.zero) * how.scale
                operands.append(self._buffer((slot, how), floats))
            else:
                operands.append(self._operand(step, place))
        results = [self._fresh() if slot else ABSENT for slot in step.outputs]
        self._call(step, step.run, operands, results)
        for slot, floats_slot in zip(step.outputs, results, strict=True):
            if slot:
                self._call(step, to_codes(how), [floats_slot], [slot])
                self._codes[slot] = how

    def _operand(self, step: Step, place: int) -> int | str | Tensor | None:
        """Return what an input of a step is in the module."""
        slot = step.inputs[place]
        if slot == ABSENT:
            return None
        if slot in self._dequantized:
            return self._dequantize_again(*self._dequantized[slot])
        if slot in self._stored and self._integer(step):
            return self._weight(slot, self._stored[slot])
        if slot in self._stored:
            self.widened.add(slot)
            return self._buffer((slot, "floats"), self._stored[slot].floats)
        if slot not in self._known:
            return slot
        if step.host is not None and place in step.host:
            return self._known[slot].as_subclass(Known)
        return self._buffer(slot, self._known[slot])

    def _dequantize_again(self, slot: int, how: Codes) -> int:
        made = self._fresh()
        run = partial(from_codes, how.scale, how.zero)
        self._calls.append(Call(run, (slot,), (made,)))
        self._real[made] = run(self._real[slot])
        return made

    def _weight(self, key: object, held: Stored) -> int:
        """Return the number of a weight's floats, which are computed of its codes."""
        made = self._fresh()
        codes = self._buffer((key, "codes"), held.codes)
        self._real[made] = held.floats
        if held.scale.numel() == 1:
            run = partial(from_codes, float(held.scale), 0)
            self._calls.append(Call(run, (codes,), (made,)))
            return made
        scales = self._buffer((key, "scales"), held.scale)
        zeros = self._buffer((key, "zeros"), torch.zeros(held.scale.shape, dtype=torch.int64))
        run = partial(from_channel_codes, held.axis)
        self._calls.append(Call(run, (codes, scales, zeros), (made,)))
        return made

    def _buffer(self, key: object, tensor: Tensor) -> str:
        if key not in self._names:
            self._names[key] = f"constant_{len(self._names)}"
            self._buffers[self._names[key]] = tensor.contiguous()
        return self._names[key]

    def _call(
        self,
        step: Step,
        run: Op,
        operands: Sequence[int | str | Tensor | None],
        results: Sequence[int] = (),
    ) -> None:
        """Run a call here, and keep it."""
        kept = tuple(results or step.outputs)
        self._calls.append(Call(run, tuple(operands), kept))
        given = (
            self._real[x] if isinstance(x, int) else self._buffers[x] if isinstance(x, str) else x
            for x in operands
        )
        made = run_step(step, run, list(given))
        for slot, tensor in zip(kept, made, strict=False):
            if slot and tensor is not None:
                self._real[slot] = tensor

    def _keep(self, step: Step, made: Any, *, known: bool) -> None:
        for slot, tensor in zip(
            step.outputs, made if isinstance(made, tuple) else (made,), strict=False
        ):
            if slot:
                (self._known if known else self._real)[slot] = tensor.detach()

    def _floats(self, slot: int) -> Tensor:
        return self._real[self._dequantized[slot][0] if slot in self._dequantized else slot]

    def _output(self, slot: int) -> int:
        if slot in self._dequantized:
            return self._dequantize_again(*self._dequantized[slot])
        if slot in self._known or slot in self._stored:
            held = self._known.get(slot)
            name = self._buffer(slot, self._stored[slot].floats if held is None else held)
            made = self._fresh()
            self._calls.append(Call(torch.clone, (name,), (made,)))
            return made
        if slot in self._codes:
            raise SpecError("the graph", "an output of the model is codes", "let it return floats")
        return slot

    def _fresh(self) -> int:
        self._last += 1
        return self._last
