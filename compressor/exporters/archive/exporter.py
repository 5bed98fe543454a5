"""Put files into an archive."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from compressor.errors import artifact_errors
from compressor.exporters.archive.coder import CHUNK, Coded, encode, quickly, threads
from compressor.exporters.archive.forms import WHOLE, Form, candidates
from compressor.exporters.archive.index import (
    ENTRY,
    MAGIC,
    TEXT_LEVEL,
    Chunk,
    PackedFile,
    Part,
    Section,
    divide,
    index_bytes,
    joined,
    member_sums,
)
from compressor.exporters.archive.mixed import MixedForms
from compressor.exporters.archive.unpacking import ArchiveFormat
from compressor.exporters.safetensors.exporter import SafetensorsExporter
from compressor.files import file_sha256, scratch, staging
from compressor.types.carrier import Carrier, Runner
from compressor.types.exporter import STORED, ExportContext, Exporter
from compressor.types.parallel import WAITING, in_order
from compressor.types.tensors import Array, Batch

_PROBE = 128 * WHOLE  # bytes of a tensor on which all forms are tried
_CLOSE = 1.01  # times the best form's bytes there: others are not tried on the rest
_FINALISTS = 3  # forms of a large file's tensor that all coders are tried on
_SMALL = 4 << 20  # bytes of a file of which every byte counts, and not how long decoding takes
_TINY = 4096  # bytes of a tensor that is never coded alone
_GROUP = 1 << 16  # bytes of a group, and of a tensor that may be in one
_LIKELY = 2  # forms that the slow coder is tried on, besides the plainest
NAME = "model.archive"


class _Source(NamedTuple):
    """A file that goes into an archive, and how it is coded."""

    path: Path
    level: int
    small: bool
    mixed: MixedForms
    known: dict[tuple[int, int], Coded]  # sections by place and size, as they are mixed


class _Packed(NamedTuple):
    """A section that has been coded in a form: its chunks follow each other."""

    section: Section
    form: Form
    chunks: tuple[Coded, ...]

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)


def pack(
    files: Sequence[Path],
    target: Path,
    level: int,
    advance: Callable[[int], None],
    contexts: bool = False,
) -> None:
    """Write an archive; tensors are read one after another, several chunks coded at once.

    Args:
        files: what goes into it; their names differ.
        target: the archive, which is not there yet.
        level: Zstandard's, 1 to 22.
        advance: called with the bytes that have been coded so far.
        contexts: code sparse codes of small files bit by bit.

    Raises:
        OSError: the disk is full.
    """
    packed: list[PackedFile] = []
    mixed = MixedForms(files if contexts else ())
    done = 0
    with target.open("xb") as out, ThreadPoolExecutor(threads(), "archive") as workers:
        out.write(MAGIC)
        for path in files:
            head, sections = divide(path)
            parts: list[Part] = []
            small = path.stat().st_size <= _SMALL
            source = _Source(path, level, small, mixed, {})
            if small:
                mixed.look(sections, partial(_whole, path))
            for run in runs(sections):
                parts += _write(workers, source, run, out)
                done += sum(section.nbytes for section in run)
                advance(done)
            size = path.stat().st_size
            packed.append(PackedFile(path.name, size, file_sha256(path), head, tuple(parts)))
        out.write(index_bytes(packed, mixed=mixed.any))


def runs(sections: Sequence[Section]) -> Iterator[tuple[Section, ...]]:
    """Yield sections that may be coded together.

    They follow each other, are short, and have elements of the same width.
    """
    run: list[Section] = []
    size = 0
    for section in sections:
        joins = bool(run) and bool(section.dtype) and run[0].width == section.width
        if run and not (joins and size + section.nbytes <= _GROUP):
            yield tuple(run)
            run, size = [], 0
        run.append(section)
        size += section.nbytes
    if run:
        yield tuple(run)


def groupings(run: Sequence[Section]) -> list[list[Section]]:
    """Return the ways to code the sections of a run: all as one, the larger ones alone, or each.

    The smallest gain by being coded together: one alone is too short to show a distribution.
    """
    apart: list[list[Section]] = []
    for section in run:
        tiny = section.nbytes < _TINY
        if apart and tiny and apart[-1][0].nbytes < _TINY:
            apart[-1].append(section)
        else:
            apart.append([section])
    ways = [[joined(run)]]
    if len(apart) > 1:
        ways.append([joined(group) for group in apart])
    if 1 < len(run) != len(apart):
        ways.append(list(run))
    return ways


def _write(
    workers: ThreadPoolExecutor, source: _Source, run: Sequence[Section], out: BinaryIO
) -> Iterator[Part]:
    """Code sections of a file in the grouping that takes the fewest bytes."""
    if not run[0].dtype:
        source = source._replace(level=max(source.level, TEXT_LEVEL))
    coded_ways = [[_best(workers, source, section) for section in way] for way in groupings(run)]
    for packed in min(coded_ways, key=lambda way: sum(one.nbytes + ENTRY for one in way)):
        chunks = []
        for coded in packed.chunks:
            chunks.append(Chunk(out.tell(), coded.lengths, coded.checksum))
            out.write(coded.data)
        section = packed.section
        sums: tuple[str, ...] = ()
        if section.members:  # of other tensors, the chunks have a checksum
            sums = member_sums(section, _whole(source.path, section))
        yield Part(section, packed.form, CHUNK, tuple(chunks), sums)


def _best(workers: ThreadPoolExecutor, source: _Source, section: Section) -> _Packed:
    """Code a section in the smallest form; of equals the first."""
    packed = _unmixed(workers, source, section)
    if source.small and 0 < section.nbytes <= CHUNK:
        for form in source.mixed.of(section):
            place = section.start, section.nbytes
            if place not in source.known:  # it is slow, and a section is tried in several groupings
                data = next(_chunks(source.path, section))
                source.known[place] = encode(data, form, source.level)
            coded = source.known[place]
            if coded.nbytes < packed.nbytes:
                packed = _Packed(section, form, (coded,))
    return packed


def _unmixed(workers: ThreadPoolExecutor, source: _Source, section: Section) -> _Packed:
    """Code a section in the smallest form whose streams whole bytes are coded of.

    In a large file a long one gets the form that is best on parts of it, among those that the
    fastest coder likes.
    """
    if not section.nbytes:
        return _Packed(section, Form(), ())
    whole = section.nbytes <= _PROBE
    quick = not whole and not source.small
    probe = _parts(source.path, section) if quick else next(_chunks(source.path, section))[:_PROBE]
    forms = candidates(probe, section.width, floating=section.floating)
    if quick:
        found = in_order(workers, partial(quickly, probe), forms, threads() + WAITING)
        sizes = dict(zip(forms, found, strict=True))
        forms = sorted(forms, key=sizes.__getitem__)[:_FINALISTS]
    tried = _tried(workers, probe, forms, source, small=False)
    if source.small:
        likely = sorted(forms, key=lambda form: (form != forms[0], tried[form].nbytes))
        tried = _tried(workers, probe, likely[: 1 + _LIKELY], source, small=True)
    least = min(coded.nbytes for coded in tried.values())
    if whole:
        form = min(tried, key=lambda form: tried[form].nbytes)
        return _Packed(section, form, (tried[form],))
    packed: list[_Packed] = []
    for form, coded in tried.items():
        if coded.nbytes <= (_CLOSE if source.small else 1) * least:
            chunks = _chunks(source.path, section)
            packed.append(_Packed(section, form, _coded(workers, source, form, coded, chunks)))
            if not source.small:
                break
    return min(packed, key=lambda one: one.nbytes)


def _coded(
    workers: ThreadPoolExecutor, source: _Source, form: Form, first: Coded, chunks: Iterator[Array]
) -> tuple[Coded, ...]:
    """Code chunks in a form; those of a large file as was best at the beginning."""
    known = () if source.small else first.best
    work = partial(encode, form=form, level=source.level, small=source.small, known=known)
    return tuple(in_order(workers, work, chunks, threads() + WAITING))


def _tried(
    workers: ThreadPoolExecutor, data: Array, forms: Sequence[Form], source: _Source, *, small: bool
) -> dict[Form, Coded]:
    work = partial(encode, data, level=source.level, small=small)
    return dict(zip(forms, in_order(workers, work, forms, threads() + WAITING), strict=True))


def _chunks(path: Path, section: Section) -> Iterator[Array]:
    """Yield the bytes of a part, uint8 ``[n]``, chunk by chunk."""
    with path.open("rb") as file:
        file.seek(section.start)
        for place in range(0, section.nbytes, CHUNK):
            data = bytearray(file.read(min(CHUNK, section.nbytes - place)))
            yield np.frombuffer(data, np.uint8)


def _whole(path: Path, section: Section) -> Array:
    """Return the bytes of a part, uint8 ``[n]``."""
    return np.concatenate([np.empty(0, np.uint8), *_chunks(path, section)])


def _parts(path: Path, section: Section) -> Array:
    """Return bytes from the beginning, the middle and the end of a part, uint8 ``[n]``."""
    size = _PROBE // 3 // WHOLE * WHOLE
    last = (section.nbytes - size) // WHOLE * WHOLE
    places = (0, last // 2 // WHOLE * WHOLE, last)
    with path.open("rb") as file:
        found = bytearray()
        for place in places:
            file.seek(section.start + place)
            found += file.read(size)
    return np.frombuffer(found, np.uint8)


class ArchiveExporter(Exporter):
    """Writes `model.archive`: weights and graph in the fewest bytes, for storing and sending.

    It holds what the safetensors exporter writes in its layout `graph`, bit for bit. Each tensor is
    arranged for an entropy coder: narrow codes several to a byte, zeros apart from the rest, floats
    byte by byte. Then Zstandard or Brotli codes it; sparse codes of a small model can be coded bit
    by bit, in contexts. `compress unpack` restores the files, and `compressor.load` opens an
    archive directly.
    """

    format: ClassVar[str] = "archive"
    packs: ClassVar[bool] = True
    version: ClassVar[int] = 5
    bound: ClassVar[bool] = True  # how well weights can be coded shows at the end
    not_judged: ClassVar[str] = STORED  # it is unpacked before it is run

    level: int = Field(
        default=9,
        ge=1,
        le=22,
        description="Zstandard's level; higher levels help if weights repeat, and slow down "
        "writing but not reading",
    )
    contexts: bool = Field(
        default=False,
        description="code sparse codes of small models bit by bit, in contexts: an eighth smaller, "
        "and some seconds to write and to open",
    )

    @property
    def tools(self) -> Mapping[str, str]:
        """The coders."""
        return {name: version(name) for name in ("brotli", "zstandard")}

    @property
    def _content(self) -> SafetensorsExporter:
        return SafetensorsExporter(layout="graph")

    def check(self, carrier: Carrier) -> None:
        """Raise ``SpecError`` where the safetensors exporter does."""
        self._content.check(carrier)

    def predict(self, carrier: Carrier) -> int:
        """Return the bytes of the files inside, which the archive does not exceed."""
        return self._content.predict(carrier)

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write the files, put them into an archive and read that back.

        Raises:
            ArtifactError: they cannot be opened again, or the archive cannot.
        """
        if context.ranks.rank:
            return ()
        with staging(directory) as folder:
            files = self._content.write(carrier, folder, context)
            path = directory / NAME
            pack(files, path, self.level, context.advance, self.contexts)
            shutil.rmtree(folder)
            with artifact_errors():
                ArchiveFormat().unpack(path, folder)
        return (path,)

    def open(self, path: Path) -> Runner:
        """Unpack the archive into a temporary folder and load the model from there."""
        with artifact_errors():
            return UnpackedRunner(path, self._content)


class UnpackedRunner:
    """A model that runs from a temporary folder, which goes when the runner does.

    Raises:
        ModelError: the archive is damaged.
        ArtifactError: the files cannot be opened.
    """

    def __init__(self, path: Path, content: Exporter):
        stack = ExitStack()
        folder = stack.enter_context(scratch())
        weakref.finalize(self, stack.close)
        ArchiveFormat().unpack(path, folder)
        self._runner = content.open(folder)
        self.runtime = self._runner.runtime

    def run(self, batch: Batch) -> Batch:
        """Run one batch."""
        return self._runner.run(batch)
