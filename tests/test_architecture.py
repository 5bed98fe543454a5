"""What the layout promises, read from the sources: who imports whom, sizes, and manners."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from compressor import catalog
from compressor.types.exporter import Exporter, PackedFormat
from compressor.types.options import Options
from compressor.types.passes import Pass
from compressor.types.statistics import Observer

ROOT = Path(__file__).parents[1]
# From the ground up: a room imports what lies below it, or beside it where BESIDE says so.
FLOORS = (
    ("types",),
    ("graph",),
    ("models", "calibration"),
    ("spec",),
    ("run",),
    ("passes", "exporters"),
    ("lab", "report"),
    ("front",),
    ("cli",),
)
FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}
# A page shows what the lab found, and the lab words numbers as pages do.
BESIDE = {("report", "lab"), ("lab", "report")}
# Tensors in, tensors out.
MATHS = (
    "compressor/calibration/clipping.py",
    "compressor/calibration/histogram.py",
    "compressor/calibration/moments.py",
    "compressor/exporters/archive/forms.py",
    "compressor/exporters/gguf/blocks.py",
    "compressor/run/metrics/corpus.py",
    "compressor/run/knapsack.py",
    "compressor/run/verdicts/statistics.py",
    "compressor/models/codec/bit_stream.py",
    "compressor/models/codec/sparse.py",
    "compressor/passes/factor/decomposition.py",
    "compressor/passes/prune/criteria.py",
    "compressor/passes/prune/magnitude/ranking.py",
    "compressor/passes/prune/sparse/patterns.py",
    "compressor/passes/prune/sparse/permutation.py",
    "compressor/passes/prune/sparse/sparsegpt.py",
    "compressor/passes/train/archive/coding.py",
    *(str(p.relative_to(ROOT)) for p in ROOT.glob("compressor/passes/*/maths/[!_]*.py")),
    "compressor/run/timing/timing.py",
)
# What passes, fails or stays unknown, and which answers of a model have changed.
DECISIONS = (
    *(f"compressor/lab/compare/{name}.py" for name in ("compare", "gate", "runs")),
    *(f"compressor/lab/tune/{n}.py" for n in ("betting", "proofs", "searched", "solver")),
    "compressor/passes/train/archive/first_step.py",
    "compressor/passes/train/archive/rounds.py",
    *(f"compressor/run/metrics/{n}.py" for n in ("class_metrics", "judged", "metric_effect")),
    *(f"compressor/run/metrics/{n}.py" for n in ("metrics", "scores", "text_metrics")),
    *(f"compressor/run/noise/{name}.py" for name in ("noise", "signals")),
    *(f"compressor/run/verdicts/{n}.py" for n in ("data_doubts", "decisions", "fidelity")),
    "compressor/run/verdicts/verdicts.py",
)
# What every room may import, and what imports them only when it is asked for something.
TOP = {"__init__", "__main__", "catalog", "errors", "extension", "files", "progress"}
MOST_AT_THE_TOP = 7
RESOURCES = {"compressor/report/html.py"}  # the folder of the script that draws charts
MOST_LINES = 400
LEAST_LINES = 60

# A user's code may raise anything, and so may transformers on a stranger's configuration;
# tokenizers raises plain Exception; the command line is where every failure ends.
BROAD_HANDLERS = {
    "compressor/calibration/sources/user_functions.py",
    "compressor/calibration/sources/tokenizer.py",
    "compressor/models/torch/parametrized.py",
    "compressor/models/torch/smaller_module.py",
    "compressor/models/torch/carrier.py",
    "compressor/models/transformers/carrier.py",
    "compressor/models/transformers/config.py",
    "compressor/models/transformers/decoder.py",
    "compressor/models/transformers/networks.py",
    "compressor/cli/application.py",
    "compressor/run/metrics/metrics.py",
    "compressor/spec/user_code.py",
}
# click calls it with whatever its own ``main`` takes; a declaration is made of any fields.
PASSED_THROUGH = {"compressor/cli/application.py", "compressor/types/options.py"}


def sources(*places: str) -> list[Path]:
    found = [p for place in places for p in sorted(ROOT.glob(place))]
    assert found, places
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> dict[type[ast.AST], list[Any]]:
    """Return all nodes of a file by their class; to walk a tree takes longer than to parse it."""
    found: dict[type[ast.AST], list[Any]] = {}
    for node in ast.walk(tree_of(path)):
        found.setdefault(type(node), []).append(node)
    return found


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Return the dotted names of all imports, those inside functions and for types included."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    nodes = nodes_of(path)
    for node in (*nodes.get(ast.Import, ()), *nodes.get(ast.ImportFrom, ())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_from(path: Path, *names: str) -> list[str]:
    return [n for n in imports(path) if any(n == m or n.startswith(m + ".") for m in names)]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(path: Path) -> str:
    """Return a file's name as imports have it."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def files_of_packages() -> list[Path]:
    return sources("compressor/**/*.py")


