"""Artifacts that are timed on another device: over a real ssh to this machine, and over adb."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from compressor.errors import InputError, SpecError
from compressor.exporters import LitertExporter
from compressor.lab.bench.bench import BenchOptions, bench
from compressor.lab.bench.device import Device
from compressor.models.onnx.carrier import open_onnx
from compressor.progress import Silent
from compressor.run.timing import timing
from tests.compressor.exporters.hand_made import CONTEXT
from tests.compressor.lab.bench.conftest import SaveOnnx
from tests.compressor.lab.bench.test_bench_command import invoke
from tests.compressor.models.test_half_files import turned

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def put_on_path(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def key(path: Path) -> Path:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, timeout=60)
    return path


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start a server of ssh on this machine; return how ssh calls it."""
    if not Path(SSHD).exists() or shutil.which("ssh-keygen") is None:
        pytest.skip("needs a server of ssh: install openssh-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours, theirs = key(tmp_path / "user"), key(tmp_path / "host")
    (tmp_path / "keys").write_text(ours.with_suffix(".pub").read_text())
    settings = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": theirs,
        "AuthorizedKeysFile": tmp_path / "keys",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
    }
    config = tmp_path / "sshd_config"
    config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # the server asks for it
    server = subprocess.Popen(
        [SSHD, "-D", "-e", "-f", str(config)], stderr=subprocess.PIPE, text=True
    )
    client = tmp_path / "ssh_config"
    client.write_text(
        f"Host device\n HostName 127.0.0.1\n Port {port}\n IdentityFile {ours}\n"
        f"StrictHostKeyChecking accept-new\n UserKnownHostsFile {tmp_path / 'known'}\n"
    )
    programs = tmp_path / "programs"
    programs.mkdir()
    real = shutil.which("ssh")
    put_on_path(programs, "ssh", f'exec {real} -F {client} "$@"', monkeypatch)
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        if server.poll() is not None:
            _, why = server.communicate()
            pytest.skip(f"the server of ssh does not start: {why.strip()}")
        time.sleep(0.1)
    yield "device"
    server.terminate()
    server.communicate(timeout=120)


@pytest.fixture
def elsewhere(tmp_path: Path) -> str:
    """A Python that finds no other copy of the package than the one that is sent, nor PyTorch."""
    packages = Path(timing.np.__file__).parents[1]
    start = tmp_path / "start.py"
    start.write_text(
        "import runpy, sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'onnx', 'onnx_ir', 'pydantic'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"sys.path[:] = ['.', *(p for p in sys.path if p.startswith(sys.base_prefix)),"
        f" {str(packages)!r}]\n"
        "import compressor\n"
        "assert compressor.__file__.startswith('/tmp') or './' in compressor.__file__\n"
        "runpy.run_module(sys.argv[2], run_name='__main__')\n"
    )
    return f"{sys.executable} -I {start}"


def test_files_are_timed_over_ssh(host: str, elsewhere: str, save: SaveOnnx):
    paths = [save("one.onnx"), save("other.onnx")]
    before = set(Path("/tmp").glob("tmp.*"))
    device = ("--ssh", host, "--device-python", elsewhere)
    result = invoke(*paths, *device, "--seconds", "0", "--batch", 1, "--batch", 4, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["device"] == f"ssh {host}"
    base, other = found["artifacts"]
    assert base["runtime"].startswith("onnxruntime")
    assert [row["batch"] for row in other["latency"]] == [1, 4]
    for row in other["latency"]:
        assert row["openings"] >= timing._LEAST_OPENINGS  # the loop of `measure` itself
        low, high = row["ratio"]["ci95"]
        assert 0 < low <= row["ratio"]["value"] <= high
    assert base["cold"] is None
    assert set(Path("/tmp").glob("tmp.*")) <= before, "nothing stays on the device"
    # A failure there has its message here.
    broken = paths[1].with_name("broken.onnx")
    broken.write_bytes(paths[1].read_bytes().replace(b"Relu", b"Rulu"))
    refused = invoke(broken, *device, "--shape", "x=1,3")
    assert refused.exit_code in (2, 3)
    assert "Traceback" not in refused.stderr


def test_files_are_timed_over_adb(
    tmp_path: Path, elsewhere: str, save: SaveOnnx, monkeypatch: pytest.MonkeyPatch
):
    """A stand-in for the program ``adb``, which takes the arguments that it takes."""
    path, halves = save(), turned(tmp_path / "halves.onnx")
    lite = LitertExporter().write(open_onnx(path, 21), tmp_path, CONTEXT)[0]
    programs = tmp_path / "programs"
    programs.mkdir()
    put_on_path(
        programs, "adb", '[ "$1 $2 $3" = "-s A1 shell" ] || exit 1\nexec sh -c "$4"', monkeypatch
    )
    options = BenchOptions(seconds=0, device=Device("adb", "A1", elsewhere))
    found = bench([path, lite], options, Silent())
    alone = bench([halves], options, Silent())
    assert found["device"] == "adb A1"
    assert [x["runtime"].split()[0] for x in found["artifacts"]] == ["onnxruntime", "litert"]
    times = [x["latency"][0]["p50"] for x in (*found["artifacts"], *alone["artifacts"])]
    assert min(times) > 0, "also of float16 with whose optimizer the runtime ends the process"
    with pytest.raises(InputError, match="did not time the files"):
        bench([path], BenchOptions(device=Device("adb", "A2", elsewhere)), Silent())
    with pytest.raises(InputError, match="not found"):
        bench([path], BenchOptions(device=Device("adb", "A1", "no-such-python")), Silent())


def test_what_names_no_device_is_refused(save: SaveOnnx, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SpecError, match="names no device"):
        bench([save()], BenchOptions(device=Device("ssh", "-oProxyCommand=id")), Silent())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SpecError, match="needs the program adb"):
        bench([save()], BenchOptions(device=Device("adb", "A1")), Silent())
    both = invoke(save(), "--ssh", "a", "--adb", "b")
    assert both.exit_code == 2
    assert "give one of them" in both.stderr
