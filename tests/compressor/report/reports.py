"""Reports made by hand, as ``compressor.report.run`` and ``compressor.run.verify`` build them."""

from __future__ import annotations

import math
from typing import Any

from compressor.run.verdicts.verdicts import judge
from compressor.spec.keys import LimitKeys

NO_DATA = "the spec has no data.evaluation"
STAGES = ("layer1", "layer2", "layer3")


def metric(value: float, samples: int = 2000) -> dict[str, Any]:
    half = 196.0 * math.sqrt(value * (100.0 - value)) / 100.0 / math.sqrt(samples)
    return {
        "name": "accuracy",
        "value": value,
        "samples": samples,
        "ci95": [value - half, value + half],
        "unit": "%",
        "higher_is_better": True,
    }


def times(batch: int, p50: float) -> dict[str, Any]:
    return {"batch": batch, "p50": p50, "p90": p50 * 1.08, "p99": p50 * 1.31, "rounds": 300}


def latency(batch: int, base: float, own: float) -> dict[str, Any]:
    ratio = own / base
    return {
        "batch": batch,
        "float": times(batch, base),
        "artifact": times(batch, own),
        "ratio": {"value": ratio, "ci95": [ratio * 0.985, ratio * 1.016]},
    }


def layer_names() -> list[str]:
    convs = [f"{s}.{b}.conv{c}" for s in STAGES for b in range(3) for c in (1, 2)]
    return ["conv1", *convs, "linear"]


