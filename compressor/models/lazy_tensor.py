"""Tensors whose elements are computed, or checked, when an operator needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from threading import Lock, Thread
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compressor.errors import CompressorError

_ASKS = frozenset(
    {
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.element_size, Tensor.stride),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__len__),
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "ndim", "itemsize", "nbytes", "layout", "grad"),
                *("requires_grad", "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized"),
                *("is_leaf", "grad_fn"),
            )
        ),
    }
)
"""What is answered without the elements."""

_STEPS_IN_PLACE = frozenset({"__setitem__", "__set__"}) | {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "div", "truediv", "and", "or", "xor", "pow", "lshift")
}


class OnceChecked:
    """A check that is made once, by whoever needs its result first; others wait for it.

    Args:
        compare: raises what every later use raises too; copies what it compares to the bytes that
            it is given, if any.
    """

    def __init__(self, compare: Callable[[memoryview | None], None]):
        self._compare: Callable[[memoryview | None], None] | None = compare
        self._lock = Lock()

    @property
    def passed(self) -> bool:
        """Whether it has been made, and nothing was wrong."""
        return self._compare is None

    def ensure(self, copy: memoryview | None = None) -> bool:
        """Make the check, unless it has passed already.

        Returns:
            Whether this call made it, and therefore the copy.
        """
        if self.passed:
            return False
        with self._lock:
            compare = self._compare
            if compare is None:
                return False
            compare(copy)
            self._compare = None
        return True


class CheckedTensor(torch.Tensor):
    """An ordinary tensor whose bytes are checked before the first function of torch sees them."""

    _plain: Tensor
    _check: OnceChecked

    @staticmethod
    def __new__(cls, tensor: Tensor, check: OnceChecked) -> CheckedTensor:
        """Make one that shares the memory of a tensor; nothing is checked."""
        made: CheckedTensor = torch.Tensor._make_subclass(cls, tensor)
        made._plain, made._check = tensor, check
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check all tensors that a function of torch takes, and call it on their memory."""
        del types
        keywords = dict(kwargs or {})
        if func is Tensor.detach:
            return cls(args[0]._plain.detach(), args[0]._check)
        if func is Tensor.clone and len(args) == 1 and not keywords and not args[0].requires_grad:
            return args[0]._cloned()
        if func not in _ASKS:
            tree_map_only(cls, computed, (args, keywords))
            args, keywords = tree_map_only(LazyTensor, computed, (args, keywords))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **keywords)

    def _cloned(self) -> Tensor:
        """Return an ordinary tensor; of bytes that come from memory once, not twice."""
        copied = torch.empty_like(self._plain)
        data = copied.view(-1).view(torch.uint8).numpy().data
        return copied if self._check.ensure(data) else copied.copy_(self._plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return an ordinary tensor."""
        memo[id(self)] = copied = deepcopy(computed(self), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Store an ordinary tensor."""
        return computed(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's


def check_ahead(tensors: Iterable[Tensor]) -> bool:
    """Check tensors one after the other in another thread, while whoever called works.

    What is wrong with one is raised where that one is used.

    Returns:
        Whether any was left to check.
    """
    checks = [c for t in tensors if (c := getattr(t, "_check", None)) and not c.passed]
    if checks:
        Thread(target=_check_all, args=(checks,), daemon=True).start()
    return bool(checks)


def _check_all(checks: Iterable[OnceChecked]) -> None:
    for check in checks:
        with suppress(CompressorError):
            check.ensure()


class LazyTensor(torch.Tensor):
    """A tensor on the CPU that knows its shape and dtype, and computes its elements at each use.

    Operators take it like any other tensor; ``state_dict``, ``detach`` and ``to`` what it is
    already leave it lazy, and moving or copying it gives an ordinary one. Nothing of what is
    computed is kept. It cannot be written to, so copies of a module share it.

    Args:
        compute: returns a new tensor of that shape and dtype; called by any thread.
        shape: its shape.
        dtype: its dtype.
        check: what ``compute`` ensures first, if anything.
    """

    _compute: Callable[[], Tensor]
    _check: OnceChecked | None

    @staticmethod
    def __new__(
        cls,
        compute: Callable[[], Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        check: OnceChecked | None = None,
    ) -> LazyTensor:
        """Make one; nothing is computed."""
        made: LazyTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made._compute = compute
        made._check = check
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch on the computed tensors.

        Here, and not below in ``__torch_dispatch__``, whose first use has torch import a quarter of
        a second's worth of modules.

        Raises:
            RuntimeError: it would write to one.
        """
        keywords = dict(kwargs or {})
        if func in _ASKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **keywords)
        first = args[0] if args else None
        if isinstance(first, cls) and (
            func is Tensor.detach or _stays(func, first, args, keywords)
        ):
            return first
        if func is Tensor.clone and isinstance(first, cls) and not keywords:
            return computed(first)  # which nobody else has
        name = getattr(func, "__name__", "")
        in_place = name in _STEPS_IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if (in_place and isinstance(first, cls)) or isinstance(keywords.get("out"), cls):
            raise RuntimeError(
                f"{name}: a tensor that is decoded from a file cannot be written to; clone it"
            )
        return func(*tree_map_only(cls, computed, args), **tree_map_only(cls, computed, keywords))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves func out
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Refuse what no function of Python asked for; torch wants this method to exist.

        Raises:
            RuntimeError: always.
        """
        del args, kwargs
        raise RuntimeError(f"{func}: the elements are not in memory; clone the tensor")

    def data_ptr(self) -> NoReturn:
        """Refuse: there is no memory that a pointer could point to."""
        raise RuntimeError("a tensor that is decoded at each use has no address; clone it")

    def untyped_storage(self) -> NoReturn:
        """Refuse, like :meth:`data_ptr`."""
        raise RuntimeError("a tensor that is decoded at each use has no storage; clone it")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's
        """Describe it without computing it."""
        return f"LazyTensor(shape={list(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: it cannot be changed."""
        memo[id(self)] = self
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Store the elements, as an ordinary tensor."""
        return self._compute().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's


def computed(tensor: Tensor) -> Tensor:
    """Return a tensor that can be read: of a lazy one its elements, any other as it is, checked."""
    if type(tensor) is LazyTensor:
        return tensor._compute()
    if type(tensor) is CheckedTensor:
        tensor._check.ensure()
        return tensor._plain
    return tensor


def _stays(func: Any, tensor: LazyTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a conversion would return the tensor itself."""
    if func is Tensor.cpu:
        return True
    if func is not Tensor.to or any(isinstance(x, Tensor) for x in args[1:]) or kwargs.get("copy"):
        return False
    device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
    return device in (None, tensor.device) and dtype in (None, tensor.dtype)
