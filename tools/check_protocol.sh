#!/usr/bin/env bash
# Checks the protocol model spec/fabric.pml with spin: the clean model must hold, each seeded bug
# must be found. Needs spin and a C compiler. About two minutes on two cores.
set -euo pipefail

model="$(cd "$(dirname "$0")/.." && pwd)/spec/fabric.pml"
for program in spin cc; do
  command -v "$program" >/dev/null || { echo "check_protocol: $program is not installed" >&2; exit 2; }
done
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$work"

# check NAME clean|bug DEFINES...
check() {
  local name="$1" want="$2"
  shift 2
  rm -f pan* ./*.trail
  spin -a "$@" "$model"
  cc -O2 -w -DSAFETY -DCOLLAPSE -DMEMLIM=4096 -o pan pan.c
  local start errors states verdict
  start=$(date +%s)
  timeout 240 ./pan -m1000000 -w24 >out.txt || { echo "FAIL $name: the search did not end" >&2; tail -5 out.txt >&2; exit 1; }
  errors=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' out.txt)
  states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' out.txt)
  if grep -q 'max search depth too small\|Search not completed' out.txt && [ "$want" = clean ]; then
    echo "FAIL $name: not all states were visited" >&2; tail -20 out.txt >&2; exit 1
  fi
  if [ "$want" = clean ]; then verdict=$([ "$errors" = 0 ] && echo ok || echo FAIL); else
    verdict=$([ "$errors" != 0 ] && echo ok || echo FAIL); fi
  printf '%-4s %-38s errors %s, %s states, %s s' "$verdict" "$name" "$errors" "$states" "$(($(date +%s) - start))"
  [ "$want" = bug ] && printf ' (%s)' "$(sed -n 's/^pan:1: \(.*\)/\1/p' out.txt | head -1)"
  printf '\n'
  [ "$verdict" = ok ] || { tail -20 out.txt >&2; exit 1; }
}

check "clean, reuse and two calls in flight" clean -DNO_FAULT -DCHUNKS=2 -DCALLS=3
check "clean, one fault and a rearm" clean -DCHUNKS=1 -DCALLS=2
# Three ranks: without engines between them (transport direct), or the search does not end.
three=(-DDIRECT -DRANKS=3 -DCHUNKS=1)
check "clean, 3 ranks, one fault and a rearm" clean "${three[@]}" -DCALLS=1 -DCALLS_AFTER=1
check "bug: signal before data" bug -DBUG_SIGNAL_FIRST -DNO_FAULT -DCHUNKS=2 -DCALLS=3
check "bug: reuse without consumed" bug -DBUG_REUSE -DNO_FAULT -DCHUNKS=2 -DCALLS=3
check "bug: abort word missed" bug -DBUG_ABORT_MISSED -DCHUNKS=1 -DCALLS=2
check "bug: consumed kept at a rearm" bug -DBUG_CONSUMED_KEPT -DCHUNKS=1 -DCALLS=2
check "bug: signal before data, 3 ranks" bug "${three[@]}" -DBUG_SIGNAL_FIRST -DNO_FAULT -DCALLS=1
check "bug: reuse without consumed, 3 ranks" bug "${three[@]}" -DBUG_REUSE -DNO_FAULT -DCALLS=3
check "bug: abort word missed, 3 ranks" bug "${three[@]}" -DBUG_ABORT_MISSED -DCALLS=1 -DCALLS_AFTER=1
