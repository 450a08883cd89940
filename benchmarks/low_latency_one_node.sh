#!/usr/bin/env bash
# Low-latency mode: 8 ranks of one node, decoding sizes, beside what moves a row for every selection.
set -euo pipefail
cd "$(dirname "$0")/.."
name="${1:-low_latency_one_node}"
exec "${PYTHON:-.venv/bin/python}" -m deep_ep_py bench --mode low-latency --ranks 8 --tokens 1,8,32,128 \
    --baseline memcpy,gloo_bare,normal,barrier \
    --json "benchmarks/results/$name.json" --plot "benchmarks/results/$name.png"
