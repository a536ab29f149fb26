#!/usr/bin/env bash
# On a machine with a GPU: every test that uses it, beside them the demo, then what is timed, alone. The summary goes to
# OUT_DIR/tests.json, as in docs/results/h200-tests.json; what has not run after SECONDS is missing there.
# usage: tests/gpu/run.sh OUT_DIR [WORKERS] [SECONDS]   (exit status 0: all passed)
set -uo pipefail
cd "$(dirname "$0")/../.."
out="$1" workers="${2:-8}" limit="${3:-3600}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
timeout "$limit" python3 -m sparse_pcg demo --device cuda --json "$out/demo.json" >"$out/demo.log" 2>&1 &
demo=$!
# In the background a shell lets its children ignore INT, with which pytest ends and still writes what it has.
timeout -s INT -k 30 "$limit" env --default-signal=INT python3 -m pytest tests/gpu tests/custom_ops \
    tests/sparse_pcg/test_models.py -m 'not heavy and not alone' -k 'not bench' -n "$workers" --dist worksteal \
    -q -p no:cacheprovider --show-capture=no \
    --deselect tests/custom_ops/test_compile_targets.py --durations=20 --junitxml "$out/tests.xml" \
    >"$out/tests.log" 2>&1
tests=$?
tail -60 "$out/tests.log" | cut -c1-200
wait $demo
demo=$?
tail -15 "$out/demo.log"
timeout "$limit" python3 -m pytest tests/gpu -m alone -q -p no:cacheprovider --show-capture=no \
    --junitxml "$out/alone.xml" >"$out/alone.log" 2>&1
alone=$?
tail -20 "$out/alone.log" | cut -c1-200
python3 -m tests.gpu.summary "$out" $((tests || alone)) "$demo"
exit $((tests || alone || demo))