def layers(scheme: str) -> list[dict[str, Any]]:
    """Layers that lose more the deeper they lie; the classifier stays as it is."""
    rows = []
    for index, name in enumerate(layer_names()):
        whole = scheme == "float32" or name == "linear"
        channels = 16 * (1 + index // 7)
        rows.append(
            {
                "name": name,
                "kind": "Conv",
                "shape": [channels, 3 if index == 0 else channels, 3, 3],
                "bytes_before": 36 * channels**2,
                "bytes": 36 * channels**2 if whole else 9 * channels**2 + 4 * channels,
                "scheme": "float32" if whole else scheme,
                "sparsity": 0.0 if whole else 0.2 + 0.13 * index,
                "sqnr_db": None if scheme == "float32" else 41.5 - 0.62 * index - index % 3,
                "weight_sqnr_db": None if whole else 40.25 + index % 4,
                "details": {"fused": "batch-norm"} if scheme == "float32" else {},
            }
        )
    return rows


def attribution(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "basis": "outputs",
        "reason": None,
        "shared_inputs": 5.0,
        "metric_basis": "divergence",
        "shared_metric_noise": 0.01,
        "layers": [
            {
                "name": row["name"],
                "scheme": row["scheme"],
                "bytes_to_skip": row["bytes_before"] - row["bytes"],
                "own_sqnr_db": 48.0,
                "output_sqnr_db": 52.0,
                "noise_share": 0.5 * index,
                "predicted_gain_db": 0.1,
                "metric_noise": 0.001 * index,
            }
            for index, row in enumerate(rows)
        ],
    }


def bell(low: float, high: float, peak: int) -> list[int]:
    """Counts of a normal distribution between the ends of 64 bins."""
    middle, width = (low + high) / 2, (high - low) / 6
    steps = [low + (i + 0.5) * (high - low) / 64 for i in range(64)]
    return [round(peak * math.exp(-(((x - middle) / width) ** 2) / 2)) for x in steps]


def histogram(name: str, reach: float) -> dict[str, Any]:
    counts = bell(-reach, reach, 300)
    return {
        "name": name,
        "weight": {
            "low": -reach,
            "high": reach,
            "counts": counts,
            "after": counts[::-1],
            "range": [-0.99 * reach, reach],
            "range_reason": None,
        },
        "input": {
            "low": 0.0,
            "high": 8.125,
            "counts": bell(-8.125, 8.125, 9000)[32:] + [0] * 32,
            "samples": 64,
            "range": [0.0, 5.5],
            "range_reason": None,
            "outside": 0.0425,
        },
    }


def passes() -> list[dict[str, Any]]:
    quantized = layers("int8/channel")
    weakest = min(quantized, key=lambda row: row["sqnr_db"])
    return [
        {
            "pass": "fuse",
            "seconds": 0.84,
            "cached": True,
            "metric": metric(92.6),
            "metric_drop": 0.0,
            "sqnr_db": 128.4,
            "bytes": 1_083_432,
            "weakest": None,
            "notes": [],
            "layers": layers("float32"),
            "histograms": [],
            "attribution": None,
        },
        {
            "pass": "quantize-static",
            "seconds": 11.7,
            "cached": False,
            "metric": metric(92.45),
            "metric_drop": 0.15,
            "sqnr_db": 29.31,
            "bytes": 283_204,
            "weakest": {"name": weakest["name"], "sqnr_db": weakest["sqnr_db"]},
            "notes": ["linear is kept in float32: rule 'linear' says skip"],
            "layers": quantized,
            "histograms": [histogram("linear", 0.5), histogram("layer3.2.conv2", 0.25)],
            "attribution": attribution(quantized),
        },
    ]


def checks(runtime: str) -> list[dict[str, Any]]:
    return [
        {"name": "opens in its runtime", "ok": True, "detail": runtime},
        {
            "name": "agrees with the model it was exported from",
            "ok": True,
            "detail": "equal; at least 35.3 dB",
        },
    ]


def safetensors() -> dict[str, Any]:
    files = [
        {"name": "model.safetensors", "bytes": 284_616, "sha256": "5a" * 32},
        {"name": "model.json", "bytes": 21_870, "sha256": "c3" * 32},
    ]
    return {
        "format": "safetensors",
        "path": "model.safetensors",
        "files": files,
        "bytes": 306_486,
        "predicted_bytes": 305_900,
        "sha256": files[0]["sha256"],
        "deployed": False,
        "runtime": "compressor 0.1.0 on onnxruntime 1.30.0",
        "float_file": "resnet20.safetensors",
        "float_bytes": 1_089_032,
        "metric": metric(92.45),
        "metric_reason": None,
        "sqnr_db": 29.31,
        "agreement": 98.95,
        "max_abs_diff": 0.8123,
        "metric_drop": 0.15,
        "size_ratio": 306_486 / 1_089_032,
        "latency_ms": times(1, 0.241),
        "latency_ratio": None,
        "latency_ratio_reason": "a storage format",
        "latency": [latency(1, 0.415, 0.241), latency(32, 7.92, 4.31)],
        "checks": checks("compressor 0.1.0 on onnxruntime 1.30.0"),
    }


def onnx() -> dict[str, Any]:
    files = [{"name": "model.onnx", "bytes": 312_044, "sha256": "0f" * 32}]
    rows = [latency(1, 0.412, 0.233), latency(32, 7.9, 4.27)]
    return {
        "format": "onnx",
        "path": "model.onnx",
        "files": files,
        "bytes": 312_044,
        "contents": {"weights": 275_000, "scales": 7_044, "graph": 30_000},
        "predicted_bytes": 311_000,
        "sha256": files[0]["sha256"],
        "deployed": True,
        "runtime": "onnxruntime 1.30.0",
        "float_file": "model.onnx",
        "float_bytes": 1_089_032,
        "metric": metric(92.45),
        "metric_reason": None,
        "sqnr_db": 29.3,
        "agreement": 98.95,
        "max_abs_diff": 0.8124,
        "metric_drop": 0.15,
        "size_ratio": 312_044 / 1_089_032,
        "latency_ms": rows[0]["artifact"],
        "latency_ratio": rows[0]["ratio"]["value"],
        "latency_ratio_reason": None,
        "latency": rows,
        "checks": checks("onnxruntime 1.30.0"),
    }


def limits(artifacts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for artifact in artifacts:
        drop = artifact["metric_drop"]
        artifact["metric_drop_ci95"] = None if drop is None else [drop - 0.25, drop + 0.3]
    keys = LimitKeys(metric_drop=0.5, size_ratio=0.3)
    return judge(keys, artifacts, metric(92.6), shrinks=True)


def flipped() -> dict[str, Any]:
    rows = [(17, 3, 3, 5, 1.25), (1204, 9, 9, 4, 0.5), (3, 0, 8, 0, 0.25)]
    return {
        "artifact": "model.onnx",
        "samples": 2000,
        "flipped": 21,
        "lost": 12,
        "won": 9,
        "worst": [
            {
                "index": index,
                "place": None,
                "target": target,
                "float": theirs,
                "artifact": ours,
                "margin": margin,
            }
            for index, target, theirs, ours, margin in rows
        ],
    }


def classes() -> list[dict[str, Any]]:
    return [
        {
            "class": label,
            "samples": 200,
            "float": 92.5,
            "artifact": 91.0 + 0.25 * label,
            "change": -1.5 + 0.25 * label,
        }
        for label in range(10)
    ]


def graph() -> dict[str, Any]:
    """Layers in a row, and a shortcut over two in each block."""
    names = layer_names()
    entries = [
        {
            "name": name,
            "operator": "Conv",
            "reads": sorted({index - 1, index - 2 + index % 2} - {-1, -2}) if index else [],
            "macs": 2_000_000 + index,
            "bytes": 65_536 + index,
            "time_share": 100 / len(names),
        }
        for index, name in enumerate(names)
    ]
    return {"layers": entries, "time_basis": "predicted from operations and bytes at batch 1"}


def advice() -> dict[str, Any]:
    """Two rules for the pass that quantizes, as ``compressor.lab.explain.advice`` gives them."""
    rules = [("layer3.2.conv2", {"skip": True}), ("layer3.2.conv1", {"skip": True})]
    return {
        "reason": None,
        "diff": [
            " passes:",
            "   - pass: quantize-static # passes.1",
            "+    layers:",
            *(f"+      - {{match: {name}, skip: true}}" for name, _ in rules),
        ],
        "suggested": [{"index": 1, "layer": name, "change": keys} for name, keys in rules],
        "predicted": {
            "bytes": 124_032,
            "sqnr_db": 0.8,
            "noise_share": 17.5,
            "metric": 0.2,
            "ci95": None,
            "metric_share": 16.5,
            "within_noise": None,
        },
    }


NOTHING = {
    "reason": "nothing is worth trying before more samples are evaluated: that accuracy lost "
    "anything may be chance",
    "diff": [],
    "suggested": [],
    "predicted": None,
}


def passed() -> dict[str, Any]:
    artifacts = [safetensors(), onnx()]
    base = times(1, 0.414)
    return {
        "schema": 1,
        "name": "resnet20-edge",
        "ok": True,
        "verdict": "passed",
        "identity": {
            "model": "1b" * 32,
            "data": "2c" * 32,
            "metric_code": "",
            "spec": "3d" * 32,
        },
        "baseline": {
            "metric": metric(92.6),
            "metric_reason": None,
            "bytes": 1_089_032,
            "parameters": 269_722,
            "macs": 40_813_184,
            "latency_ms": base,
            "latency": [base, times(32, 7.91)],
        },
        "artifacts": artifacts,
        "passes": passes(),
        "limits": limits(artifacts),
        "advice": NOTHING,
        "flipped": flipped(),
        "classes": classes(),
        "graph": graph(),
        "environment": {
            "python": "3.11.2",
            "versions": {
                "compressor": "0.1.0",
                "torch": "2.13.0",
                "numpy": "2.4.0",
                "onnx": "1.20.0",
                "onnx-ir": "1.0.0",
                "onnxscript": "0.7.0",
                "runtime": "onnxruntime 1.30.0",
            },
            "processor": "Example CPU at 2.40 GHz",
            "cores": 8,
            "system": "Linux x86_64",
        },
    }
