"""What a program gives to the functions of the package: refused at the door if of another type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from compressor.errors import SpecError

_NAMES = {Sequence: "list", Mapping: "dict", Callable: "function", NoneType: "None"}
_NUMBERS = {float: Real, int: Integral}  # numpy's count too


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse arguments of types that a function does not take.

    Args:
        function: a function whose annotations say what it takes, or a dataclass.
        given: its arguments by name, as ``locals()`` has them in its first line; the fields.

    Raises:
        SpecError: an argument, or an item of a sequence, is of another type.
    """
    for name, annotation in get_type_hints(function).items():
        if name in given:
            _check(f"argument {name!r} of {function.__name__}", given[name], annotation)


def _check(subject: str, value: Any, annotation: Any) -> None:
    kinds = list(_kinds(annotation))
    if not any(_fits(value, kind) for kind in kinds):
        is_class = isinstance(value, type)
        given = f"the class {value.__name__}" if is_class else f"of type {type(value).__name__}"
        names = [_NAMES.get(kind, kind.__name__) for kind in map(_plain, kinds)]
        *others, last = dict.fromkeys(names)
        remedy = f"give {', '.join(others)} or {last}" if others else f"give {last}"
        raise SpecError(subject, "is None" if value is None else f"is {given}", remedy)
    if isinstance(value, Sequence) and not isinstance(value, str):
        for items in (get_args(kind) for kind in kinds if get_origin(kind) is Sequence):
            for index, item in enumerate(value):
                _check(f"item {index} of {subject}", item, items[0])


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the parts of a union, or the annotation."""
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    else:
        yield annotation


def _fits(value: Any, kind: Any) -> bool:
    if kind in (Any, bool) or get_origin(kind) is Literal:  # each has a truth; a choice is checked
        return True  # where its values are known
    if isinstance(value, str) and get_origin(kind) is Sequence:
        return False  # of letters
    if get_origin(kind) is Callable:
        return callable(value) and not isinstance(value, type)
    return isinstance(value, _NUMBERS.get(_plain(kind), _plain(kind)))


def _plain(kind: Any) -> Any:
    """Return a type without what it holds."""
    return get_origin(kind) or kind
