#!/usr/bin/env python3
"""Compares registers, spills and shared memory of every kernel in built objects with a table.

    tools/check_kernel_resources.py --table tests/ops/kernel_resources.txt OBJECT_OR_ARCHIVE ...
    tools/check_kernel_resources.py --table ... --write OBJECT_OR_ARCHIVE ...

One line of the table is one kernel: name, registers, stack bytes (spills live there), static shared bytes. A kernel
that is not in the table, one that is gone, and a figure that grew fail; a figure that shrank asks for the table to be
written anew. Without a GPU: the figures are those that ptxas left in the object, read by cuobjdump.
"""
import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

FIELDS = ("registers", "stack", "shared")
USAGE = re.compile(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)")


def find_tool(name: str) -> str:
    for candidate in (shutil.which(name), f"/usr/local/cuda/bin/{name}"):
        if candidate and Path(candidate).exists():
            return candidate
    sys.exit(f"{name} not found: it comes with the CUDA toolkit's binary utilities; put it on PATH")


def demangle(names: list[str]) -> list[str]:
    filt = shutil.which("cu++filt") or shutil.which("c++filt")
    if filt is None:
        sys.exit("c++filt not found: install binutils")
    out = subprocess.run([filt], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [tidy(line) for line in out.splitlines()]


def tidy(name: str) -> str:
    """Drops parameters and the hash that nvcc puts into the names of anonymous namespaces."""
    name = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N__[0-9a-zA-Z_]+::|_NV_ANON_NAMESPACE::", "", name)
    name = re.sub(r"^void ", "", name)
    depth = 0
    for i, c in enumerate(name):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            name = name[:i]
            break
    name = re.sub(r"\(([\w:]+)\)(\d+)", r"\2", name)  # (Enum)1 -> 1
    return name.replace(" ", "")


def read_objects(paths: list[str]) -> dict[str, tuple[int, ...]]:
    tool = find_tool("cuobjdump")
    mangled: list[str] = []
    figures: list[tuple[int, ...]] = []
    for path in paths:
        run = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=False)
        if run.returncode != 0:
            sys.exit(f"cuobjdump -res-usage {path} failed: {run.stderr.strip()}")
        current = None
        for line in run.stdout.splitlines():
            if match := re.match(r"\s*Function\s+(\S+?):", line):
                current = match.group(1)
            elif (match := USAGE.search(line)) and current is not None:
                mangled.append(current)
                figures.append(tuple(int(x) for x in match.groups()))
                current = None
    if not mangled:
        sys.exit(f"no kernels in {', '.join(paths)}: give objects or archives built from .cu files")
    kernels: dict[str, tuple[int, ...]] = {}
    for name, figure in zip(demangle(mangled), figures):
        kernels[name] = tuple(map(max, figure, kernels.get(name, figure)))
    return kernels


def read_table(path: Path) -> dict[str, tuple[int, ...]]:
    table = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        words = line.split()
        if len(words) != 1 + len(FIELDS):
            sys.exit(f"{path}:{number}: expected a name and {len(FIELDS)} numbers, found '{line}'")
        table[words[0]] = tuple(int(w) for w in words[1:])
    return table


def write_table(path: Path, kernels: dict[str, tuple[int, ...]]) -> None:
    lines = ["# Kernel, registers a thread at launch, stack bytes a thread, static shared bytes a block.",
             "# Written by tools/check_kernel_resources.py --write; a figure that grows fails CI."]
    width = max(map(len, kernels))
    lines += [f"{name:{width}} {r:4} {s:4} {m:6}" for name, (r, s, m) in sorted(kernels.items())]
    path.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--write", action="store_true", help="write the table instead of comparing")
    parser.add_argument("objects", nargs="+")
    arguments = parser.parse_args()
    kernels = read_objects(arguments.objects)
    if arguments.write:
        write_table(arguments.table, kernels)
        print(f"{arguments.table}: {len(kernels)} kernels")
        return 0
    table = read_table(arguments.table)
    faults = []
    for name in sorted(table.keys() | kernels.keys()):
        if name not in table:
            faults.append(f"{name}: not in the table ({dict(zip(FIELDS, kernels[name]))})")
        elif name not in kernels:
            faults.append(f"{name}: in the table but in none of the objects")
        else:
            for field, want, got in zip(FIELDS, table[name], kernels[name]):
                if got > want:
                    faults.append(f"{name}: {field} grew from {want} to {got}")
                elif got < want:
                    faults.append(f"{name}: {field} shrank from {want} to {got}: write the table anew")
    for fault in faults:
        print(fault)
    print(f"{len(kernels)} kernels, {len(faults)} differ from {arguments.table}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
