#!/usr/bin/env bash
# The whole test run, step by step, with a table at the end. Usage: tools/test.sh [step ...]  (default: all steps)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

jobs=$(nproc)
logs=build/logs
mkdir -p "$logs"
if command -v ccache >/dev/null; then
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
  # Clones in different folders share results.
  export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
fi
if ! command -v nvcc >/dev/null && [ -x /usr/local/cuda/bin/nvcc ]; then
  export PATH="/usr/local/cuda/bin:$PATH"
fi
preset=cpu
command -v nvcc >/dev/null && preset=cuda
python=$PWD/.venv/bin/python

build() { # build PRESET [target ...]
  local name=$1
  shift
  cmake --preset "$name" -DPENSTOCK_PYTHON="$python" || return 1
  if [ $# -gt 0 ]; then
    cmake --build --preset "$name" -j "$jobs" --target "$@"
  else
    cmake --build --preset "$name" -j "$jobs"
  fi
}

step_lint() { tools/lint.sh; }
# Every CPU test, and with nvcc every kernel compiled for sm_90a.
step_build() { build "$preset"; }
step_ctest() { ctest --preset "$preset" -j "$jobs" --timeout 600; }
step_kernels() { # registers, spills and shared memory of every kernel against the table in the repository
  if [ "$preset" = cpu ]; then
    echo "skipped: no nvcc on this machine, so no kernels were compiled"
    return 77
  fi
  python3 tools/check_kernel_resources.py build/cuda
}
step_protocol() { tools/check_protocol.sh; }
step_fuzz() { tools/fuzz.sh "${PENSTOCK_FUZZ_SECONDS:-60}"; }
# CPU-only build under ASan and UBSan.
step_asan() {
  build asan && ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 \
    ctest --preset asan -j "$jobs" --timeout 900
}
# ThreadSanitizer where threads meet: the pool, the fabric, the operators and the tensor-parallel ranks.
step_tsan() {
  build tsan thread_tests && TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 \
    ctest --preset tsan -j "$jobs" --timeout 900 -L threads
}
step_consume() { tools/check_install.sh; }

all=(lint build ctest kernels protocol fuzz asan tsan consume)
[ $# -gt 0 ] && all=("$@")
passed=0 failed=0 skipped=0 table=""
for step in "${all[@]}"; do
  if ! declare -F "step_$step" >/dev/null; then
    echo "test: no step '$step' (steps: lint build ctest kernels protocol fuzz asan tsan consume)" >&2
    exit 2
  fi
  printf '== %s\n' "$step"
  start=$(date +%s)
  "step_$step" >"$logs/$step.log" 2>&1
  status=$?
  took=$(($(date +%s) - start))
  case $status in
  0) passed=$((passed + 1)) word=passed ;;
  77) skipped=$((skipped + 1)) word=skipped && tail -n 3 "$logs/$step.log" ;;
  *)
    failed=$((failed + 1)) word=FAILED
    tail -n 80 "$logs/$step.log"
    ;;
  esac
  grep -E '^[0-9]+% tests passed' "$logs/$step.log" | tail -n 1
  table+=$(printf '%-10s %-8s %5d s   %s' "$step" "$word" "$took" "$logs/$step.log")$'\n'
done
printf '\n%s' "$table"
printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
[ "$failed" -eq 0 ]
