"""``README.md`` of a Hugging Face directory: how it was made, and what was measured of it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor.models.checkpoint.folder import CARD
from compressor.models.layer_uses import is_single_expert
from compressor.models.transformers.classes import loading_class
from compressor.report.markdown import MARKS, code, listed, table, text
from compressor.report.tables import facts, missing_reasons, model_table
from compressor.report.verdict import headline

_FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)  # metadata, as the Hugging Face Hub reads it
_LOAD = """\
```python
from transformers import {opener}

model = {opener}.from_pretrained({folder})
```"""
_LOAD_EXPERTS = """\
`transformers` leaves experts in this layout at random values, without an error. GPTQModel reads \
those of some models, such as `qwen3_moe`:

```python
from gptqmodel import GPTQModel

model = GPTQModel.load({folder})
```"""
_SERVE = """\
```sh
llama-server --model {file}
```"""
_GENERATE = """\
```python
import onnxruntime_genai as genai

model = genai.Model({folder})
tokenizer = genai.Tokenizer(model)
params = genai.GeneratorParams(model)
params.set_search_options(max_length=200)
generator = genai.Generator(model, params)
generator.append_tokens(tokenizer.encode("Once upon a time"))
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)))
```"""
_USES = {"gguf": _SERVE, "genai": _GENERATE}
_PUBLISHED = (".gguf", ".safetensors", ".onnx", ".onnx.data")


def is_shared(name: str) -> bool:
    """Return whether a file makes its folder one that people share, and that has a card."""
    return name in ("config.json", "genai_config.json") or name.endswith(".gguf")


def model_card(report: Mapping[str, Any], manifest: Mapping[str, Any], source: Path | None) -> str:
    """Return a card: recipe, numbers, the manifest's fingerprint, and then the source's own card.

    Args:
        manifest: what ``manifest.json`` will hold, except for the card itself and the reports,
            and the hash of that as its ``fingerprint``.
        source: the directory of the float model. The metadata of its card (licence, languages)
            stay at the beginning, where the Hub looks for them.
    """
    front, body = _source_card(source)
    name = str(report["name"])
    origin = f" of {code(source.resolve().name)}" if source is not None else ""
    version = manifest["versions"]["compressor"]
    hashes = [
        f"{code(str(file['name']))}: {file['sha256']}"
        for file in manifest["outputs"]
        if str(file["name"]).endswith(_PUBLISHED)
    ]
    blocks = [
        front + f"# {text(name)}",
        f"The weights{origin}, compressed by {code(f'compressor {version}')}.",
        f"**{MARKS[report['verdict']]} {text(headline(report))}**",
        "## Recipe",
        "```yaml\n" + "\n".join(_recipe(manifest["spec"]["passes"])) + "\n```",
        "## Numbers",
        table(model_table(report)),
        f"{', '.join(facts(report))}.",
        listed(text(reason) for reason in missing_reasons(report)),
        "## Use",
        *_uses(report, manifest["spec"], _opener(source)),
        "## Proof",
        f"Fingerprint of {code('manifest.json')}: {manifest['fingerprint']}. It covers the inputs, "
        "the recipe, the versions and the SHA-256 of every file but the reports and this card; "
        f"{code('compress verify')} compares all of them.",
        listed(hashes),
        f"# The float model\n\n{body}" if body else "",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _uses(report: Mapping[str, Any], spec: Mapping[str, Any], opener: str) -> list[str]:
    """Return how each artifact is opened, from beside the folder."""
    formats = {artifact["format"] for artifact in report["artifacts"]}
    folder = Path(spec.get("output") or report["name"]).name
    names = {
        "opener": opener,
        "folder": json.dumps(folder, ensure_ascii=False),
        "file": shlex.quote(f"{folder}/model.gguf"),
    }
    load = _LOAD_EXPERTS if _loses_experts(report, spec) else _LOAD
    uses = [] if formats <= _USES.keys() else [load.format(**names)]
    return [*uses, *(use.format(**names) for kind, use in _USES.items() if kind in formats)]


def _loses_experts(report: Mapping[str, Any], spec: Mapping[str, Any]) -> bool:
    """Return whether ``transformers`` reads no codes of experts that the directory has."""
    rows = (row for step in report["passes"] for row in step.get("layers") or ())
    return any(export.get("layout") in ("gptq", "awq") for export in spec["exports"]) and any(
        is_single_expert(row["name"]) and str(row.get("scheme")).startswith(("int", "uint"))
        for row in rows
    )


def _recipe(passes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return each pass as a line of YAML, without the options that were not given."""
    return [
        "- " + json.dumps({k: v for k, v in step.items() if v not in (None, [], ())})
        for step in passes
    ] or ["[]"]


def _source_card(source: Path | None) -> tuple[str, str]:
    """Return the metadata and the text of the float model's card; empty without one."""
    path = None if source is None else source / CARD
    if path is None or not path.is_file():
        return "", ""
    whole = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
    front = _FRONT.match(whole)
    metadata = front[0] + "\n" if front else ""
    return metadata, whole[front.end() if front else 0 :].strip()


def _opener(source: Path | None) -> str:
    config = None if source is None else source / "config.json"
    if config is None or not config.is_file():
        return loading_class({})
    return loading_class(json.loads(config.read_text(encoding="utf-8")))
