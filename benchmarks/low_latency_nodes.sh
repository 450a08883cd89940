#!/bin/sh
# Low-latency mode across nodes, with software NICs between them. Arguments: NODES [NAME].
set -e
cd "$(dirname "$0")/.."
nodes=${1:?number of nodes}
name=${2:-low_latency_${nodes}_nodes}
exec "${PYTHON:-python3}" -m deep_ep_py bench --mode low-latency --device cpu --ranks 8 --nodes "$nodes" --tokens 1,8,128 --hidden 7168 \
    --topk 8 --experts 256 --dtype bf16 --routing uniform --baseline memcpy,gloo_bare,normal,barrier --iterations 7 \
    --json "benchmarks/results/$name.json"
