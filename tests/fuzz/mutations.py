"""Changes that a damaged or a crafted file may have: each takes bytes and gives others."""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any

import onnx
from google.protobuf.message import Message

from compressor.exporters.archive.coder import compressed, decoded_text
from compressor.exporters.archive.index import MAGIC

Mutation = Callable[[Random, bytes], bytes]

# What a terminal, a page or a file system would take in another way than it is meant.
TEXTS = (
    "",
    " ",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202egnp.exe\u2066",
    "a\0b",
    "../../outside",
    "/etc/hostname",
    "line\nline\r\x85\u2028",
    "[bold]</b><script>alert(1)</script>",
    "\ud800",
    "x" * 5000,
    "%s{}{0}",
    "NaN",
    "1e999",
    "-1",
    "float",
    "é𝔘" * 9,
)
NUMBERS = (0, 1, -1, 2, 7, 255, 65536, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 10**400)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))


def flipped(rng: Random, data: bytes) -> bytes:
    """Change bytes, anywhere: flip, cut, insert, repeat, move."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        size = len(changed)
        at = rng.randrange(size + 1)
        upto = min(size, at + rng.choice((1, 2, 4, 8, 64, 1024)))
        match rng.randrange(8):
            case 0 | 1 if at < size:
                changed[at] ^= 1 << rng.randrange(8)
            case 2 if at < size:
                changed[at] = rng.choice((0, 255, 127, 128, 10, 27, rng.randrange(256)))
            case 3:
                del changed[at:]
            case 4:
                del changed[at:upto]
            case 5:
                changed[at:at] = rng.randbytes(rng.choice((1, 4, 16)))
            case 6:
                to = rng.randrange(size + 1)
                changed[to:to] = changed[at:upto]
            case 7:
                number = (rng.choice(NUMBERS) % 2**64).to_bytes(8, "little")
                changed[at : at + len(number)] = number
    return bytes(changed)


def _flip_number(rng: Random, number: float) -> Any:
    return rng.choice(
        (-number, number + 1, number - 1, number * 1000, number // 2, str(number)[:20])
    )


def odd_value(rng: Random, value: Any) -> Any:
    """Return what a reader does not expect in the place of a value."""
    match rng.randrange(9):
        case 0:
            return rng.choice((None, True, False))
        case 1:
            return rng.choice(NUMBERS) * rng.choice((1, -1))
        case 2:
            return rng.choice(FLOATS)
        case 3:
            return rng.choice(TEXTS)
        case 4:
            return rng.choice(([], {}, [[]], [value], {"a": value}, [value] * 50))
        case 5 if isinstance(value, int | float):
            return _flip_number(rng, value)
        case 5 if isinstance(value, str) and value:
            at = rng.randrange(len(value))
            return value[:at] + rng.choice(TEXTS) + value[at + 1 :]
        case 6 if isinstance(value, list) and value:
            return rng.choice((value[:-1], value[1:], value[::-1], value * 2, value[0]))
        case 7 if isinstance(value, dict) and value:
            return {k: v for k, v in value.items() if rng.random() < 0.7}
        case 8 if rng.random() < 0.2:
            return json.loads("[" * 150 + "]" * 150)
    return rng.choice((None, 0, "", [], {}, -1, 0.5, "text"))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of a tree with each of its keys."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        keys: Any = node.keys() if isinstance(node, dict) else range(len(node))
        for key in keys:
            yield node, key
            if isinstance(node[key], dict | list):
                waiting.append(node[key])


def changed_tree(rng: Random, tree: Any) -> Any:
    """Return a tree with one to four values, keys or items changed."""
    tree = deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(tree)) if isinstance(tree, dict | list) else []
        if not places or rng.random() < 0.01:
            tree = odd_value(rng, tree)
            continue
        node, key = rng.choice(places)
        action = rng.randrange(8)
        if action == 0:
            del node[key]
        elif action == 1 and isinstance(node, dict):
            node[rng.choice((*TEXTS, *node))] = node.pop(key)
        elif action == 2:
            other, place = rng.choice(places)
            if place in other if isinstance(other, dict) else place < len(other):
                node[key] = deepcopy(other[place])
        else:
            node[key] = odd_value(rng, node[key])
    return tree


def json_bytes(rng: Random, tree: Any) -> bytes:
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


def json_text(rng: Random, data: bytes) -> bytes:
    """Change the values of JSON; now and then its bytes."""
    if rng.random() < 0.15:
        return flipped(rng, data)
    text = json_bytes(rng, changed_tree(rng, json.loads(data)))
    return text.replace(b": ", b": 0", 1) if rng.random() < 0.01 else text


def json_lines(rng: Random, data: bytes) -> bytes:
    """Change one line of JSON Lines."""
    if rng.random() < 0.2:
        return flipped(rng, data)
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json_text(rng, lines[at])
    return b"\n".join(lines) + rng.choice((b"", b"\n", b"\n\n"))


def safetensors(rng: Random, data: bytes) -> bytes:
    """Change the header of a safetensors file, whose length is right afterwards."""
    if rng.random() < 0.25:
        return flipped(rng, data)
    length = int.from_bytes(data[:8], "little")
    header = json_text(rng, data[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def gguf(rng: Random, data: bytes) -> bytes:
    """Change a GGUF file, most often a length, a type or a place in its header."""
    if rng.random() < 0.2:
        return flipped(rng, data)
    # Names and keys end where such a number begins, and texts begin behind one.
    names = list(re.finditer(rb"[a-z_]+[._][a-z0-9_.]+", data))
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(names)
        at = rng.choice((name.start() - 8, name.end(), name.end() + 4, name.end() + 8, 8, 16))
        kind = rng.choice(("<I", "<Q"))
        number = rng.choice((*NUMBERS, 3, 4, 8, 9, 10, 31, 32, 64, 300))
        number %= 1 << 8 * struct.calcsize(kind)
        changed[at : at + struct.calcsize(kind)] = struct.pack(kind, number)
    return bytes(changed)


def archive(rng: Random, data: bytes) -> bytes:
    """Change the index of an archive, whose checksum is right afterwards."""
    from hashlib import sha256

    if rng.random() < 0.25:
        return flipped(rng, data)
    footer = 16 + 32 + len(MAGIC)
    numbers = data[-footer:]
    stored, length = (int.from_bytes(numbers[i : i + 8], "little") for i in (0, 8))
    start = len(data) - footer - stored
    text = json_text(rng, decoded_text(data[start : start + stored], length))
    packed = compressed(text, 3)
    if rng.random() < 0.05:
        packed = flipped(rng, packed)
    pair = b"".join(len(part).to_bytes(8, "little") for part in (packed, text))
    chunks = flipped(rng, data[:start]) if rng.random() < 0.05 else data[:start]
    return chunks + packed + pair + sha256(pair + packed).digest() + MAGIC[::-1]


def zipped(rng: Random, data: bytes) -> bytes:
    """Change a member of an npz file, or its header in text; or the bytes of the file."""
    if rng.random() < 0.4:
        return flipped(rng, data)
    with zipfile.ZipFile(io.BytesIO(data)) as stored:
        members = {name: stored.read(name) for name in stored.namelist()}
    name = rng.choice(list(members))
    members[name] = npy(rng, members[name])
    out = io.BytesIO()
    packing = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(out, "w", packing) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return out.getvalue()


_NPY = (b"'<f4'", b"'|O'", b"'<U9'", b"'>i8'", b"'V4'", b"'<M8'", b"[('a', '<f4')]", b"None", b"x")
_SHAPES = (b"(3,)", b"()", b"(-1,)", b"(9999999999999,)", b"(0, 4)", b"None", b"(1,)*9", b"(48,)")


def npy(rng: Random, data: bytes) -> bytes:
    """Change dtype, order or shape in the header of an npy file, or its bytes."""
    if rng.random() < 0.4:
        return flipped(rng, data)
    length = int.from_bytes(data[8:10], "little")
    header, rest = data[10 : 10 + length].rstrip(), data[10 + length :]
    for key, values in ((b"'descr': ", _NPY), (b"'shape': ", _SHAPES)):
        start = header.find(key) + len(key)
        stop = header.find(b")," if b"shape" in key else b",", start) + (b"shape" in key)
        if rng.random() < 0.5 and stop > start:
            header = header[:start] + rng.choice(values) + header[stop:]
    if rng.random() < 0.3:
        header = header.replace(b"False", b"True")
    header = flipped(rng, header) if rng.random() < 0.1 else header
    header += b"\n"
    return data[:8] + len(header).to_bytes(2, "little") + header + rest


def _fields(message: Message) -> Iterator[tuple[Message, Any]]:
    """Yield each message inside another with each of its fields that is set."""
    waiting = [message]
    while waiting:
        current = waiting.pop()
        for field, value in current.ListFields():
            yield current, field
            if field.message_type is not None:
                waiting.extend([value] if isinstance(value, Message) else value)


def _odd_scalar(rng: Random, field: Any) -> Any:
    kind = field.cpp_type
    if kind == field.CPPTYPE_STRING:
        text = rng.choice(TEXTS).encode("utf-8", "replace")
        return text if field.type == field.TYPE_BYTES else text.decode()
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if kind == field.CPPTYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    if kind == field.CPPTYPE_BOOL:
        return rng.random() < 0.5
    wide = kind in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64)
    number = rng.choice([n for n in NUMBERS if n < 2 ** (63 if wide else 31)])
    signed = kind in (field.CPPTYPE_INT32, field.CPPTYPE_INT64)
    return -number if signed and rng.random() < 0.5 else number


def onnx_file(rng: Random, data: bytes) -> bytes:
    """Change fields anywhere in a model; now and then the bytes of the file."""
    if rng.random() < 0.2:
        return flipped(rng, data)
    proto = onnx.ModelProto.FromString(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_fields(proto))
        if not places:
            break
        message, field = rng.choice(places)
        _change_field(rng, message, field, places)
    return proto.SerializeToString()


def _change_field(rng: Random, message: Any, field: Any, places: list[tuple[Any, Any]]) -> None:
    value, action = getattr(message, field.name), rng.randrange(6)
    if action == 0:
        message.ClearField(field.name)
    elif field.message_type is None and field.is_repeated:
        items = list(value)
        items[rng.randrange(len(items))] = _odd_scalar(rng, field)
        items = rng.choice((items, items, items[:-1], items * 2))
        message.ClearField(field.name)
        getattr(message, field.name).extend(items)
    elif field.message_type is None:
        alike = [getattr(m, f.name) for m, f in places if f is field]
        setattr(message, field.name, rng.choice((_odd_scalar(rng, field), rng.choice(alike))))
    elif field.is_repeated:
        at = rng.randrange(len(value))
        if action == 1:
            del value[at]
        elif action == 2:
            value.add().CopyFrom(deepcopy(value[at]))
        else:
            others = [item for m, f in places if f is field for item in getattr(m, f.name)]
            value[at].CopyFrom(deepcopy(rng.choice(others)))
    elif action == 1:
        others = [getattr(m, f.name) for m, f in places if f.message_type is field.message_type]
        others = [item for item in others if isinstance(item, Message)]
        value.CopyFrom(deepcopy(rng.choice(others)))


_LINES = (
    "? [a]: b",
    "a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]",
    "a: &a [*a]",
    "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(9)),
    "x: !!python/object/apply:os.system [true]",
    "x: !<tag:yaml.org,2002:binary> AAAA",
    "<<: *a",
    "- -",
    "\tx: 1",
    "key: 'open",
    "k: |\n  text",
    "%YAML 9.9\n---",
    "---\nversion: 1",
    "date: 2001-01-01",
    "n: 0x1F\no: 0o17\np: 1_000\nq: .inf\nr: 12:30:45",
    "t: \x1b[31m",
)


def yaml_text(rng: Random, data: bytes) -> bytes:
    """Change a spec: values, or lines of its text."""
    if rng.random() < 0.5:
        return json_text(rng, data)
    tree = changed_tree(rng, json.loads(data)) if rng.random() < 0.3 else json.loads(data)
    tree = tree if isinstance(tree, dict) else {"passes": tree}
    lines = [f"{key}: {json.dumps(value)}" for key, value in tree.items()]
    for _ in range(rng.choice((1, 2))):
        at = rng.randrange(len(lines) + 1)
        match rng.randrange(4):
            case 0:
                lines.insert(at, rng.choice(_LINES))
            case 1 if at < len(lines):
                lines[at] = " " * rng.randrange(5) + lines[at]
            case 2 if at < len(lines):
                lines.insert(at, lines[at])
            case 3 if at < len(lines):
                lines[at] = flipped(rng, lines[at].encode()).decode("latin-1")
    return "\n".join(lines).encode("utf-8", "replace")


def png(rng: Random, data: bytes) -> bytes:
    """Change the width, height or depth that a PNG image states, or its bytes."""
    if rng.random() < 0.5 or not data.startswith(b"\x89PNG"):
        return flipped(rng, data)
    sizes = (0, 1, 7, 7000, 12_000, 20_000, 65535, 2**31 - 1)
    head = struct.pack(">II", rng.choice(sizes), rng.choice(sizes)) + data[24:26] + data[26:29]
    head = b"IHDR" + head
    return data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:]
