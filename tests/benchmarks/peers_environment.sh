#!/bin/sh
# Make an environment with the quantizers that bench_peers.py compares with:
#
#     tests/benchmarks/peers_environment.sh FOLDER
#     COMPRESSOR_PEERS=FOLDER python -m pytest -m benchmark -s tests/benchmarks/bench_peers.py
#
# They want versions of their own, so FOLDER must not be the project's environment. A build of
# PyTorch without CUDA is enough; name where pip finds one by PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.
set -eu
: "${1:?name the folder of the environment}"
test ! -e "$1/pyvenv.cfg" || { echo "$1: there is an environment already" >&2; exit 2; }
python3 -m venv "$1"
"$1/bin/pip" install torch==2.13.0 torchvision==0.28.0 onnx onnxscript onnxruntime \
  nncf==3.4.0 aimet-onnx==2.42.0