def test_the_package_imports_no_sample_and_no_test():
    wrong = {name(p): imported_from(p, "samples", "tests") for p in files_of_packages()}
    assert not {path: names for path, names in wrong.items() if names}


def room_of(module: str) -> str:
    """Return the folder below ``compressor`` that a dotted name lies in, or the module there."""
    return module.split(".")[1] if "." in module else "__init__"


def test_every_folder_has_its_floor():
    folders = {p.name for p in (ROOT / "compressor").iterdir() if p.is_dir()} - {"__pycache__"}
    assert folders == set(FLOOR)
    assert {p.stem for p in (ROOT / "compressor").glob("*.py")} == TOP
    assert len(TOP) <= MOST_AT_THE_TOP


def test_imports_point_downwards():
    wrong = set()
    for path in files_of_packages():
        room = room_of(dotted(path))
        for target in imported_from(path, "compressor"):
            other = room_of(target)
            if other not in FLOOR or room == other or room in {"__init__", "__main__", "extension"}:
                continue
            below = room in FLOOR and FLOOR[other] < FLOOR[room]
            if not below and (room, other) not in BESIDE:
                wrong.add(f"{name(path)} imports {target}")
    assert not wrong


def test_no_import_hides_in_a_string():
    """Only two tables name our modules in text, and what starts a process of its own."""
    allowed = {
        "compressor/catalog.py",
        "compressor/cli/application.py",
        "compressor/run/timing/cold_rounds.py",
        "compressor/run/timing/cold_start.py",
    }
    modules = {dotted(path) for path in files_of_packages()}
    found = set()
    for path in files_of_packages():
        for node in nodes_of(path).get(ast.Constant, ()):
            text = node.value
            if isinstance(text, str) and text.partition(":")[0] in modules - {"compressor"}:
                found.add(name(path))
    assert found <= allowed | RESOURCES


def test_private_names_stay_in_their_module():
    """A name with an underscore is imported by nobody, and a module with one by its own folder."""
    wrong = set()
    for path in files_of_packages():
        for target in imported_from(path, "compressor"):
            *parents, last = target.split(".")
            own = dotted(path).split(".")[:-1]
            private = any(part.startswith("_") for part in parents) and parents[: len(own)] != own
            if private or (last.startswith("_") and last != "__version__"):
                wrong.add(f"{name(path)} imports {target}")
    assert not wrong


def test_no_module_imports_itself_in_a_circle():
    modules = {dotted(path): path for path in files_of_packages()}
    arrows: dict[str, set[str]] = {module: set() for module in modules}
    for module, path in modules.items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    arrows[module] |= {full if full in modules else node.module} & modules.keys()
    waiting = {module: targets - {"compressor", module} for module, targets in arrows.items()}
    while waiting:
        free = {module for module, targets in waiting.items() if not targets}
        assert free, f"circles among {sorted(waiting)}"
        waiting = {m: targets - free for m, targets in waiting.items() if m not in free}


def test_maths_knows_no_model_and_no_file():
    files = sources(*MATHS)
    foreign = ("onnx", "onnx_ir", "onnxruntime", "compressor.models", "compressor.graph")
    bits = "compressor.models.codec.bit_stream."
    wrong = {name(p): imported_from(p, *foreign, "pathlib", "safetensors") for p in files}
    assert not {p: n for p, n in wrong.items() if any(not x.startswith(bits) for x in n)}


def test_a_mutation_run_changes_maths_and_what_decides():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "mutmut"
    ]
    assert set(settings["only_mutate"]) == {*MATHS, *DECISIONS}
    for chosen in settings["pytest_add_cli_args_test_selection"]:
        path, _, function = chosen.removeprefix("--deselect=").partition("::")
        assert not function or f"def {function}" in (ROOT / path).read_text(encoding="utf-8")
    selected = [c for c in settings["pytest_add_cli_args_test_selection"] if c[:2] != "--"]
    places = [ROOT / chosen.partition("::")[0] for chosen in selected]
    tests = [t for p in places for t in (p.glob("test_*.py") if p.is_dir() else [p])]
    imported = {module for path in tests for module in imported_from(path, "compressor")}
    changed = {p: p.removesuffix(".py").replace("/", ".") for p in settings["only_mutate"]}
    untested = [p for p, m in changed.items() if not any(i.startswith(m) for i in imported)]
    assert not untested, "no test of theirs is among those that are run"


