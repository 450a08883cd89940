#!/bin/sh
# The influence of the routing.
set -e
cd "$(dirname "$0")/.."
name=${1:-routing}
for routing in uniform deepseek skewed; do
    "${PYTHON:-python3}" -m deep_ep_py bench --ranks 8 --tokens 1024 --routing "$routing" --baseline memcpy,gloo_bare \
        --json "benchmarks/results/${name}_$routing.json" --plot "benchmarks/results/${name}_$routing.png"
done
