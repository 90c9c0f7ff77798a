#!/usr/bin/env bash
# Runs small GPU tests under compute-sanitizer: memcheck, racecheck, synccheck. Exit code 77: no GPU or no such tool here.
# Usage: tools/gpu_sanitize.sh [FOLDER [BINARY...]]: FOLDER holds the GPU test binaries (tools/gpu_test.sh builds them),
# default build/cuda/gpu_tests; BINARY: only these.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

folder=${1:-build/cuda/gpu_tests}
[ $# -gt 0 ] && shift
tool=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if ! nvidia-smi -L >/dev/null 2>&1 || [ ! -x "$tool" ]; then
  echo "gpu-sanitize: not run: no NVIDIA GPU or no compute-sanitizer on this machine"
  exit 77
fi

# Tests of one or two ranks whose kernels are launched a few dozen times: a launch takes tens of times longer here.
declare -A filters=(
  [decode_layer_gpu_tests]='*OneLaunchOfEveryKernel*:*AMissingPeer*'
  [fabric_gpu_test]='*CopyEngineDelivers*2RanksOne*:*MissingRank*2RanksOne*:*PacketWaits*2RanksOne*'
)
# Deadlines of the tests, and their bounds, stretch by this factor.
export PENSTOCK_GPU_TEST_SLOWDOWN=${PENSTOCK_GPU_TEST_SLOWDOWN:-20}
[ $# -eq 0 ] && set -- "${!filters[@]}"
failed=0
for binary in "$@"; do
  for check in memcheck racecheck synccheck; do
    log=$(mktemp)
    begin=$SECONDS
    timeout -k 10 "${PENSTOCK_SANITIZE_SECONDS:-60}" "$tool" --tool "$check" --error-exitcode 9 --print-limit 5 \
      "$folder/$binary" --gtest_brief=1 --gtest_filter="${filters[$binary]:-*}" >"$log" 2>&1
    code=$?
    echo "== $binary $check: exit code $code, $((SECONDS - begin)) s; $(grep -E 'SUMMARY' "$log" | tail -n 1)"
    if [ "$code" -ne 0 ]; then
      failed=$((failed + 1))
      tail -n 40 "$log"
    fi
    rm -f "$log"
  done
done
echo "gpu-sanitize: $failed runs failed"
[ "$failed" -eq 0 ]
