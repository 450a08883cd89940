"""Runs under torchrun: the call sequences of vLLM and SGLang between processes, vLLM's micro-batches on two threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from low_latency import CASTS, Sizes
from names import deep_ep_names
from serving import take_turns, works_of
from serving_sglang import DECODE_LEAD, LOW_LATENCY, SglangDecode, SglangProcess, sglang_decode, sglang_prefill
from serving_vllm import VllmBuffers, vllm_run

LAYERS = 3


def main() -> None:
    os.environ["DEEP_EP_DEVICE"] = "cpu"
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = [tuple(7 + 3 * source for source in range(ranks)), tuple(12 - 5 * source for source in range(ranks))]
    sizes = [Sizes("processes", ranks, own, 12, 512, 6, 4 * ranks) for own in tokens]
    works = [works_of(own, LAYERS, seed, padding=seed - 1) for own, seed in zip(sizes, (1, 4))]
    used: list[set[int]] = [set(), set()]
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:

        def on_its_thread(batch: int, go_on: Callable[[], Any]) -> Any:
            def noted() -> Any:
                used[batch].add(threading.get_ident())
                return go_on()

            return (first, second)[batch].submit(noted).result()

        buffer = VllmBuffers(dist.group.WORLD).get(sizes[0])
        for cast in ("bf16", "fp8", "ue8m0"):
            vllm_run(buffer, works, CASTS[cast], step=on_its_thread)
        buffer.destroy()
    assert [len(own) for own in used] == [1, 1] and not used[0] & used[1], used

    process = SglangProcess(dist.group.WORLD, sizes[0], LOW_LATENCY)
    for cast, hooks in (("bf16", True), ("ue8m0", True), ("fp8", False)):
        stages = [SglangDecode(process, CASTS[cast], hooks) for _ in works]
        take_turns([sglang_decode(one, own) for one, own in zip(stages, works)], DECODE_LEAD)
        take_turns([sglang_prefill(one, own) for one, own in zip(stages, works)])
    process.buffer.destroy()
    print(f"rank {rank} is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    with deep_ep_names():
        main()
