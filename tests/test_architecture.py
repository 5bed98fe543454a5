"""What the layout promises, read from the sources: who imports whom, sizes, and manners."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from compressor import catalog
from compressor.types.exporter import Exporter
from compressor.types.options import Options
from compressor.types.passes import Pass
from compressor.types.statistics import Observer

ROOT = Path(__file__).parents[1]
WINGS = ("passes", "calibration", "exporters")
MOST_LINES = 400

# A user's code may raise anything, and so may transformers on a stranger's configuration;
# tokenizers raises plain Exception; the command line is where every failure ends.
BROAD_HANDLERS = {
    "compressor/calibration/sources/user_functions.py",
    "compressor/calibration/sources/tokens.py",
    "compressor/models/torch/smaller_module.py",
    "compressor/models/torch/carrier.py",
    "compressor/models/transformers/carrier.py",
    "compressor/models/transformers/networks.py",
    "compressor/cli/application.py",
    "compressor/run/metrics.py",
    "compressor/spec/user_code.py",
}
# click calls it with whatever its own ``main`` takes.
PASSED_THROUGH = {"compressor/cli/application.py"}

# Inside the spine, what each part must know nothing of.
ABOVE = {
    "types": ("carriers", "cli", "data", "graph", "model", "plan", "report", "run", "spec"),
    "graph": ("carriers", "cli", "data", "model", "plan", "report", "run", "spec"),
    "carriers": ("cli", "data", "model", "plan", "report", "run", "spec"),
    "spec": ("carriers", "cli", "data", "model", "plan", "report", "run"),
    "plan": ("cli", "report", "run"),
    "run": ("cli",),
    "report": ("cli",),
}


def sources(*places: str) -> list[Path]:
    found = [p for place in places for p in sorted(ROOT.glob(place))]
    assert found, places
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names of all imports, those inside functions and for types included."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_from(path: Path, *names: str) -> list[str]:
    return [n for n in imports(path) if any(n == m or n.startswith(m + ".") for m in names)]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def files_of_packages() -> list[Path]:
    return sources("compressor/**/*.py")


def test_the_package_imports_no_sample_and_no_test():
    wrong = {name(p): imported_from(p, "samples", "tests") for p in files_of_packages()}
    assert not {path: names for path, names in wrong.items() if names}


@pytest.mark.parametrize("wing", WINGS)
def test_every_arrow_points_to_the_spine(wing: str):
    others = [f"compressor.{other}" for other in WINGS if other != wing]
    wrong = {name(p): imported_from(p, *others) for p in sources(f"compressor/{wing}/**/*.py")}
    assert not {path: names for path, names in wrong.items() if names}


def test_the_spine_knows_no_wing():
    spine = [p for p in files_of_packages() if p.relative_to(ROOT).parts[1] not in WINGS]
    wings = [f"compressor.{wing}" for wing in WINGS]
    wrong = {name(p): imported_from(p, *wings) for p in spine}
    assert not {path: names for path, names in wrong.items() if names}


@pytest.mark.parametrize("part", ABOVE)
def test_the_spine_is_layered(part: str):
    forbidden = [f"compressor.{above}" for above in ABOVE[part]]
    files = sources(f"compressor/{part}/**/*.py" if part != "plan" else "compressor/run/plan.py")
    wrong = {name(p): imported_from(p, *forbidden) for p in files}
    assert not {path: names for path, names in wrong.items() if names}


def test_maths_knows_no_model_and_no_file():
    files = sources(
        "compressor/run/timing.py",
        "compressor/passes/prune/magnitude/ranking.py",
        "compressor/passes/prune/magnitude/ranking.py",
        "compressor/passes/prune/criteria.py",
        "compressor/passes/quantize/maths/affine.py",
        "compressor/passes/quantize/maths/gptq.py",
        "compressor/passes/quantize/maths/awq.py",
        "compressor/passes/quantize/maths/descent.py",
        "compressor/passes/quantize/maths/floating.py",
        "compressor/passes/quantize/maths/affine.py",
        "compressor/passes/quantize/maths/hqq.py",
        "compressor/passes/quantize/maths/kmeans.py",
        "compressor/passes/quantize/maths/floating.py",
        "compressor/passes/quantize/maths/awq.py",
        "compressor/passes/prune/sparse/patterns.py",
        "compressor/passes/prune/sparse/permutation.py",
        "compressor/passes/prune/sparse/sparsegpt.py",
        "compressor/passes/prune/sparse/patterns.py",
        "compressor/passes/prune/criteria.py",
        "compressor/passes/prune/selection.py",
        "compressor/exporters/archive/forms.py",
        "compressor/models/codec/bit_stream.py",
        "compressor/models/codec/sparse.py",
        "compressor/exporters/safetensors/packing.py",
        "compressor/calibration/histogram.py",
        "compressor/lab/compare/statistics.py",
        "compressor/lab/compare/difference.py",
        "compressor/lab/compare/statistics.py",
        "compressor/lab/compare/statistics.py",
        "compressor/lab/compare/statistics.py",
        "compressor/lab/compare/trend.py",
        "compressor/calibration/clipping.py",
        "compressor/calibration/moments.py",
        "compressor/calibration/clipping/*.py",
    )
    foreign = ("onnx", "onnx_ir", "onnxruntime", "compressor.carriers", "compressor.graph")
    wrong = {name(p): imported_from(p, *foreign, "pathlib", "safetensors") for p in files}
    assert not {path: names for path, names in wrong.items() if names}


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
        for function in ast.walk(tree_of(path)):
            if not isinstance(function, ast.FunctionDef) or function.args.kwarg is None:
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
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler) and is_broad(node.type):
                found.add(name(path))
    assert found == BROAD_HANDLERS


def is_broad(caught: ast.expr | None) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    broad = ("Exception", "BaseException")
    return any(k is None or (isinstance(k, ast.Name) and k.id in broad) for k in kinds)


def test_no_session_is_kept_in_a_global():
    """No module-level state that a function changes."""
    wrong = [
        name(path)
        for path in files_of_packages()
        if any(isinstance(node, ast.Global) for node in ast.walk(tree_of(path)))
    ]
    assert not wrong
