#!/usr/bin/env bash
# Formatting, spelling, shell scripts, include rungs, documentation links, clang-tidy. Usage: tools/lint.sh [--fix]
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

failed=0
say() { printf -- '-- %s\n' "$1"; }
fail() {
  failed=$((failed + 1))
  printf 'lint: %s\n' "$1"
}

mapfile -t sources < <(git ls-files -- '*.h' '*.cuh' '*.cpp' '*.cu')
if [ ${#sources[@]} -eq 0 ]; then
  echo "lint: git lists no sources here"
  exit 1
fi
say "clang-format (${#sources[@]} files)"
if [ "${1:-}" = --fix ]; then
  clang-format -i "${sources[@]}"
else
  clang-format --dry-run --Werror "${sources[@]}" || fail "formatting differs: run tools/lint.sh --fix"
fi
say codespell
git ls-files -z -- . ':!models' ':!tests/numerics/data' ':!docs/results' ':!LICENSE' |
  xargs -0 codespell --ignore-words tools/codespell-words.txt || fail "spelling"
say shellcheck
git ls-files -z -- '*.sh' .ci/run | xargs -0 shellcheck || fail "shellcheck"
say "include rungs"
python3 tools/check_rungs.py || fail "include rungs"
say "documentation links"
python3 tools/check_docs.py || fail "documentation links"
say clang-tidy
# A CPU-only tree of its own: clang-tidy needs a compile database without nvcc's flags.
cmake --preset cpu -B build/tidy -DPENSTOCK_BUILD_TESTS=OFF -DPENSTOCK_BUILD_BENCH=OFF >/dev/null || fail "configure for clang-tidy"
mapfile -t units < <(git ls-files -- 'src/*.cpp' | grep -vE '/cuda/|_cuda\.cpp$')
if ! printf '%s\0' "${units[@]}" | xargs -0 -P "$(nproc)" -n 3 clang-tidy -p build/tidy --quiet 2>build/tidy/stderr.log; then
  grep -vE 'warnings (generated|treated)|^Suppressed|^Use -header-filter' build/tidy/stderr.log | tail -n 40
  fail clang-tidy
fi
if [ "$failed" -gt 0 ]; then
  echo "lint: $failed checks failed"
  exit 1
fi
echo "lint: all checks passed"
