#!/usr/bin/env bash
# Installs the package into a fresh prefix, then builds and runs the consumer project against it by find_package and
# against the source tree by add_subdirectory.
set -euo pipefail
cd "$(dirname "$0")/.." || exit 1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --preset install -DCMAKE_INSTALL_PREFIX="$work/prefix" -DPENSTOCK_CUDA="${PENSTOCK_INSTALL_CUDA:-OFF}" >/dev/null
cmake --build --preset install -j "$(nproc)"
cmake --install build/install >/dev/null

cmake -S tests/consumer -B "$work/package" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
cmake --build "$work/package"
"$work/package/consumer" models/tiny-glm

cmake -S tests/consumer -B "$work/subdirectory" -G Ninja -DPENSTOCK_SOURCE_DIR="$PWD" -DPENSTOCK_CUDA=OFF >/dev/null
cmake --build "$work/subdirectory" --target consumer -j "$(nproc)"
"$work/subdirectory/consumer" models/tiny-glm

"$work/prefix/bin/penstock" --version
echo "install and consume: both forms built and ran"
