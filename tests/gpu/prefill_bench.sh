#!/usr/bin/env bash
# On a machine with a GPU of 140 GB: one rank of GLM-5.2 (random weights), time to first token in every way of running
# it, as in docs/results/h200-ttft.json and h200-serve.json; with "long" only prompts of 2048 new tokens and more, alone
# and with one and four lanes (h200-ttft-long.json, h200-serve-long.json); with "16" a rank of 16 experts
# (h200-ttft-16.json), with "v32" 16 layers of DeepSeek-V3.2 (h200-ttft-v32.json). On a machine with two: "tp2", the
# whole model shared by both, with 4 routed experts on each (h200x2-ttft-tp2.json), "tp2-all" 14 layers of it with all
# 256 experts.
# usage: tests/gpu/prefill_bench.sh OUT_DIR [4|long|16|v32|tp2|tp2-all]
# PREFILL_BENCH_LIMIT: seconds after which it ends (420)
set -uo pipefail
cd "$(dirname "$0")/../.."
out="$1" which="${2:-4}" limit="${PREFILL_BENCH_LIMIT:-420}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-6}"
run=(python3 -m tests.gpu.prefill_bench)
case "$which" in tp2*) run=(python3 -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.gpu.prefill_bench) ;; esac
bench() { "${run[@]}" "$@"; }
warm() { for half in $2; do bench "warm-$half" "$out" --layers "$1" "${model[@]}" >"$out/$which-warm-$half.log" 2>&1; done; }
long=0+2048,32768+4096,131072+4096,0+8192
case "$which" in
4) model=() rest=(--lanes 1 4 8 16) ;;
long) model=(--rows 32768+4096,131072+4096,0+2048,0+8192) rest=(--lanes 1 4 --served "$long" --name long) ;;
16) model=(--experts 16 --rows 0+512,0+1024,32768+1024) rest=(--name 16) ;;
v32) model=(--model deepseek_v32 --rows 0+512,32768+1024) rest=(--layers 16 --name v32) ;;
tp2) model=() rest=(--name tp2 --seconds $((limit - 25))) ;;
tp2-all) model=(--experts 128 --rows 0+512,0+1024,32768+1024) rest=(--layers 14 --name tp2-all) ;;
*) echo "which: must be 4, long, 16, v32, tp2 or tp2-all, got $which" >&2; exit 2 ;;
esac
depth=14 # holds every distinct piece of GLM-5.2
[ "$which" = v32 ] && depth=6
case "$which" in tp2*) depth=0 ;; esac # processes of two ranks beside those of two others would slow these down
if [ "$depth" = 0 ]; then
    helpers=
elif [ "$which" = 16 ]; then # two such models beside the big one would not fit
    warm $depth "sparse engine" &
    helpers="$!"
else
    warm $depth sparse &
    helpers="$!"
    warm $depth engine &
    helpers="$helpers $!"
fi
timeout -k 3 "$limit" "${run[@]}" rows "$out" "${model[@]}" "${rest[@]}" >"$out/$which.log" 2>&1
status=$?
for helper in $helpers; do pkill -P "$helper"; kill "$helper"; done 2>/dev/null
tail -15 "$out/$which.log"
exit $status
