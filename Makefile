# Front door. Every target sets up what it needs first; see README.md.
JOBS ?= $(shell nproc)
PRESET ?= $(shell command -v nvcc >/dev/null 2>&1 && echo cuda || echo cpu)
MODEL ?= models/tiny-glm

.PHONY: demo test bench lint gpu-test build clean help

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

demo: ## Set up, build and generate text from the bundled checkpoint on the CPU
	@tools/setup.sh build
	@cmake --preset cpu -DPENSTOCK_BUILD_TESTS=OFF -DPENSTOCK_BUILD_BENCH=OFF -B build/demo >/dev/null
	@cmake --build build/demo --target penstock_cli -j $(JOBS)
	build/demo/src/cli/penstock generate $(MODEL) --prompt "Ge1:1 In the beginning" --max-tokens 160

test: ## Everything that CI checks (no GPU needed)
	@tools/setup.sh all
	@tools/test.sh

build: ## Build library, command and tests with the preset that fits this machine
	@tools/setup.sh all
	@cmake --preset $(PRESET) >/dev/null
	@cmake --build --preset $(PRESET) -j $(JOBS)

bench: ## Build and run the CPU benchmarks
	@tools/setup.sh all
	@tools/bench.sh

lint: ## Formatting, clang-tidy, spelling, shell, include rungs, links
	@tools/setup.sh all
	@tools/lint.sh

gpu-test: ## Build the GPU test binaries; run them where there is a GPU
	@tools/setup.sh all
	@tools/gpu_test.sh || [ $$? -eq 77 ]

clean: ## Remove build output
	rm -rf build install