def test_heavy_libraries_are_imported_where_they_are_used():
    heavy = ("onnxruntime", "tensorrt", "tensorrt_rtx", "accelerate", "transformers")
    wrong = {}
    for path in files_of_packages():
        top = [n for n in tree_of(path).body if isinstance(n, ast.Import | ast.ImportFrom)]
        names = [a.name for n in top if isinstance(n, ast.Import) for a in n.names]
        names += [n.module or "" for n in top if isinstance(n, ast.ImportFrom)]
        found = [n for n in names if n.partition(".")[0] in heavy]
        if found:
            wrong[name(path)] = found
    assert not wrong


@pytest.mark.parametrize(
    ("kind", "base"), [("pass", Pass), ("exporter", Exporter), ("observer", Observer)]
)
def test_every_built_in_name_resolves(kind: catalog.Kind, base: type):
    for own_name, reference in catalog.BUILT_IN[kind].items():
        cls = catalog.resolve(reference)
        assert issubclass(cls, base), own_name
        assert own_name == (cls.format if kind == "exporter" else cls.name)
        assert cls.__doc__, own_name


def test_every_source_resolves():
    for own_name, reference in catalog.BUILT_IN["source"].items():
        cls = catalog.resolve(reference)
        assert issubclass(cls, Options), own_name
        assert {"info", "batches", "digest"} <= set(dir(cls)), own_name


def test_every_metric_and_format_resolves():
    for own_name, reference in catalog.BUILT_IN["metric"].items():
        assert catalog.resolve(reference).name == own_name
    for reference in catalog.BUILT_IN["format"].values():
        assert issubclass(catalog.resolve(reference), PackedFormat)


def test_no_small_file_has_a_single_reader():
    """A file of a few lines that one other file imports belongs into that file."""
    importers: dict[str, set[str]] = {}
    modules = {dotted(path): path for path in files_of_packages()}
    for module, path in modules.items():
        for target in imports(path):
            for known in (target, target.rpartition(".")[0]):
                if known in modules and known != module:
                    importers.setdefault(known, set()).add(module)
                    break
    small = {
        name(path)
        for module, path in modules.items()
        if path.stem != "__init__"
        and len(path.read_text().splitlines()) < LEAST_LINES
        and len(importers.get(module, ())) == 1
    }
    assert not small


def test_every_option_is_documented():
    for kind in ("pass", "exporter", "source", "observer"):
        for own_name, reference in catalog.BUILT_IN[kind].items():
            for field, info in catalog.resolve(reference).model_fields.items():
                assert info.description, f"{own_name}.{field}"


def test_files_stay_short():
    lengths = {name(p): len(p.read_text().splitlines()) for p in files_of_packages()}
    assert not {path: length for path, length in lengths.items() if length >= MOST_LINES}


def test_no_keywords_are_passed_through():
    wrong = set()
    for path in files_of_packages():
        for function in nodes_of(path).get(ast.FunctionDef, ()):
            if function.args.kwarg is None:
                continue
            own = function.args.kwarg.arg
            handed_on = (k for n in ast.walk(function) for k in getattr(n, "keywords", ()))
            if any(
                k.arg is None and isinstance(k.value, ast.Name) and k.value.id == own
                for k in handed_on
            ):
                wrong.add(name(path))
    assert wrong == PASSED_THROUGH


def test_broad_handlers_are_where_they_are_allowed():
    found = set()
    for path in files_of_packages():
        if any(is_broad(node.type) for node in nodes_of(path).get(ast.ExceptHandler, ())):
            found.add(name(path))
    assert found == BROAD_HANDLERS


def is_broad(caught: ast.expr | None) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    broad = ("Exception", "BaseException")
    return any(k is None or (isinstance(k, ast.Name) and k.id in broad) for k in kinds)


def test_no_session_is_kept_in_a_global():
    """No module-level state that a function changes."""
    assert not [name(path) for path in files_of_packages() if ast.Global in nodes_of(path)]
