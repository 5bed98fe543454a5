"""Arrays with many zeros in fewer bytes: a mask of bits, or positions within groups of four.

Elements are unsigned integers, so that any set bit, such as a negative zero's, makes a value, which
comes back unchanged.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from compressor.types.tensors import Array

GROUP = 4
"""Elements in a group of which few are values, as sparse tensor cores have it."""

_CHUNK = 1 << 18  # groups handled at once, so that what is made of them stays in the cache
_BYTE = 8


def bitmask(elements: Array) -> tuple[Array, Array]:
    """Divide elements into a mask and those that are not zero.

    Args:
        elements: ``[count]``, unsigned integers.

    Returns:
        The mask, uint8 ``[ceil(count / 8)]``: bit ``i % 8`` of byte ``i // 8``, the lowest first,
        is set where element ``i`` is not zero; and those elements in their order.
    """
    there = elements != 0
    return np.packbits(there, bitorder="little"), elements[there]


def from_bitmask(mask: Array, values: Array, count: int) -> Array:
    """Invert :func:`bitmask`.

    Raises:
        ValueError: the mask has not the bytes for so many elements, a bit after the last one, or
            not as many bits as there are values.
    """
    if mask.size != -(-count // _BYTE):
        raise ValueError(f"its mask has {mask.size} bytes for {count} elements")
    if count % _BYTE and mask[-1] >> (count % _BYTE):
        raise ValueError("its mask has bits after the last element")
    there = np.unpackbits(mask, count=count, bitorder="little").view(np.bool_)
    marked = int(np.count_nonzero(there))
    if marked != values.size:
        raise ValueError(f"its mask marks {marked} elements, {values.size} values are stored")
    elements = np.zeros(count, values.dtype)
    elements[there] = values
    return elements


def fits_groups(groups: Array, most: int) -> bool:
    """Return whether no group has more than ``most`` values.

    Args:
        groups: ``[groups, 4]``, unsigned integers.
        most: 1 or 2.
    """
    fits = np.array([pattern.bit_count() <= most for pattern in range(1 << GROUP)])
    return all(
        bool(fits[_pattern(groups[start : start + _CHUNK])].all())
        for start in range(0, len(groups), _CHUNK)
    )


def group_values(groups: Array, most: int) -> tuple[Array, Array]:
    """Divide groups of which each has few values into those and their places.

    A group with fewer values than ``most`` has zeros among them, at the first places that are
    free.

    Args:
        groups: ``[groups, 4]``, unsigned integers; :func:`fits_groups`.
        most: 1 or 2.

    Returns:
        Values ``[groups * most]``, and their places in their groups, uint8 of the same length,
        ascending in each group.
    """
    values = np.empty((len(groups), most), groups.dtype)
    places = np.empty((len(groups), most), np.uint8)
    table = _places(most)
    for start in range(0, len(groups), _CHUNK):
        part = groups[start : start + _CHUNK]
        chosen = table[_pattern(part)]
        places[start : start + _CHUNK] = chosen
        values[start : start + _CHUNK] = np.take_along_axis(part, chosen, axis=1)
    return values.ravel(), places.ravel()


def from_group_values(values: Array, places: Array, most: int) -> Array:
    """Invert :func:`group_values`: ``[groups, 4]``.

    Raises:
        ValueError: the places of a group do not ascend, so that two values would share one.
    """
    values, places = values.reshape(-1, most), places.reshape(-1, most)
    groups = np.empty((len(values), GROUP), values.dtype)
    for start in range(0, len(values), _CHUNK):
        part, part_places = values[start : start + _CHUNK], places[start : start + _CHUNK]
        if not (part_places[:, :-1] < part_places[:, 1:]).all():
            raise ValueError("its indices do not ascend within a group")
        target = groups[start : start + _CHUNK]
        for place in range(GROUP):
            target[:, place] = part[:, 0] * (part_places[:, 0] == place)
            for index in range(1, most):
                target[:, place] |= part[:, index] * (part_places[:, index] == place)
    return groups


def _pattern(groups: Array) -> Array:
    """Return which elements of each group are values, as bits of a number."""
    there: Array = (groups != 0).astype(np.uint8)
    pattern: Array = there[:, 0] | there[:, 1] << 1 | there[:, 2] << 2 | there[:, 3] << 3
    return pattern


def _places(most: int) -> Array:
    """Return the places of the values for each pattern, ``[16, most]``."""
    table = np.zeros((1 << GROUP, most), np.intp)
    for pattern in range(1 << GROUP):
        nonzero = [place for place in range(GROUP) if pattern >> place & 1]
        fitting = (c for c in combinations(range(GROUP), most) if set(nonzero) <= set(c))
        table[pattern] = next(fitting, (0,) * most)
    return table
