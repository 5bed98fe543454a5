"""Operators that run subgraphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.program import Op, Result


def _if(node: NodeView) -> Op:
    outputs = node.output_count
    then, otherwise = node.body("then_branch"), node.body("else_branch")

    def run(condition: Tensor, *captured: Tensor) -> Result:
        branch = then if bool(condition.item()) else otherwise
        return tuple(branch((), captured))[:outputs]

    return run


def _loop(node: NodeView) -> Op:
    body = node.body("body")
    leading = min(node.input_count, 2)  # the trip count and the condition, both optional
    carried = node.input_count - leading
    collected = node.output_count - carried

    def run(*inputs: Tensor) -> Result:
        limit, condition = (*inputs[:leading], None, None)[:2]
        state, captured = list(inputs[leading:][:carried]), inputs[leading + carried :]
        most = None if limit is None else int(limit.item())
        going = torch.tensor(True) if condition is None else condition
        rows: list[list[Tensor]] = [[] for _ in range(collected)]
        turn = 0
        while (most is None or turn < most) and bool(going.item()):
            results = body([torch.tensor(turn, dtype=torch.int64), going, *state], captured)
            going, state = results[0], results[1 : carried + 1]
            for row, element in zip(rows, results[carried + 1 :], strict=True):
                row.append(element)
            turn += 1
        blanks = body.blanks[carried + 1 :]
        return (
            *state,
            *(torch.stack(row) if row else none for row, none in zip(rows, blanks, strict=True)),
        )

    return run


def _scan(node: NodeView) -> Op:
    if node.opset < 9:
        raise node.refuse("its form of opset 8 is not supported")
    scanned = node.integer("num_scan_inputs")
    body = node.body("body")
    carried = node.input_count - scanned
    collected = node.output_count - carried
    in_axes = node.integers("scan_input_axes") or (0,) * scanned
    in_backward = node.integers("scan_input_directions") or (0,) * scanned
    out_axes = node.integers("scan_output_axes") or (0,) * collected
    out_backward = node.integers("scan_output_directions") or (0,) * collected

    def run(*inputs: Tensor) -> Result:
        state = list(inputs[:carried])
        sequences = inputs[carried : carried + scanned]
        captured = inputs[carried + scanned :]
        slices = [
            _rows(x, axis, bool(backward))
            for x, axis, backward in zip(sequences, in_axes, in_backward, strict=True)
        ]
        rows: list[list[Tensor]] = [[] for _ in range(collected)]
        for elements in zip(*slices, strict=True):
            results = body([*state, *elements], captured)
            state = results[:carried]
            for row, element in zip(rows, results[carried:], strict=True):
                row.append(element)
        stacked = (
            torch.stack(row[::-1] if backward else row, axis) if row else none.movedim(0, axis)
            for row, none, axis, backward in zip(
                rows, body.blanks[carried:], out_axes, out_backward, strict=True
            )
        )
        return (*state, *stacked)

    return run


def _rows(x: Tensor, axis: int, backward: bool) -> Sequence[Tensor]:
    rows = x.unbind(axis)
    return rows[::-1] if backward else rows


CONTROL: Table = {"If": _if, "Loop": _loop, "Scan": _scan}
