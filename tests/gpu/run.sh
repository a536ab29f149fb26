#!/usr/bin/env bash
# On a machine with a GPU: the tests that use it, the demo, the operators' benches. usage: tests/gpu/run.sh OUT_DIR
set -uo pipefail
cd "$(dirname "$0")/../.."
out="$1"
run() { # name, command...
    local name="$1"; shift
    "$@" >"$out/$name.log" 2>&1
    echo "== $name: exit $?" | tee -a "$out/$name.log"
    tail -25 "$out/$name.log" | cut -c1-200
}
run tests python3 -m pytest tests/gpu tests/custom_ops tests/sparse_pcg/test_models.py -n 8 -m 'not heavy' -p no:cacheprovider \
    --deselect tests/custom_ops/test_compile_targets.py -k 'not bench'
run demo python3 -m sparse_pcg demo --device cuda --json "$out/demo.json"
run bench python3 -m pytest tests/custom_ops -m gpu -k bench -s -p no:cacheprovider
