"""Write ``docs/reference`` and the schema of a spec from the code that they describe.

Run ``python docs/generate.py`` after you change an option, a command or a class docstring; a test
compares the pages with the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click

import compressor
from compressor import catalog
from compressor.cli.application import COMMANDS, application
from compressor.files import json_text
from compressor.spec.describe import Description, Option, describe, describe_options
from compressor.spec.keys import (
    DataKeys,
    DataSection,
    InputKeys,
    LimitKeys,
    MetricKeys,
    ModelKeys,
    SpecKeys,
)
from compressor.spec.schema import spec_schema
from compressor.types.options import Options

FOLDER = Path(__file__).parent / "reference"
SCHEMA = Path(__file__).parents[1] / "compressor" / "spec" / "schema.json"
_MARK = "<!-- Written by docs/generate.py. Change the class, not this page. -->"
# The spec fills these in: `path` is the value of the kind's own key, `fields` is made of `inputs`
# and `target`, and `samples` is a key of every kind.
_FILLED_BY_SPEC = ("path", "fields", "samples")

_PASSES = """\
Passes are listed under `passes` in a spec and run in that order. `compress passes NAME` prints the
same text on a terminal. [How it works](../how-it-works.md#carriers) explains *needs*;
[quantization](../quantization.md) describes what the quantizing passes do."""

_OBSERVERS = """\
Observers look at activations during calibration. A pass asks for them and sets their options; a
spec names one under `activations.observer` of [`quantize-static`](passes.md#quantize-static).
[Calibration](../calibration.md#observers) explains which one to choose."""

_EXPORTERS = """\
Exporters are listed under `exports` in a spec, each format at most once. `compress exporters NAME`
prints the same text on a terminal."""

_SOURCES = """\
Each entry under `data` names one source by its kind, with a path as the value: `npz: test.npz`. The
options below go beside it, together with the [keys that every source has](../spec.md#data). There
is one more kind, `factory`, a function of your own."""

_SPEC = """\
[The spec](../spec.md) explains each section; `compress schema` prints all of it as a JSON Schema.
Unknown keys are errors."""

_COMMANDS = """\
`compress NAME --help` prints the same text on a terminal; `python -m compressor` is `compress`.
With `--debug` (`-v`), a failure shows its traceback. Exit codes: 0 done; 1 done, but a limit or
gate failed; 2 the spec, an option or a path is wrong; 3 the model, data or a file is unusable; 4
an artifact failed its check; 130 interrupted.

Commands, options, names of passes and formats, and paths are completed in a shell once its startup
file (`.bashrc`, `.zshrc`) has this line, with `zsh_source` or `fish_source` for other shells:

```sh
eval "$(_COMPRESS_COMPLETE=bash_source compress)"
```"""

_PYTHON = """\
What `import compressor` offers; [Python](../python.md) shows how it is used. Classes of passes are
in `compressor.passes`, those of exporters in `compressor.exporters`, and what extensions import is
in `compressor.extension`."""

_SECTIONS = (
    ("Top level", SpecKeys),
    ("model", ModelKeys),
    ("model.inputs", InputKeys),
    ("data", DataSection),
    ("each entry under data", DataKeys),
    ("metric", MetricKeys),
    ("limits", LimitKeys),
)


def pages() -> dict[str, str]:
    """Return the text of every page by file name."""
    return {
        "passes.md": _page("Passes", _PASSES, "pass", lambda name: describe("pass", name)),
        "observers.md": _page("Observers", _OBSERVERS, "observer", _observer),
        "exporters.md": _page(
            "Exporters", _EXPORTERS, "exporter", lambda name: describe("exporter", name)
        ),
        "sources.md": _page("Data sources", _SOURCES, "source", _source),
        "spec.md": _spec_page(),
        "cli.md": _command_page(),
        "python.md": _python_page(),
    }


def _spec_page() -> str:
    parts = [_MARK, "# Keys of a spec", _SPEC]
    for title, keys in _SECTIONS:
        parts += [f"## {title}", (inspect.getdoc(keys) or "").replace("``", "`")]
        parts.append(_table([replace(o, options=()) for o in describe_options(keys)]))
    return "\n\n".join(parts) + "\n"


def _command_page() -> str:
    parts = [_MARK, "# Commands", _COMMANDS]
    for name in COMMANDS:
        command = application.get_command(click.Context(application), name)
        assert command is not None
        context = click.Context(command, info_name=f"compress {name}", **command.context_settings)
        usage = command.get_usage(context).removeprefix("Usage: ")
        parts += [f"## {name}", f"```text\n{usage}\n```", inspect.cleandoc(command.help or "")]
        records = (parameter.get_help_record(context) for parameter in command.get_params(context))
        rows = [record for record in records if record is not None and record[1]]
        if rows:
            table = [
                f"| `{option}` | {_escaped(' '.join(text.split()))} |" for option, text in rows
            ]
            parts.append("\n".join(["| option | what it does |", "| --- | --- |", *table]))
    return "\n\n".join(parts) + "\n"


def _python_page() -> str:
    parts = [_MARK, "# Python functions", _PYTHON]
    for name in sorted(compressor.__all__, key=str.lower):
        member = getattr(compressor, name)
        if inspect.isfunction(member):
            parts += [f"## {name}", _signature(f"compressor.{name}", member), _docstring(member)]
        elif inspect.isclass(member):
            parts += [f"## {name}", _docstring(member), *_members(name, member)]
            if issubclass(member, Options):
                parts.append("Its fields are [keys of a spec](spec.md).")
    return "\n\n".join(parts) + "\n"


def _members(name: str, cls: type) -> Iterator[str]:
    """Yield the methods and properties that a class of the package's own defines."""
    for key, member in vars(cls).items():
        if key.startswith("_") or issubclass(cls, Options):
            continue
        if isinstance(member, property):
            yield f"**{name}.{key}**: {_docstring(member)}"
        elif inspect.isfunction(member):
            yield f"### {name}.{key}"
            yield _signature(key, member)
            yield _docstring(member)


def _signature(name: str, function: Callable[..., object]) -> str:
    """Return how a function is called, one parameter a line where there are many."""
    signature = inspect.signature(function)
    parts, named = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            parts.append("*")
        named = named or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        text = f"{stars}{parameter.name}: {parameter.annotation}"
        absent = parameter.default is parameter.empty
        parts.append(text if absent else f"{text} = {_default(parameter.default)}")
    line = f"{name}({', '.join(parts)}) -> {signature.return_annotation}"
    if len(line) > _WIDE:
        lines = "".join(f"    {part},\n" for part in parts)
        line = f"{name}(\n{lines}) -> {signature.return_annotation}"
    return f"```text\n{line}\n```"


def _default(value: object) -> str:
    return f"{type(value).__name__}()" if type(value).__module__ != "builtins" else repr(value)


_WIDE = 90  # characters of a line of code
_HEADING = re.compile(r"^(Args|Attributes|Returns|Raises|Example|Class attributes):$", re.M)
_ENTRY = re.compile(r"^    (\w+): ", re.M)
_ROLE = re.compile(r":(?:func|class|meth|attr):`~?([\w.]+)`")


def _docstring(member: object) -> str:
    """Return a docstring in Markdown: its sections become lists and code."""
    text = _ROLE.sub(r"`\1`", inspect.getdoc(member) or "").replace("``", "`")
    first, *rest = _HEADING.split(text)
    blocks = [first.strip()]
    for heading, content in zip(rest[::2], rest[1::2], strict=True):
        if heading == "Example":
            blocks.append(f"```pycon\n{inspect.cleandoc(content)}\n```")
            continue
        entries = _ENTRY.sub(r"- `\1`: ", content.strip("\n"))
        flat = re.sub(r"\n +", " ", entries).strip()
        blocks.append(f"{heading}:\n\n{flat}" if flat.startswith("-") else f"{heading}: {flat}")
    return "\n\n".join(blocks)


def _observer(name: str) -> Description:
    cls = catalog.load("observer", name)
    return Description(name, inspect.getdoc(cls) or "", (), "", describe_options(cls))


def _source(name: str) -> Description:
    cls = catalog.load("source", name)
    options = tuple(o for o in describe_options(cls) if o.key not in _FILLED_BY_SPEC)
    return Description(name, inspect.getdoc(cls) or "", (), "", options)


def _page(
    title: str, introduction: str, kind: catalog.Kind, find: Callable[[str], Description]
) -> str:
    # Third parties' entries are left out: the page must not depend on what is installed.
    entries = [_entry(find(name)) for name in catalog.BUILT_IN[kind]]
    return "\n\n".join([_MARK, f"# {title}", introduction, *entries]) + "\n"


def _entry(description: Description) -> str:
    parts = [f"## {description.name}", description.documentation.replace("``", "`")]
    if description.needs:
        parts.append("Needs: " + ", ".join(f"`{need}`" for need in description.needs))
    if description.source:
        parts.append(f"Source: {description.source}")
    parts.append(_table(description.options) if description.options else "No options.")
    return "\n\n".join(parts)


def _table(options: Sequence[Option]) -> str:
    rows = ["| option | values | default | what it does |", "| --- | --- | --- | --- |"]
    return "\n".join([*rows, *_rows(options, "")])


def _rows(options: Sequence[Option], prefix: str) -> Iterator[str]:
    for option in options:
        key = prefix + option.key
        default = "required" if option.required else _code(option.default)
        cells = (_code(key), _escaped(option.type), default, _escaped(option.description))
        yield f"| {' | '.join(cells)} |"
        many = option.type.startswith("list")
        yield from _rows(option.options, f"{key}[]." if many else f"{key}.")


def _code(text: str | None) -> str:
    return "" if text is None else f"`{text}`"


def _escaped(text: str) -> str:
    """Return a text that stays in one cell and shows characters of Markdown literally."""
    parts = text.split("`")
    for place, part in enumerate(parts):
        for character in "|" if place % 2 else "\\|<*_":  # inside backticks all else is literal
            part = part.replace(character, f"\\{character}")
        parts[place] = part
    return "`".join(parts)


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    SCHEMA.write_text(json_text(spec_schema()), encoding="utf-8")


if __name__ == "__main__":
    main()
