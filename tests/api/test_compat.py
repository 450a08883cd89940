"""The names that callers of DeepEP import, and the behavior of its helpers. Nothing here depends on the build."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import deep_ep_py
from deep_ep_py.compat import cpp
from deep_ep_py.compat.buffer import Buffer
from deep_ep_py.compat.utils import testing
from deep_ep_py.compat.utils.math import (
    calc_diff,
    create_grouped_scores,
    hash_tensor,
    inplace_unique,
    per_token_cast_back,
    per_token_cast_to_fp8,
)
from deep_ep_py.testing import run_ranks
from forks import run_python
from names import deep_ep_names

pytestmark = pytest.mark.once


@pytest.fixture
def names() -> Iterator[None]:
    """Take the names while the test runs."""
    with deep_ep_names():
        yield


# --- names ----------------------------------------------------------------------------------------------------------


def test_what_is_imported(names: None) -> None:
    import deep_ep  # type: ignore[import-not-found]
    import deep_ep_cpp  # type: ignore[import-not-found]
    from deep_ep.utils import EventHandle, EventOverlap  # type: ignore[import-not-found]
    from deep_ep.utils.event import EventOverlap as same  # type: ignore[import-not-found]

    assert issubclass(deep_ep.Buffer, deep_ep_py.Buffer) and deep_ep.Buffer is deep_ep.buffer.Buffer
    assert deep_ep.Config is deep_ep_cpp.Config is deep_ep_py.Config
    assert EventOverlap is same is deep_ep.EventOverlap and EventHandle is deep_ep_cpp.EventHandle
    assert deep_ep.topk_idx_t is deep_ep_cpp.topk_idx_t is torch.int64
    assert deep_ep.__version__ == f"1.2.1+deep_ep_py.{deep_ep_py.__version__}"
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 288)
    assert deep_ep_cpp.get_low_latency_rdma_size_hint(128, 7168, 8, 288) == hint
    assert deep_ep_cpp.is_sm90_compiled() == deep_ep.Buffer.is_sm90_compiled()
    for module, name in (
        ("utils.envs", "init_dist"),
        ("utils.math", "hash_tensor"),
        ("utils.testing", "bench_kineto"),
        ("utils", "inplace_unique"),
    ):
        assert callable(getattr(importlib.import_module(f"deep_ep.{module}"), name))


@pytest.mark.parametrize("package", ["deep_ep", "deep_ep_py"])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("HybridEPBuffer", "DeepEP's hybrid-ep branch is not available; use `get_dispatch_layout`, `dispatch`"),
        ("hybrid_ep_buffer", "DeepEP's hybrid-ep branch is not available"),
        ("EPBuffer", "the interface of DeepEP 2.5 is not available; use `ElasticBuffer`"),
        ("PPBuffer", "the interface of DeepEP 2.5 is not available, and neither is what it offers: pipeline-parallel"),
        ("comm", "the interface of DeepEP 2.5 is not available; Buffers allocate"),
    ],
)
def test_what_is_absent_says_why(names: None, name: str, why: str, package: str) -> None:
    module = importlib.import_module(package)
    assert not hasattr(module, name) and getattr(module, name, None) is None
    with pytest.raises(AttributeError, match=f"{package}.*{name}.*{why}"):
        getattr(module, name)
    for _ in range(2):  # a failed import must leave nothing behind
        for statement in (f"from {package} import {name}", f"import {package}.{name}"):
            with pytest.raises(ImportError, match=f"{name}.*{package}.*{why}"):
                exec(statement)
    assert not hasattr(module, name)


def test_names_that_deep_ep_never_had(names: None) -> None:
    for package in ("deep_ep", "deep_ep_py"):
        with pytest.raises(AttributeError, match=f"{package}.* has no attribute 'Bufer'$"):
            importlib.import_module(package).Bufer  # noqa: B018
        with pytest.raises(ImportError, match="cannot import name 'Bufer'"):
            exec(f"from {package} import Bufer")
    with pytest.raises(ImportError, match="indices_to_map|hybrid-ep branch"):
        exec("from deep_ep.hybrid_ep_buffer import indices_to_map")


def test_another_deep_ep_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "deep_ep.py").write_text("")
    program = (
        "import deep_ep, deep_ep_py.compat\ntry: deep_ep_py.compat.take_names()\nexcept ImportError as e: print(e)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    result = run_python(["-c", program], environment)
    assert result.stdout == f"deep_ep has been imported already, from {tmp_path / 'deep_ep.py'}\n", result.stderr


# --- Buffer ---------------------------------------------------------------------------------------------------------


def test_arguments_of_v1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_DEVICE", "cpu")

    def on_each_rank(group: object) -> None:
        buffer = Buffer(
            group=group,
            num_nvl_bytes=1 << 20,
            num_rdma_bytes=1 << 20,
            low_latency_mode=False,
            num_qps_per_rank=10,
            allow_nvlink_for_low_latency_mode=True,
            allow_mnnvl=True,
            use_fabric=True,
            explicitly_destroy=True,
            enable_shrink=False,
            comm=None,
        )
        assert buffer.device == torch.device("cpu") and buffer.num_rdma_bytes == 1 << 20
        buffer.destroy()
        with pytest.raises(TypeError, match="use_fabric=2"):
            Buffer(group, 1 << 20, use_fabric=2)
        with pytest.raises(ValueError, match="enable_shrink=True: expected low_latency_mode=True"):
            Buffer(group, 1 << 20, enable_shrink=True)
        by_place = Buffer(group, 1 << 20, 1 << 20, 1, 10, 1, 1, 1, 1, 0, None)
        assert by_place.low_latency_mode is by_place.explicitly_destroy is True and by_place.enable_shrink is False
        assert isinstance(by_place.runtime, cpp.Buffer) and by_place.runtime.get_num_rdma_ranks() == 1
        with pytest.raises(TypeError, match="fabrik"):
            Buffer(group, 1 << 20, fabrik="peer")

    run_ranks(1, on_each_rank)


@pytest.mark.parametrize(
    ("said", "variable", "gpu", "device"),
    [
        (None, None, False, "cpu"),
        (None, None, True, "cuda"),
        (None, "cpu", True, "cpu"),
        ("cpu", "cuda", True, "cpu"),
        ("cuda:3", "cpu", False, "cuda:3"),
    ],
)
def test_default_device(
    monkeypatch: pytest.MonkeyPatch, said: str | None, variable: str | None, gpu: bool, device: str
) -> None:
    monkeypatch.delenv("DEEP_EP_DEVICE", raising=False)
    if variable:
        monkeypatch.setenv("DEEP_EP_DEVICE", variable)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    made = {}
    monkeypatch.setattr(deep_ep_py.Buffer, "__init__", lambda self, *arguments, **options: made.update(options))
    Buffer(None, device=said)
    assert made == {"device": device}


# --- utils ----------------------------------------------------------------------------------------------------------


def test_calc_diff() -> None:
    x = torch.randn(5, 7).bfloat16()
    assert calc_diff(x, x) == pytest.approx(0, abs=1e-15)
    assert calc_diff(torch.zeros(4), torch.zeros(4)) == 0
    # After adding 1: (1, 2) and (1, 4), so 1 - 2 * (1 + 8) / (5 + 17).
    assert calc_diff(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 3.0])) == pytest.approx(1 - 18 / 22, rel=1e-12)


@pytest.mark.parametrize("columns", [128, 384, 200, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_casts(columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = (torch.randn(9, columns) * torch.logspace(-6, 3, 9)[:, None]).to(dtype)
    x[3] = 0
    cast, scales = per_token_cast_to_fp8(x)
    assert cast.dtype == torch.float8_e4m3fn and cast.shape == x.shape and cast.is_contiguous()
    assert scales.dtype == torch.float32 and scales.shape == (9, -(-columns // 128))
    for group in range(scales.shape[1]):
        part = x[:, group * 128 : (group + 1) * 128].float()
        torch.testing.assert_close(scales[:, group], part.abs().amax(1).clamp(min=1e-4) / 448, rtol=1e-6, atol=0)
        back = cast[:, group * 128 : (group + 1) * 128].float() * scales[:, group, None]
        # Half an ulp of a 3-bit mantissa, or half the smallest subnormal.
        error = (part.abs() / 16).maximum(scales[:, group, None] * 2.0**-10)
        assert ((back - part).abs() <= error * 1.0001).all()
    back = per_token_cast_back(cast, scales)
    assert back.dtype == torch.bfloat16 and back.shape == x.shape
    assert torch.equal(back, per_token_cast_back(cast, scales.t().contiguous().t())), "scales of other strides"
    assert torch.equal(back, per_token_cast_back(cast, scales.reshape(1, -1))), "scales of another shape"
    assert calc_diff(back, x) < 1e-3


def test_casts_of_nothing() -> None:
    cast, scales = per_token_cast_to_fp8(torch.zeros(0, 256, dtype=torch.bfloat16))
    assert cast.shape == (0, 256) and scales.shape == (0, 2)
    assert per_token_cast_back(cast, scales).shape == (0, 256)
    with pytest.raises(ValueError, match=r"shape \[256\]"):
        per_token_cast_to_fp8(torch.zeros(256))


def test_cast_back_of_exponents() -> None:
    """Four exponents in an int32, as for DeepGEMM on Blackwell."""
    cast = torch.ones(2, 512).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[127, 128, 126, 130], [120, 127, 127, 127]], dtype=torch.uint8)
    back = per_token_cast_back(cast, exponents.view(torch.int32))
    expected = torch.exp2(exponents.float() - 127).repeat_interleave(128, dim=1).bfloat16()
    assert torch.equal(back, expected)


def test_inplace_unique() -> None:
    x = torch.tensor([[3, 1, 3, -1], [0, 0, 0, 0], [-1, -1, -1, -1], [7, 0, 5, 1]])
    inplace_unique(x, 8)
    assert x.tolist() == [[3, 1, -1, -1], [0, -1, -1, -1], [-1, -1, -1, -1], [7, 5, 1, 0]]
    x = torch.tensor([[1, 0, 1, 0, -1]])
    inplace_unique(x, 2)
    assert x.tolist() == [[1, 0, -1, -1, -1]]


def test_grouped_scores() -> None:
    scores = torch.arange(1.0, 13).view(2, 6)
    grouped = create_grouped_scores(scores, torch.tensor([[0, 2], [1, 1]]), 3)
    assert grouped.tolist() == [[1, 2, 0, 0, 5, 6], [0, 0, 9, 10, 0, 0]]


def test_hash_tensor() -> None:
    assert hash_tensor(torch.tensor([1, -2, 5], dtype=torch.int32)) == 4
    x = torch.randn(4, 8).bfloat16()
    assert hash_tensor(x) == hash_tensor(x.clone()) != hash_tensor(-x)


def test_bench_on_the_cpu() -> None:
    calls: list[str] = []

    def work() -> None:
        calls.append("work")
        time.sleep(0.2 if len(calls) <= 4 else 0.002)  # the warm-ups and the first timed call are slow

    mean, shortest, longest = testing.bench(
        work, num_warmups=3, num_tests=4, post_fn=lambda: calls.append("after") or time.sleep(0.2)
    )
    assert calls == ["work"] * 3 + ["work", "after"] * 4
    assert 0.002 <= shortest <= mean <= longest < 0.2
    with pytest.raises(ValueError, match="num_tests=1"):
        testing.bench(work, num_tests=1)


def test_kernel_seconds() -> None:
    kernels = [
        ("void deep_ep::dispatch<4>(Args)", 30.0, 3.0),
        ("void deep_ep::dispatch<4>(Args)", 10.0, 1.0),
        ("void deep_ep::combine<4>(Args)", 20.0, 8.0),
        ("void deep_ep::dispatch<4>(Args)", 40.0, 4.0),
        ("void deep_ep::dispatch<4>(Args)", 15.0, 2.0),
        ("Memset (Device)", 0.0, 9.0),
    ]
    assert testing.kernel_seconds(kernels, "combine", 1) == 8
    assert testing.kernel_seconds(kernels, "dispatch", 1) == 2.5
    assert testing.kernel_seconds(kernels, "dispatch", 2) == [2, 3]
    with pytest.raises(RuntimeError, match="num_kernels_per_period=3.* 4 launches"):
        testing.kernel_seconds(kernels, "dispatch", 3)
    with pytest.raises(RuntimeError, match="'deep_ep'.*combine.*dispatch"):
        testing.kernel_seconds(kernels, "deep_ep", 1)
    with pytest.raises(RuntimeError, match="'notify'.*Memset"):
        testing.kernel_seconds(kernels, "notify", 1)


def test_bench_kineto_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="expected a GPU"):
        testing.bench_kineto(lambda: None, "dispatch")


def test_silence(capfd: pytest.CaptureFixture[str]) -> None:
    print("before", flush=True)
    with testing._silence():
        os.write(1, b"inside")
        os.write(2, b"inside")
    print("after", flush=True)
    assert capfd.readouterr() == ("before\nafter\n", "")


INIT_DIST = """
import sys, threading, time, torch, torch.distributed as dist
from deep_ep_py.compat import take_names
from deep_ep_py.compat.utils import init_dist
local_rank = int(sys.argv[1])
rank, ranks, group = init_dist(local_rank, 2, seed=5)
drawn = torch.rand(1, dtype=torch.float32)
assert (rank, ranks) == (local_rank, 2) and group is not dist.group.WORLD
values = [None] * 2
dist.all_gather_object(values, (rank, drawn.item(), torch.get_default_dtype()), group=group)
assert [value[0] for value in values] == [0, 1] and values[0][1] != values[1][1]
assert {value[2] for value in values} == {torch.bfloat16}
torch.manual_seed(5 + rank)
assert torch.rand(1, dtype=torch.float32) == drawn

