#!/usr/bin/env python3
"""Checks the include rule: a file includes only from its own rung and those before it, device code includes no host library.

Exit code 1 with one line a breach, file:line."""

import pathlib
import re
import sys

RUNGS = ["core", "numerics", "fabric", "ops", "model", "cli"]
HOST_ONLY = re.compile(r'#\s*include\s*[<"](fmt/|spdlog/|nlohmann/|hwy/|CLI/|iostream|fstream|sstream)')
PUBLIC_FORBIDDEN = re.compile(r'#\s*include\s*[<"](cuda|fmt/|spdlog/|nlohmann/|hwy/|CLI/)')
INCLUDE = re.compile(r'#\s*include\s*["<](?:penstock/)?([a-z0-9_]+)/')


def rung_of(path: pathlib.Path) -> str | None:
    parts = path.parts
    if parts[:2] == ("include", "penstock"):
        return parts[2]
    if parts[0] == "src":
        return parts[1]
    return None


def main() -> int:
    root = pathlib.Path(__file__).resolve().parent.parent
    breaches = []
    for folder in ("include", "src"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in {".h", ".cuh", ".cpp", ".cu"}:
                continue
            relative = path.relative_to(root)
            rung = rung_of(relative)
            if rung not in RUNGS:
                breaches.append(f"{relative}: folder '{rung}' is no rung ({', '.join(RUNGS)})")
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                match = INCLUDE.match(line.strip())
                if match and match.group(1) in RUNGS and RUNGS.index(match.group(1)) > RUNGS.index(rung):
                    breaches.append(f"{relative}:{number}: rung '{rung}' includes the later rung '{match.group(1)}'")
                if path.suffix in {".cu", ".cuh"} and HOST_ONLY.match(line.strip()):
                    breaches.append(f"{relative}:{number}: device code includes a host library: {line.strip()}")
                if folder == "include" and path.suffix == ".h" and PUBLIC_FORBIDDEN.match(line.strip()):
                    breaches.append(f"{relative}:{number}: a public header includes {line.strip()}")
    for breach in breaches:
        print(breach)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
