#!/usr/bin/env bash
# Makes the environment of the zoo: environment.sh PYTHON FOLDER
#
# PYTHON is that of the project's environment, which the new one sees: PyTorch and compressor are
# those of the tests. What is added comes without its dependencies, since some of them would bring
# another PyTorch with gigabytes of CUDA packages.
set -euo pipefail
python=$1 folder=$2
here=$(cd "$(dirname "$0")" && pwd)
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
base=$("$python" -c "$purelib")
test -x "$folder/bin/python" || "$python" -m venv --without-pip "$folder"
site=$("$folder/bin/python" -c "$purelib")
echo "$base" > "$site/project.pth"
"$folder/bin/python" -m pip install --quiet --no-deps --only-binary :all: \
  --disable-pip-version-check -r "$here/requirements.txt"

# torchvision's and torchaudio's operators are linked with PyTorch's libraries for CUDA, though
# nothing of these is called without a GPU. Libraries that define the names as zeros let them load.
stand_ins="$folder/lib/stand-ins" torch="$base/torch/lib"
mkdir -p "$stand_ins"
symbols() { readelf --wide --dyn-syms "$@" | awk '$8 != "" {split($8, n, "@"); print $7, n[1]}'; }
operators=$(ls "$site"/torchvision/*.so "$site"/torchaudio/lib/*.so)
comm -23 <(symbols $operators | awk '$1 == "UND" && tolower($2) ~ /cuda/ {print $2}' | sort -u) \
  <(symbols "$torch"/*.so | awk '$1 != "UND" {print $2}' | sort -u) |
  awk '{print ".globl " $1 "\n" $1 ": .zero 64"}' | (echo '.section .note.GNU-stack,""'; echo .data; cat) > "$stand_ins/names.s"
for name in $(LD_LIBRARY_PATH="$torch" ldd $operators | awk '/not found/ {print $1}' | sort -u); do
  cc -shared -o "$stand_ins/$name" -Wl,-soname,"$name" "$stand_ins/names.s"
done
