"""Error-compensating rounding from inputs: the codes that their second moment gives."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compressor.passes.quantize.maths.affine import absmax_parameters, quantize
from compressor.passes.quantize.maths.gptq import gptq, output_error
from compressor.passes.quantize.maths.gptq_vectors import gptq_from_vectors
from compressor.types.layers import QuantizedTensor, Scheme

SCHEMES = [
    Scheme(8),
    Scheme(4),
    Scheme(3, symmetric=False),
    Scheme(4, signed=False, symmetric=False, granularity="tensor"),
    Scheme(4, granularity="group", group=10),
]


def problem(rows: int, columns: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a weight and correlated inputs of very different power."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(columns, 1 + count // 4, generator=generator)
    inputs = few @ torch.randn(1 + count // 4, count, generator=generator)
    inputs += 0.3 * torch.randn(columns, count, generator=generator)
    inputs *= torch.randn(columns, 1, generator=generator).exp()
    return torch.randn(rows, columns, generator=generator), inputs


def both(
    matrix: Tensor, inputs: Tensor, scheme: Scheme, damping: float = 0.01
) -> tuple[QuantizedTensor, QuantizedTensor]:
    scale, zero = absmax_parameters(matrix, scheme)
    usual = gptq(matrix, inputs @ inputs.T, scale, zero, scheme, damping)
    return gptq_from_vectors(matrix, inputs, scale, zero, scheme, damping), usual


def check_same(matrix: Tensor, inputs: Tensor, scheme: Scheme, damping: float = 0.01) -> None:
    made, usual = both(matrix, inputs, scheme, damping)
    assert made.codes.dtype == usual.codes.dtype
    assert torch.equal(made.scale, usual.scale)
    assert torch.equal(made.zero_point, usual.zero_point)
    # float32 tips a few halves the other way, and what follows in their rows.
    assert (made.codes == usual.codes).float().mean() > 0.97
    moment = inputs @ inputs.T
    errors = [output_error(matrix, each, moment) for each in (made, usual)]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_are_those_of_the_moment(scheme: Scheme) -> None:
    check_same(*problem(24, 160, 90), scheme)


@pytest.mark.parametrize("columns", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("count", [1, 20, 299])
def test_codes_are_those_of_the_moment_at_every_size_of_block(columns: int, count: int) -> None:
    check_same(*problem(40, columns, count), Scheme(4))


class Largest(TorchFunctionMode):
    """Notes how many elements the largest tensor has that is computed."""

    elements = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_the_moment_of_few_vectors_is_not_computed() -> None:
    matrix, inputs = problem(4, 130, 20)
    scale, zero = absmax_parameters(matrix, Scheme(4))
    with Largest() as largest:
        gptq_from_vectors(matrix, inputs, scale, zero, Scheme(4))
    assert largest.elements == 128 * 128, "that of a block, in place of 130 * 130"
    check_same(matrix, inputs, Scheme(4))


def test_columns_of_equal_power_are_rounded_in_their_order() -> None:
    matrix, inputs = problem(24, 160, 90)
    check_same(matrix, torch.where(inputs > 0, 1.0, -1.0), Scheme(4))


def test_weights_may_be_halves() -> None:
    matrix, inputs = problem(16, 200, 60)
    half = matrix.to(torch.bfloat16)
    scale, zero = absmax_parameters(half, Scheme(4))
    made, whole = (
        gptq_from_vectors(weight, inputs, scale, zero, Scheme(4)) for weight in (half, half.float())
    )
    assert torch.equal(made.codes, whole.codes)


def test_what_cannot_be_factored_by_blocks_is_rounded_by_the_moment() -> None:
    """One direction, beside which float32 loses the damping, and another that it hides."""
    matrix, inputs = problem(16, 200, 60)
    scheme = Scheme(3, symmetric=False)
    inputs = torch.stack([torch.ones(200), 1e-3 * inputs[:, 0].sign()], dim=1)
    made, usual = both(matrix, inputs, scheme, damping=1e-9)
    assert torch.equal(made.codes, usual.codes)
    damped, _ = both(matrix, inputs, scheme)
    assert not torch.equal(made.codes, damped.codes)


def test_pruned_weights_stay_zero() -> None:
    matrix, inputs = problem(16, 200, 60)
    matrix[:, ::3] = 0
    made, usual = both(matrix, inputs, Scheme(4))
    assert not made.codes[:, ::3].any()
    assert (made.codes == usual.codes).float().mean() > 0.97


def test_columns_without_input_are_rounded_to_nearest() -> None:
    matrix, inputs = problem(16, 200, 60)
    inputs[5:150] = 0
    scale, zero = absmax_parameters(matrix, Scheme(4))
    nearest = quantize(matrix, scale, zero, Scheme(4))
    made, _ = both(matrix, inputs, Scheme(4))
    assert torch.equal(made.codes[:, 5:150], nearest.codes[:, 5:150])
    assert not torch.equal(made.codes, nearest.codes)
    silent, _ = both(matrix, torch.zeros_like(inputs), Scheme(4))
    assert torch.equal(silent.codes, nearest.codes)


def test_columns_without_input_are_not_in_the_mean_that_damping_is_a_share_of() -> None:
    matrix, inputs = problem(16, 200, 60)
    inputs[5:195] = 0
    check_same(matrix, inputs, Scheme(4), damping=0.5)


def test_no_row_is_worse_than_nearest() -> None:
    generator = torch.Generator().manual_seed(1)
    # Coarse codes and a clipped range: compensation alone makes some rows worse.
    matrix = torch.randn(200, 30, generator=generator)
    inputs = torch.rand(30, 8, generator=generator).add(0.5)
    scheme = Scheme(2, symmetric=False)
    scale, zero = absmax_parameters(matrix, scheme)
    nearest = quantize(matrix, scale, zero, scheme)
    made = gptq_from_vectors(matrix, inputs, scale, zero, scheme)
    errors = [((matrix - each.dequantize()) @ inputs).square().sum(1) for each in (made, nearest)]
    assert bool((errors[0] <= errors[1] * 1.001).all())
    assert bool((made.codes == nearest.codes).all(1).any())


def test_inputs_have_to_fit() -> None:
    matrix, inputs = problem(4, 30, 8)
    scale, zero = absmax_parameters(matrix, Scheme(4))
    with pytest.raises(ValueError, match=r"moment \[29, 29\] does not fit 30 columns"):
        gptq_from_vectors(matrix, inputs[1:], scale, zero, Scheme(4))
    inputs[3, 2] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        gptq_from_vectors(matrix, inputs, scale, zero, Scheme(4))


def test_damping_is_a_hundredth_of_the_mean_power_unless_said_otherwise() -> None:
    matrix, inputs = problem(24, 40, 20)
    scale, zero = absmax_parameters(matrix, Scheme(3))
    usual = gptq_from_vectors(matrix, inputs, scale, zero, Scheme(3))
    said, more = (
        gptq_from_vectors(matrix, inputs, scale, zero, Scheme(3), damping)
        for damping in (0.01, 1.01)
    )
    assert torch.equal(usual.codes, said.codes)
    assert not torch.equal(usual.codes, more.codes)
