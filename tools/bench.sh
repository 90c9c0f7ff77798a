#!/usr/bin/env bash
# Builds and runs the CPU benchmarks; results go to build/bench-results/ as JSON lines beside the printed tables.
set -euo pipefail
cd "$(dirname "$0")/.." || exit 1

cmake --preset bench >/dev/null
cmake --build --preset bench -j "$(nproc)"
mkdir -p build/bench-results
build/bench/bench/penstock_engine_bench models/tiny-glm --json build/bench-results/engine.jsonl
python=.venv/bin/python
"$python" tools/compare_transformers.py --model models/tiny-glm --penstock build/bench/src/cli/penstock
