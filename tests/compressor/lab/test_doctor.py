"""What ``compress doctor`` makes of processors and installed packages."""

from dataclasses import replace

import pytest

from compressor.lab import doctor
from compressor.lab.doctor import (
    examine,
    int8_features,
    int8_meaning,
    missing_extras,
    runtime_warnings,
)
from compressor.report.pages.catalog import doctor_page
from compressor.report.terminal import plain_text


@pytest.mark.parametrize(
    ("cpu_info", "features", "meaning"),
    [
        ("flags\t\t: fpu avx2 avx512_vnni amx_int8\n", ("amx_int8", "avx512_vnni", "avx2"), "AMX"),
        ("flags : avx2 avx_vnni\n", ("avx_vnni", "avx2"), "one instruction"),
        (
            "model name: x\nflags : sse avx avx2\n",
            ("avx2",),
            "its sums saturate unless weights avoid that",
        ),
        ("Features\t: fp asimd asimddp\n", ("asimddp",), "one instruction"),
        ("flags : sse2\n", (), "not known"),
        ("", (), "not known"),
    ],
)
def test_what_features_mean_for_int8(
    cpu_info: str, features: tuple[str, ...], meaning: str
) -> None:
    assert int8_features(cpu_info) == features
    assert meaning in int8_meaning(features)


def test_two_distributions_of_onnx_runtime_are_a_warning() -> None:
    assert runtime_warnings(["onnxruntime-gpu"]) == []
    (missing,) = runtime_warnings([])
    assert "not installed" in missing
    (both,) = runtime_warnings(["onnxruntime", "onnxruntime-gpu"])
    assert both.startswith("onnxruntime and onnxruntime-gpu are installed together")
    assert "pip uninstall onnxruntime onnxruntime-gpu" in both


def test_warnings_are_shown_last(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda p: "1.0" if p.startswith("onnxruntime") else real(p)
    )
    lines = plain_text(doctor_page(examine())).splitlines()
    assert lines[-2] == ""
    assert lines[-1].startswith("warning: onnxruntime and onnxruntime-gpu and ")


def test_extras_that_lack_a_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda p: None if p in ("gguf", "tokenizers") else "1")
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    wanted = [
        "torch>=2.10",
        'gguf>=0.19; extra == "gguf"',
        'tokenizers>=0.22; extra == "transformers"',
        'transformers>=5.23; extra == "transformers"',
        'openvino>=2025.2; extra == "openvino"',
        'compressor[gguf]; extra == "test"',
        'tokenizers; extra == "test"',
        'tokenizers; (platform_machine == "x86_64") and extra == "tensorrt"',
    ]
    lacking = missing_extras(wanted)
    assert lacking == {"gguf": ("gguf",), "transformers": ("tokenizers",)}
    text = plain_text(doctor_page(replace(examine(), extras=lacking)))
    assert 'not installed (tokenizers): pip install "compressor[transformers]"' in text


def test_a_machine_with_gpus() -> None:
    gpus = (doctor.Gpu("NVIDIA Big", "9.0", 141_000_000_000),)
    machine = replace(examine(), gpus=gpus, builders=(doctor.Builder("rtx", True, "v1"),))
    text = plain_text(doctor_page(machine))
    assert "NVIDIA Big, 141 GB, compute capability 9.0\n" in text
    assert "TensorRT builder rtx   v1\n" in text or "TensorRT builder rtx  v1\n" in text


def test_the_full_builder_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    assert not doctor._rtx_builder().available
    assert "NVIDIA's package index" in doctor._gpu_builder(()).detail
    monkeypatch.setattr(doctor, "find_spec", lambda _: object())
    assert doctor._rtx_builder().available
    assert not doctor._gpu_builder(()).available
    assert doctor._gpu_builder((doctor.Gpu("x", "8.6", 1),)).available
