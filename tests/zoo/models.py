"""Builds what a case names: a network, a directory for ``transformers``, or an ONNX file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from compressor.types.tensors import TensorSpec
from tests import small_zoo
from tests.compressor.exporters.tiny_directories import save_tiny
from tests.zoo.cases import Case, drawn

_SAMPLES = 8


def build(
    library: str, model: str, options: Mapping[str, Any], inputs: Sequence[Sequence[Any]]
) -> nn.Module:
    """Build a network; specs name this function as their factory.

    Parameters are drawn, since zeros and ones would hide mistakes. Statistics of batch-norms are
    those of drawn inputs, or signals would vanish or explode in deep networks.
    """
    if library == "small":
        return small_zoo.architecture(model).build()
    module = small_zoo.seeded(lambda: _BUILDERS[library](model, dict(options)))
    specs = tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in inputs)
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if norms:
        feed = [torch.from_numpy(a) for a in drawn(specs, _SAMPLES, seed=3).values()]
        for norm in norms:
            norm.train()
            norm.momentum = 1.0
        with torch.no_grad():
            module(*feed)
        for norm in norms:
            norm.eval()
            if norm.running_var is not None:  # a channel that hardly varies would be blown up
                norm.running_var.clamp_(min=0.1 * float(norm.running_var.mean()) + 1e-6)
    return module.eval()


def _timm(model: str, options: dict[str, Any]) -> nn.Module:
    return import_module("timm").create_model(model, num_classes=10, **options)  # type: ignore[no-any-return]


def _torchvision(model: str, options: dict[str, Any]) -> nn.Module:
    return import_module("torchvision").models.get_model(model, weights=None, **options)  # type: ignore[no-any-return]


def _segmentation(model: str, options: dict[str, Any]) -> nn.Module:
    library = import_module("segmentation_models_pytorch")
    return getattr(library, model)(encoder_weights=None, classes=3, **options)  # type: ignore[no-any-return]


def _yolo(model: str, options: dict[str, Any]) -> nn.Module:
    return import_module("ultralytics").YOLO(f"{model}.yaml", **options).model.float()  # type: ignore[no-any-return]


def _monai(model: str, options: dict[str, Any]) -> nn.Module:
    return getattr(import_module("monai.networks.nets"), model)(**options)  # type: ignore[no-any-return]


def _torchaudio(model: str, options: dict[str, Any]) -> nn.Module:
    return getattr(import_module("torchaudio").models, model)(**options)  # type: ignore[no-any-return]


_BUILDERS: Mapping[str, Callable[[str, dict[str, Any]], nn.Module]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "smp": _segmentation,
    "ultralytics": _yolo,
    "monai": _monai,
    "torchaudio": _torchaudio,
}


def save_directory(case: Case, folder: Path) -> Path:
    """Write a directory as ``transformers`` does."""
    return save_tiny(folder, case.model)


def save_file(case: Case, path: Path) -> Path:
    """Copy an ONNX file out of a package, or have its framework write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if case.library == "torch.onnx":
        _save_torch(*case.model.split("-opset"), path)
    elif case.library == "skl2onnx":
        path.write_bytes(_estimator(case.model).SerializeToString())
    else:
        package = find_spec(case.library)
        assert package is not None
        assert package.submodule_search_locations
        shutil.copy(Path(package.submodule_search_locations[0], f"{case.model}.onnx"), path)
    return path


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(24, 32, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(64, 32, batch_first=True)
        self.head = nn.Linear(32, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(x)
        x, _ = self.gru(x)
        result: torch.Tensor = self.head(x)
        return result


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layers(x))
        return result


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def block(before: int, after: int, stride: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False),
                nn.BatchNorm2d(before),
                nn.ReLU6(),
                nn.Conv2d(before, after, 1, bias=False),
                nn.BatchNorm2d(after),
                nn.Hardswish(),
            )

        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.LeakyReLU(0.1))
        self.body = nn.Sequential(block(16, 32, 1), block(32, 48, 2), block(48, 48, 1))
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.head = nn.Linear(48 + 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.up(self.body(x))], 1)
        result: torch.Tensor = self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return result


_WRITTEN: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (_Convolutions, (3, 64, 64)),
    "attention": (_Attention, (16, 32)),
    "recurrent": (_Recurrent, (16, 24)),
}
_FIRST_OF_DYNAMO = 18


def _save_torch(model: str, number: str, path: Path) -> None:
    """Write a file with the exporter that PyTorch has for the opset."""
    opset = int(number)
    torch.backends.mha.set_fastpath_enabled(False)  # the older exporter has no operator for it
    kind, shape = _WRITTEN[model]
    module = small_zoo.seeded(kind)
    x = torch.from_numpy(drawn((TensorSpec("x", ("batch", *shape), "float32"),), 2, 1)["x"])
    if opset < _FIRST_OF_DYNAMO:
        axes = {"x": {0: "batch"}, "y": {0: "batch"}}
        torch.onnx.export(
            module, (x,), path, input_names=["x"], output_names=["y"],
            opset_version=opset, dynamic_axes=axes, dynamo=False,
        )  # fmt: skip
        return
    torch.onnx.export(
        module, (x,), path, input_names=["x"], output_names=["y"], opset_version=opset,
        dynamic_shapes=({0: torch.export.Dim("batch")},), dynamo=True, external_data=False,
    )  # fmt: skip


def _estimator(name: str) -> onnx.ModelProto:
    """Fit one of scikit-learn's estimators, and convert it."""
    from skl2onnx import to_onnx

    places = ("neural_network", "linear_model", "ensemble", "svm", "gaussian_process", "cluster")
    modules = [import_module(f"sklearn.{place}") for place in places]
    kind = next(getattr(m, name) for m in modules if hasattr(m, name))
    rng = np.random.default_rng(2)
    x = rng.standard_normal((200, 16)).astype(np.float32)
    score = x @ rng.standard_normal(16)
    y = score if name.endswith("Regressor") else (score > 0).astype(np.int64)
    sizes: dict[str, Any] = {
        "MLPClassifier": {"hidden_layer_sizes": (64, 32), "max_iter": 1000},
        "MLPRegressor": {"hidden_layer_sizes": (64, 32), "max_iter": 1000},
        "RandomForestClassifier": {"n_estimators": 10},
        "GradientBoostingRegressor": {"n_estimators": 10},
        "SVC": {"probability": True},
        "KMeans": {"n_clusters": 5},
    }
    fixed = {"random_state": 0} if "random_state" in signature(kind).parameters else {}
    fitted = kind(**sizes.get(name, {}), **fixed).fit(x, y)
    options = {"zipmap": False} if hasattr(fitted, "predict_proba") else None
    converted: onnx.ModelProto = to_onnx(fitted, x[:1], options=options)
    return converted
