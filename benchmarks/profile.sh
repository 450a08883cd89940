#!/bin/sh
# Instruction counts of the kernels in the compiler's PTX: hidden 7168, 8 ranks with 64 tokens, top-8 of 256 experts.
set -eu
cd "$(dirname "$0")"
name=${1:-$(date +%F)_profile}
run() {
    file=results/${name}_$1.json
    shift
    DEEP_EP_BUILD=exact "${PYTHON:-python3}" -m deep_ep_py profile --lines 20 --json "$file" "$@"
}
run normal
run normal_ibgda --fabric ibgda
run low_latency --mode low-latency
run normal_sm_80 --arch sm_80
