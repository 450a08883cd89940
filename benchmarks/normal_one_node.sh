#!/bin/sh
# Normal mode inside one node with small and large sizes, against all baselines.
set -e
cd "$(dirname "$0")/.."
name=${1:-normal_one_node}
exec "${PYTHON:-python3}" -m deep_ep_py bench --mode normal --device cpu --ranks 8 --tokens 128,4096 --hidden 7168 --topk 8 \
    --experts 256 --dtype bf16 --routing uniform --baseline memcpy --baseline gloo_bare --baseline gloo \
    --json "benchmarks/results/$name.json" --plot "benchmarks/results/$name.png"
