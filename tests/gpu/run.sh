#!/usr/bin/env bash
# On a machine with a GPU: every test that uses it, all in one go, and the demo. The summary goes to OUT_DIR/tests.json,
# as in docs/results/h200-tests.json. usage: tests/gpu/run.sh OUT_DIR [WORKERS]   (exit status 0: all passed)
set -uo pipefail
cd "$(dirname "$0")/../.."
out="$1" workers="${2:-8}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python3 -m pytest tests/gpu tests/custom_ops tests/sparse_pcg/test_models.py -m 'not heavy' -k 'not bench' -n "$workers" \
    -q -p no:cacheprovider --show-capture=no --deselect tests/custom_ops/test_compile_targets.py \
    --junitxml "$out/tests.xml" >"$out/tests.log" 2>&1
tests=$?
tail -25 "$out/tests.log" | cut -c1-200
python3 -m sparse_pcg demo --device cuda --json "$out/demo.json" >"$out/demo.log" 2>&1
demo=$?
tail -15 "$out/demo.log"
python3 -m tests.gpu.summary "$out" "$demo"
exit $((tests || demo))
