#!/usr/bin/env bash
# compute-sanitizer over every own kernel: memcheck on odd shapes, racecheck on small ones. Needs a GPU and the CUDA
# toolkit. usage: tests/gpu/sanitize.sh OUT_DIR [SECONDS] [OP ...]   (limit of each; exit status 0: both clean)
set -uo pipefail
cd "$(dirname "$0")/../.."
out="$1" limit="${2:-600}"
shift $(($# < 2 ? $# : 2))
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTORCH_NO_CUDA_MEMORY_CACHING=1
timeout "$limit" python3 -m tests.gpu.sanitize_ops "$@" >"$out/sanitize_plain.log" 2>&1 ||
    { tail -5 "$out/sanitize_plain.log"; exit 1; }
check() { # name, rows and ops, options...
    local name="$1" what="$2"; shift 2
    timeout "$limit" compute-sanitizer "$@" --error-exitcode 9 python3 -m tests.gpu.sanitize_ops $what \
        >"$out/sanitize_$name.log" 2>&1
    local code=$?
    echo "$name: exit $code; $(grep -hE 'SUMMARY|^[0-9]+ runs' "$out/sanitize_$name.log" | tr '\n' ' ')"
    return $code
}
check memcheck "3 37 $*" --tool memcheck & first=$!
check racecheck "3 $*" --tool racecheck --racecheck-report all & second=$!
wait $first; a=$?
wait $second; b=$?
exit $((a || b))
