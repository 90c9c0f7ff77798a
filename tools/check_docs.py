#!/usr/bin/env python3
"""Checks that Markdown files name only files that exist: links and `paths/in/backticks` under the repository's folders.

Exit code 1 with one line a breach."""

import pathlib
import re
import subprocess
import sys

FOLDERS = ("include/", "src/", "tests/", "docs/", "tools/", "spec/", "bench/", "models/", "cmake/", "python/")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"`([^`\s]+)`")


def main() -> int:
    root = pathlib.Path(__file__).resolve().parent.parent
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=root, capture_output=True, text=True, check=True)
    breaches = []
    for name in listed.stdout.split():
        path = root / name
        if not path.exists():
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for target in LINK.findall(line):
                if re.match(r"[a-z]+:", target):
                    continue
                if not (path.parent / target).exists():
                    breaches.append(f"{name}:{number}: link to a missing file: {target}")
            for target in CODE.findall(line):
                plain = target.rstrip("/.,:")
                if plain.startswith(FOLDERS) and not any(c in plain for c in "*<>{}$"):
                    if not (root / plain).exists():
                        breaches.append(f"{name}:{number}: names a missing file: {target}")
    for breach in breaches:
        print(breach)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
