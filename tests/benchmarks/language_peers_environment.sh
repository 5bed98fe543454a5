#!/bin/sh
# Make environments with the programs that quantize language models and read their layouts:
#
#     tests/benchmarks/language_peers_environment.sh FOLDER
#     COMPRESSOR_LANGUAGE_PEERS=FOLDER python -m pytest -m benchmark -s tests/benchmarks/bench_language_peers.py
#     COMPRESSOR_LANGUAGE_PEERS=FOLDER python -m pytest -m slow tests/compressor/exporters/test_layout_readers.py
#
# llm-compressor wants an older transformers than GPTQModel, so there are two: FOLDER/gptqmodel, with
# AutoRound, and FOLDER/llmcompressor. GPTQModel 7.7 asks for a newer PyTorch than its code needs, so
# it comes without its dependencies, which are named here. A build of PyTorch without CUDA is enough;
# name where pip finds one by PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.
set -eu
: "${1:?name the folder of the environments}"
test ! -e "$1" || { echo "$1: it exists already" >&2; exit 2; }
torch="torch==2.13.0"
python3 -m venv "$1/gptqmodel"
"$1/gptqmodel/bin/pip" install "$torch" transformers==5.24.0 accelerate==1.15.0 optimum==2.3.0 \
  auto-round==0.16.1 torchao==0.18.0 Defuser==0.0.28 Device-SMI==0.5.7 LogBar==0.4.15 \
  PyPcre==0.6.4 TokeNicer==0.0.14 threadpoolctl pillow protobuf
"$1/gptqmodel/bin/pip" install --no-deps gptqmodel==7.7.0
python3 -m venv "$1/llmcompressor"
"$1/llmcompressor/bin/pip" install "$torch" llmcompressor==0.14.0.1
