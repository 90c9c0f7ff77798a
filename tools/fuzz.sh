#!/usr/bin/env bash
# Builds the libFuzzer target (clang, ASan, UBSan) and runs it. Usage: tools/fuzz.sh [SECONDS]  (default: 60)
# PENSTOCK_FUZZ_DIR (default: build/fuzz) keeps build, corpus and findings; the corpus grows from run to run.
set -euo pipefail
cd "$(dirname "$0")/.." || exit 1

seconds=${1:-60}
if ! [[ $seconds =~ ^[1-9][0-9]*$ ]]; then
  echo "fuzz: '$seconds' is not a number of seconds" >&2
  exit 2
fi
if ! command -v clang++ >/dev/null; then
  echo "fuzz: clang++ is missing; tools/setup.sh installs it" >&2
  exit 1
fi
dir=${PENSTOCK_FUZZ_DIR:-build/fuzz}
mkdir -p "$dir/corpus" "$dir/findings"

# The fuzz target is the only one built, so that nothing else has to compile with clang.
cmake -S . -B "$dir/cmake" -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=Debug -DPENSTOCK_CUDA=OFF \
  -DPENSTOCK_BUILD_FUZZERS=ON -DPENSTOCK_BUILD_TESTS=ON -DPENSTOCK_BUILD_BENCH=OFF -DPENSTOCK_BUILD_CLI=OFF >/dev/null
cmake --build "$dir/cmake" --target fuzz_safetensors
python3 tools/fuzz_corpus.py "$dir/corpus" "$dir/words.dict"

# Every check can be reached in a few kilobytes; small inputs keep the rate high.
if ! "$dir/cmake/tests/model/fuzz_safetensors" "$dir/corpus" -dict="$dir/words.dict" -max_total_time="$seconds" \
  -max_len=8192 -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -verbosity=1 \
  -artifact_prefix="$dir/findings/" 2>"$dir/log"; then
  tail -n 60 "$dir/log" >&2
  echo "fuzz: a finding; its input is in $dir/findings" >&2
  exit 1
fi
grep -E '^stat::(number_of_executed_units|average_exec_per_sec|peak_rss_mb)' "$dir/log"
echo "fuzz: nothing found in $seconds s"
