#!/usr/bin/env bash
# Installs what Penstock's build and tests need and this machine lacks: Debian packages (root or sudo) and, into .venv,
# Python packages. Says what it does, does nothing when all is there. Usage: tools/setup.sh [build|all]
#   build  only what `make demo` needs (compiler, CMake, libraries)
#   all    also test, lint and model-checking tools (default)
set -euo pipefail
cd "$(dirname "$0")/.." || exit 1

scope=${1:-all}
build_packages=(g++ cmake ninja-build make ccache git libfmt-dev libspdlog-dev nlohmann-json3-dev libhwy-dev
  libcli11-dev)
test_packages=(libgtest-dev librapidcheck-dev libbenchmark-dev python3 python3-venv clang clang-format clang-tidy
  libclang-rt-14-dev codespell shellcheck spin gcc)
python_packages=(ml_dtypes numpy)

case "$scope" in
build) wanted=("${build_packages[@]}") ;;
all) wanted=("${build_packages[@]}" "${test_packages[@]}") ;;
*)
  echo "setup: '$scope' is neither 'build' nor 'all'" >&2
  exit 2
  ;;
esac

if ! command -v dpkg-query >/dev/null; then
  echo "setup: this is no Debian-like system; install by its own means: ${wanted[*]}" >&2
  exit 1
fi
missing=()
for package in "${wanted[@]}"; do
  status=$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)
  [ "$status" = "install ok installed" ] || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  sudo=()
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "setup: needs root or sudo to install: ${missing[*]}" >&2
      exit 1
    fi
    sudo=(sudo)
  fi
  echo "setup: installing Debian packages: ${missing[*]}"
  "${sudo[@]}" apt-get update -q >/dev/null
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null
fi

if [ "$scope" = all ]; then
  if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c "import pip" 2>/dev/null; then
    echo "setup: making .venv"
    rm -rf .venv
    python3 -m venv .venv
  fi
  lacking=()
  for package in "${python_packages[@]}"; do
    .venv/bin/python -c "import $package" 2>/dev/null || lacking+=("$package")
  done
  if [ ${#lacking[@]} -gt 0 ]; then
    echo "setup: installing Python packages into .venv: ${lacking[*]}"
    .venv/bin/python -m pip install -q --disable-pip-version-check "${lacking[@]}"
  fi
fi

if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
  echo "setup: no nvcc found: the CUDA back end will not be built (the CPU back end is complete without it)"
fi
