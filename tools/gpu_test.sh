#!/usr/bin/env bash
# Builds the GPU test binaries and runs them where there is a GPU. Exit code 77: built, but no GPU to run on.
# With a folder as argument: runs the binaries that lie in it (carried from another machine) instead of building.
set -euo pipefail
cd "$(dirname "$0")/.." || exit 1

if [ $# -gt 0 ]; then
  folder=$1
else
  cmake --preset cuda >/dev/null
  cmake --build --preset cuda -j "$(nproc)" --target gpu_tests
  folder=build/cuda/gpu_tests
fi
if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "gpu-test: built in $folder; not run: no NVIDIA GPU in this machine"
  exit 77
fi
failed=0
for binary in "$folder"/*; do
  [ -x "$binary" ] || continue
  echo "== $(basename "$binary")"
  timeout -k 10 300 "$binary" --gtest_brief=1 || failed=$((failed + 1))
done
echo "gpu-test: $failed binaries failed"
[ "$failed" -eq 0 ]
