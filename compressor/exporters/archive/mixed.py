"""Which parts of small files are coded bit by bit, in contexts: what gains by it, within limits.

That takes some microseconds for each bit, writing and reading. So it is for files with codes most
of which are the same, of which a row or column can say how many are not. Where there are such
codes, the others, the short floats and the description of the model are coded so too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

from compressor.exporters.archive.contexts import MOST_BYTES, MOST_SYMBOLS
from compressor.exporters.archive.forms import Form, shares
from compressor.exporters.archive.index import Section
from compressor.types.tensors import Array

_DESCRIBED = "tensors"  # the key of a description of a model, under which tensors' shapes are
_WIDEST = 5  # bits of codes
_COMMON = 0.5  # share of the most common code from which on codes are mixed
_FEW = 256  # codes: of fewer there is nothing to learn


class MixedForms:
    """The mixed forms of small files; each takes its part of what an archive may have.

    Args:
        files: all that go into the archive; a description among them tells the shapes of codes.
    """

    def __init__(self, files: Sequence[Path]):
        self._shapes = _code_shapes(files)
        self._forms: dict[str, Form] = {}
        self._symbols, self._bytes = MOST_SYMBOLS, MOST_BYTES

    def look(self, sections: Sequence[Section], read: Callable[[Section], Array]) -> None:
        """Choose the codes of a file that are mixed.

        Args:
            sections: of the file.
            read: returns the bytes of one, uint8 ``[n]``.
        """
        forms: dict[str, Form] = {}
        left, sparse = self._symbols, False
        for section in sections:
            bits, shape = self._shapes.get(section.name, (0, ()))
            if not 0 < bits <= _WIDEST or len(shape) < 2:
                continue
            form = Form(bits, mixed=True, columns=prod(shape[1:]), kernel=prod(shape[2:]))
            count = prod(shape)
            if not _FEW <= count <= left or not form.fits(section.nbytes):
                continue
            if section.nbytes != -(-count * bits // 8):
                continue  # rows of it are padded
            sparse = sparse or bool(shares(read(section), bits).max() >= _COMMON)
            left -= count
            forms[section.name] = form
        if sparse:
            self._symbols = left
            self._forms |= forms

    @property
    def any(self) -> bool:
        """Whether some codes are mixed."""
        return bool(self._forms)

    def of(self, section: Section) -> tuple[Form, ...]:
        """Return the mixed form of a section, if it has one."""
        if section.name in self._forms and not section.members:
            return (self._forms[section.name],)
        narrow = section.width == 1 and bool(section.dtype)
        if not self._forms or narrow or section.nbytes > self._bytes:
            return ()
        self._bytes -= section.nbytes
        return (Form(8 * section.width, mixed=True),)


def _code_shapes(files: Sequence[Path]) -> Mapping[str, tuple[int, tuple[int, ...]]]:
    """Return the width and the shape of tensors that are streams of codes, by name.

    Safetensors knows only their bytes; ``model.json`` beside it knows what they mean.
    """
    found = {}
    for path in files:
        if path.suffix != ".json":
            continue
        document = json.loads(path.read_text(encoding="utf-8"))
        tensors = document.get(_DESCRIBED) if isinstance(document, dict) else None
        for name, entry in (tensors if isinstance(tensors, dict) else {}).items():
            match entry:
                case {"shape": [*shape], "form": "bits", "bits": int(bits)}:
                    found[name] = (bits, tuple(shape))
                case {"shape": [*shape], "packed": (2 | 4 | 8) as together}:
                    found[name] = (8 // together, tuple(shape))
    return found
