#!/usr/bin/env python3
"""Compares registers, spills and shared memory of every kernel of the library with a table.

    tools/check_kernel_resources.py BUILD_FOLDER           compare, exit 1 on any difference
    tools/check_kernel_resources.py BUILD_FOLDER --write   write the table

A regression in a kernel's resources shows without a GPU: the figures are ptxas's own report. Each .cu file of
penstock_cuda is compiled once more to a cubin with the flags in BUILD_FOLDER/compile_commands.json, so neither
cuobjdump nor the build's log is needed.
"""
import argparse
import concurrent.futures
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "ops" / "kernel_resources.txt"
FIELDS = ("registers", "spill_bytes", "stack_bytes", "shared_bytes")
Figures = tuple[int, ...]


def demangle(names: list[str]) -> list[str]:
    filt = shutil.which("cu++filt") or shutil.which("c++filt")
    if filt is None:
        sys.exit("c++filt not found: install binutils")
    run = subprocess.run([filt], input="\n".join(names), capture_output=True, text=True, check=True)
    return [tidy(line) for line in run.stdout.splitlines()]


def tidy(name: str) -> str:
    """Drops parameters, and the hash that nvcc puts into the names of anonymous namespaces."""
    name = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N__[0-9a-zA-Z_]+::", "", name)
    name = re.sub(r"^void ", "", name)
    depth = 0
    for i, c in enumerate(name):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            name = name[:i]
            break
    return re.sub(r"\([\w: ]+\)(\d+)", r"\1", name).replace(" ", "")


def report_command(entry: dict, cubin: str) -> list[str]:
    """The build's command for a file, turned into one that only makes ptxas report."""
    words = shlex.split(entry["command"]) if "command" in entry else list(entry["arguments"])
    if Path(words[0]).name == "ccache":
        words = words[1:]
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in ("-o", "-MF", "-MT"):
            skip = True
        elif word not in ("-c", "-MD", "-x", "cu"):
            kept.append(word)
    return [*kept, "-Xptxas", "-v", "-cubin", "-o", cubin]


def kernels_of(entry: dict) -> list[tuple[str, Figures]]:
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(report_command(entry, os.path.join(folder, "kernels.cubin")), cwd=entry["directory"],
                             capture_output=True, text=True, check=False)
    if run.returncode != 0:
        sys.exit(f"{entry['file']} does not compile to a cubin:\n{run.stderr}")
    found = []
    name, stack, spill = "", 0, 0
    for line in run.stderr.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)'", line):
            name, stack, spill = match.group(1), 0, 0
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spill = int(match.group(1)), int(match.group(2)) + int(match.group(3))
        elif (match := re.search(r"Used (\d+) registers", line)) and name:
            shared = re.search(r"(\d+) bytes smem", line)
            found.append((name, (int(match.group(1)), spill, stack, int(shared.group(1)) if shared else 0)))
            name = ""
    return found


def read_kernels(build: Path) -> dict[str, Figures]:
    commands = build / "compile_commands.json"
    if not commands.exists():
        sys.exit(f"{commands} is missing: configure {build} with CMake first")
    entries = [e for e in json.loads(commands.read_text())
               if e["file"].endswith(".cu") and "penstock_cuda.dir" in e.get("output", e.get("command", ""))]
    if not entries:
        sys.exit(f"{build} builds no .cu file of penstock_cuda: configure it with -DPENSTOCK_CUDA=ON")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [kernel for kernels in pool.map(kernels_of, entries) for kernel in kernels]
    return dict(zip(demangle([name for name, _ in found]), [figures for _, figures in found]))


def read_table() -> dict[str, Figures]:
    table = {}
    for number, line in enumerate(TABLE.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        words = line.split()
        if len(words) != 1 + len(FIELDS):
            sys.exit(f"{TABLE}:{number}: expected a name and {len(FIELDS)} numbers, found '{line}'")
        table[words[0]] = tuple(int(w) for w in words[1:])
    return table


def write_table(kernels: dict[str, Figures]) -> None:
    width = max(map(len, kernels))
    lines = ["# Kernel: registers a thread at launch, bytes spilled a thread (stores + loads in the code), stack bytes a",
             "# thread, static shared bytes a block. Written by tools/check_kernel_resources.py --write."]
    lines += [f"{name:{width}} {r:4} {sp:5} {st:5} {sh:7}" for name, (r, sp, st, sh) in sorted(kernels.items())]
    TABLE.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    kernels = read_kernels(arguments.build)
    if arguments.write:
        write_table(kernels)
        print(f"{TABLE}: {len(kernels)} kernels")
        return 0
    table = read_table()
    faults = []
    for name in sorted(table.keys() | kernels.keys()):
        if name not in table:
            faults.append(f"{name}: not in the table; it has {dict(zip(FIELDS, kernels[name]))}")
        elif name not in kernels:
            faults.append(f"{name}: in the table but not in the library")
        else:
            for field, want, got in zip(FIELDS, table[name], kernels[name]):
                if got != want:
                    verb = "grew" if got > want else "shrank"
                    faults.append(f"{name}: {field} {verb} from {want} to {got}")
    for fault in faults:
        print(fault)
    if faults:
        print(f"If that is meant: tools/check_kernel_resources.py {arguments.build} --write")
    print(f"{len(kernels)} kernels, {len(faults)} differences from {TABLE.relative_to(ROOT)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
