"""Let PyTorch's exporter build its tables of operators once, not for every module.

That is more than half the time of lowering a small network. A user's process lowers one module and
gains nothing by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from functools import cache
from typing import Any

import pytest
from torch._export import utils
from torch._subclasses.fake_impls import _deregister_op_impl, op_implementations_dict
from torch.export import exported_program
from torch.onnx._internal.exporter._registration import ONNXRegistry

from compressor.models.torch.translations import translations

Ways = Mapping[Any, Callable[..., Any]]
"""What becomes of each operator that is composed of others."""


def build_once(patch: pytest.MonkeyPatch) -> None:
    """Replace what builds tables by what remembers them."""
    translations()  # adds to the table; the first export may be PyTorch's own call in a test
    patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(_copied(ONNXRegistry.from_torchlib)))
    # It names operators that torch has, some fifty times for each module.
    patch.setattr(utils, "_materialize_cpp_cia_ops", cache(utils._materialize_cpp_cia_ops))
    patch.setattr(utils, "_check_valid_to_preserve", cache(utils._check_valid_to_preserve))
    name = "_override_composite_implicit_decomp"
    patch.setattr(exported_program, name, _remembering(getattr(exported_program, name)))


def _copied(build: Callable[[int], ONNXRegistry]) -> Callable[[int], ONNXRegistry]:
    """Give each export a copy, since it adds the functions of its caller."""
    build = cache(build)

    def copied(opset_version: int) -> ONNXRegistry:
        table = copy(build(opset_version))
        table.functions = {name: list(ways) for name, ways in table.functions.items()}
        return table

    return copied


def _remembering(
    override: Callable[[Ways], AbstractContextManager[None]],
) -> Callable[[Ways], AbstractContextManager[None]]:
    """Return what gives operators the kernels that ``override`` has made for them once.

    It makes ten kernels for each of six hundred operators, the same each time: an operator is kept
    or becomes what it is composed of.
    """
    made: dict[Any, tuple[dict[Any, Any], Any]] = {}
    kept = exported_program._special_op_to_preserve_cia

    @contextmanager
    def remembered(ways: Ways) -> Iterator[None]:
        new = {each: way for each, way in ways.items() if (each, way is kept) not in made}
        with override(new):
            for each, way in new.items():
                rule = op_implementations_dict.get(each)
                made[each, way is kept] = dict(each.py_kernels), rule
        before = {each: dict(each.py_kernels) for each in ways}
        for each, way in ways.items():
            kernels, rule = made[each, way is kept]
            each.py_kernels.update(kernels)
            each._dispatch_cache.clear()
            op_implementations_dict[each] = rule
        try:
            yield
        finally:
            for each, kernels in before.items():
                each.py_kernels.clear()
                each.py_kernels.update(kernels)
                each._dispatch_cache.clear()
                _deregister_op_impl(each)

    return remembered