take_names()
import deep_ep

buffer = deep_ep.Buffer(group, 1 << 20, explicitly_destroy=True)
x, topk_idx = torch.randn(6, 64), torch.randint(0, 8, (6, 3))
per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 8)

def micro_batch(factor):
    recv_x, _, _, _, handle, _ = buffer.dispatch(
        x * factor, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        topk_idx=topk_idx, topk_weights=torch.ones(6, 3, dtype=torch.float32),
    )
    turn[factor].wait()
    outputs[factor] = buffer.combine(recv_x, handle)[0]

# Two micro-batches, each in its own thread, take turns like those of vLLM: dispatch, dispatch, combine, combine.
turn, outputs, threads = {1: threading.Event(), 2: threading.Event()}, {}, {}
for factor in turn:
    threads[factor] = threading.Thread(target=micro_batch, args=(factor,))
    threads[factor].start()
    while threads[factor].is_alive() and buffer.stats()["dispatches"] < factor:
        time.sleep(0.001)
for factor in turn:
    turn[factor].set()
    threads[factor].join()
    assert torch.equal(outputs[factor], x * factor * in_rank.sum(1, keepdim=True))

# A larger Buffer on another group of the same processes combines the rows that the smaller one has dispatched.
recv_x, _, _, _, handle, _ = buffer.dispatch(
    x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
    topk_idx=topk_idx, topk_weights=torch.ones(6, 3, dtype=torch.float32),
)
larger = deep_ep.Buffer(dist.new_group([0, 1]), 2 << 20, explicitly_destroy=True)
buffer.destroy()
for given in (handle, tuple(handle)):
    assert torch.equal(larger.combine(recv_x, given)[0], x * in_rank.sum(1, keepdim=True))
alone = [dist.new_group([one]) for one in range(2)][rank]
try:
    deep_ep.Buffer(alone, 1 << 20).combine(recv_x, handle)
except ValueError as error:
    assert "with the same ranks" in str(error), error
else:
    raise AssertionError("a handle of two ranks on a Buffer of one")
larger.destroy()
dist.destroy_process_group()
print("joined")
"""


def test_init_dist() -> None:
    """Also tests a Buffer on that group, with bfloat16 as torch's default dtype and calls from several threads."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda rank: run_python(["-c", INIT_DIST, str(rank)], environment), range(2)))
    assert [one.stdout for one in done] == ["joined\n"] * 2, done
