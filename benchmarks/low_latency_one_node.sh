#!/bin/sh
# Low-latency mode inside one node with decoding sizes, against baselines that move a row for every selection.
set -e
cd "$(dirname "$0")/.."
name=${1:-low_latency_one_node}
exec "${PYTHON:-python3}" -m deep_ep_py bench --mode low-latency --device cpu --ranks 8 --tokens 1,8,32,128,512 --hidden 7168 \
    --topk 8 --experts 256 --dtype bf16 --routing uniform --baseline memcpy,gloo_bare,normal,barrier \
    --json "benchmarks/results/$name.json" --plot "benchmarks/results/$name.png"
