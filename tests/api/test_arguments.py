"""A bad argument raises a ValueError or TypeError that names the argument, its value and what was expected, and changes
nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from cases import Case
from deep_ep_py.base import arguments
from deep_ep_py.base.native import C
from deep_ep_py.ops.row_types import rows_to_send
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer

CASE = Case("arguments", ranks=2, tokens=6, hidden=64, topk=2, experts=8)
TRIAL = Trial.of(CASE)
BF16, FP8, I32, I64 = torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.int64

Bad = tuple[str, Any, str, str]  # argument, value, the value in the message, the expectation in the message


def shifted(rows: torch.Tensor) -> torch.Tensor:
    """Return the same rows, misaligned by one element."""
    return torch.cat([torch.zeros(1, dtype=rows.dtype), rows.flatten()])[1:].view_as(rows)


class Wrapped(torch.Tensor):
    """Like a DTensor, a FakeTensor, or the result of a functional collective: its values are somewhere else."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} is not a check")

    def __repr__(self, **_: Any) -> str:
        return f"Wrapped({tuple(self.shape)})"


def without_memory(argument: str, values: torch.Tensor) -> list[Bad]:
    """Return values of an argument that do not lie where it says."""
    bad: list[Bad] = [(argument, Wrapped(values), "Wrapped", "with its own")]
    if values.is_floating_point():
        bad.append((argument, torch._neg_view(values), "negates", "resolve_neg"))
        bad.append((argument, values.to_sparse(), "sparse", "contiguous"))
    return bad


def elsewhere(argument: str, values: torch.Tensor | tuple[torch.Tensor, ...]) -> Bad:
    """Return a tensor that is not on the Buffer's device."""
    return argument, values, "on meta", "on cpu, the device= that the Buffer was made with: move it there$"


LAYOUT: list[Bad] = [
    elsewhere("topk_idx", torch.zeros(6, 2, dtype=I64, device="meta")),
    *without_memory("topk_idx", torch.zeros(6, 2, dtype=I64)),
    ("topk_idx", torch.zeros(6, 2, dtype=torch.int16), "int16", "int64 or int32"),
    ("topk_idx", torch.zeros(6, dtype=I64), r"\[6\]", "any, any"),
    ("topk_idx", torch.zeros(6, 33, dtype=I64), "33", "32"),
    ("topk_idx", [[0, 1]], r"\[\[0, 1\]\]", "int64"),
    ("topk_idx", torch.full((6, 2), 8), "8", "-1 to 7"),
    ("topk_idx", torch.full((6, 2), -2), "-2", "-1 to 7"),
    ("num_experts", 7, "7", "multiple of the 2"),
    ("num_experts", 0, "0", "1 to 2048"),
    ("num_experts", 4096, "4096", "2048"),
    ("num_experts", "8", "'8'", "int"),
]

DISPATCH: list[Bad] = [
    elsewhere("x", torch.zeros(6, 64, dtype=BF16, device="meta")),
    elsewhere("x", (torch.zeros(6, 64, dtype=FP8), torch.zeros(6, 1, device="meta"))),
    elsewhere("topk_weights", torch.zeros(6, 2, device="meta")),
    *without_memory("x", torch.zeros(6, 64, dtype=BF16)),
    ("x", (torch.zeros(6, 64, dtype=FP8), Wrapped(torch.zeros(6, 1))), "Wrapped", "with its own"),
    ("x", (torch.zeros(6, 64, dtype=FP8), torch._neg_view(torch.zeros(6, 1))), "negates", "resolve_neg"),
    *without_memory("topk_idx", torch.zeros(6, 2, dtype=I64)),
    *without_memory("topk_weights", torch.zeros(6, 2)),
    *without_memory("is_token_in_rank", torch.zeros(6, 2, dtype=torch.bool)),
    *without_memory("num_tokens_per_rank", torch.zeros(2, dtype=I32)),
    *without_memory("num_tokens_per_expert", torch.zeros(8, dtype=I32)),
    ("x", shifted(torch.zeros(6, 64, dtype=BF16)), "0x", "16 bytes"),
    ("x", torch.zeros(6, 64), "float32", "bfloat16"),
    ("x", torch.zeros(6, 60, dtype=BF16), "120", "16"),
    ("x", torch.zeros(64, dtype=BF16), r"\[64\]", "any, any"),
    ("x", torch.zeros(6, 0, dtype=BF16), r"\[6, 0\]", "16"),
    ("x", None, "None", "bfloat16"),
    ("x", torch.zeros(6, 64, dtype=torch.bool), "bool", "bfloat16 or float16 or int16 or .* or uint8"),
    ("x", (torch.zeros(6, 64, dtype=FP8),), "tuple of 1", "FP8 rows and scales"),
    ("x", (torch.zeros(6, 64, dtype=BF16), torch.zeros(6, 1)), "bfloat16", "float8_e4m3fn"),
    ("x", (torch.zeros(6, 64, dtype=FP8), None), "None", "float32 or int32"),
    ("x", (torch.zeros(6, 64, dtype=FP8), torch.zeros(6, 1, dtype=BF16)), "bfloat16", "float32 or int32"),
    ("x", (torch.zeros(6, 64, dtype=FP8), torch.zeros(5, 1)), r"\[5, 1\]", r"\[6, scales\]"),
    ("x", (torch.zeros(6, 64, dtype=FP8), torch.zeros(6, 0)), r"\[6, 0\]", "1 to 4096"),
    ("x", (torch.zeros(6, 40, dtype=FP8), torch.zeros(6, 1)), "40", "16 bytes"),
    ("topk_idx", torch.zeros(6, 2, dtype=torch.int16), "int16", "int64 or int32"),
    ("topk_idx", torch.zeros(5, 2, dtype=I64), "5", "6"),
    ("topk_weights", torch.zeros(6, 2, dtype=BF16), "bfloat16", "float32"),
    ("topk_weights", torch.zeros(6, 3), "3", "2"),
    ("topk_weights", None, "", "topk_idx"),
    ("is_token_in_rank", torch.zeros(6, 2, dtype=I32), "int32", "bool"),
    ("is_token_in_rank", torch.zeros(6, 3, dtype=torch.bool), "3", "2"),
    ("is_token_in_rank", None, "None", "bool"),
    ("num_tokens_per_rank", torch.zeros(2, dtype=I64), "int64", "int32"),
    ("num_tokens_per_rank", torch.zeros(3, dtype=I32), "3", "2"),
    ("num_tokens_per_rank", None, "None", "int32"),
    ("num_tokens_per_expert", torch.zeros(7, dtype=I32), "7", "2"),
    ("num_tokens_per_expert", torch.zeros(8), "float32", "int32"),
    ("num_tokens_per_expert", None, "None", "int32"),
    ("expert_alignment", 0, "0", "1|positive"),
    ("num_worst_tokens", -1, "-1", "0"),
    ("config", 20, "20", "Config"),
    ("previous_event", 1, "1", "EventOverlap or an EventHandle"),
    ("async_finish", 2, "2", "bool"),
    ("async_finish", 1.0, "1.0", "bool"),
    ("allocate_on_comm_stream", True, "True", "previous_event"),
    ("handle", (1, 2, 3), "tuple", "dispatch"),
]

COMBINE: list[Bad] = [
    elsewhere("x", torch.zeros(6, 64, dtype=BF16, device="meta")),
    elsewhere("bias", torch.zeros(6, 64, dtype=BF16, device="meta")),
    *without_memory("bias", torch.zeros(6, 64, dtype=BF16)),
    ("bias", shifted(torch.zeros(6, 64, dtype=BF16)), "0x", "16 bytes"),
    ("x", torch.zeros(3, 64, dtype=BF16), r"\[3, 64\]", "any"),
    ("x", TRIAL.expert.x[0].float(), "float32", "bfloat16"),
    ("x", None, "None", "bfloat16"),
    ("topk_weights", torch.zeros(1, 2), r"\[1, 2\]", "float32"),
    ("topk_weights", TRIAL.expert.topk_weights[0].double(), "float64", "float32"),
    ("bias", torch.zeros(6, 32, dtype=BF16), "32", "64"),
    ("bias", torch.zeros(6, 64), "float32", "bfloat16"),
    ("bias", (torch.zeros(6, 64, dtype=BF16),) * 3, "3", "2"),
    ("handle", None, "None", "dispatch"),
    ("config", 20, "20", "Config"),
]

BUFFER: list[Bad] = [
    ("group", None, "None", "group"),
    ("num_nvl_bytes", -128, "-128", "0 to"),
    ("num_nvl_bytes", "1 MiB", "1 MiB", "int"),
    ("num_nvl_bytes", 1000, "1000", "128"),
    ("num_rdma_bytes", 1000, "1000", "128"),
    ("arena_bytes", -4096, "-4096", "0 to"),
    ("low_latency_mode", 2, "2", "bool"),
    ("num_qps_per_rank", -1, "-1", "0 to"),
    ("num_qps_per_rank", None, "None", "int"),
    ("allow_nvlink_for_low_latency_mode", "yes", "'yes'", "bool"),
    ("allow_mnnvl", None, "None", "bool"),
    ("use_fabric", -1, "-1", "bool"),
    ("explicitly_destroy", 0.0, "0.0", "bool"),
    ("enable_shrink", True, "True", "low_latency_mode=True"),
    ("enable_shrink", 1, "True", "low_latency_mode=True"),
    ("enable_shrink", "no", "'no'", "bool"),
    ("regions", 0, "0", "1 to"),
    ("timeout", 0, "0", ""),
    ("timeout", -3.0, "-3", ""),
    ("fabric", "ether", "ether", "peer"),
    ("device", "abacus", "abacus", "cpu"),
]


def names(bad: list[Bad]) -> list[str]:
    return [f"{argument}-{number}" for number, (argument, *_) in enumerate(bad)]


def check_refused(call: Callable[[], Any], bad: Bad) -> None:
    argument, _, was, expected = bad
    with pytest.raises((ValueError, TypeError)) as info:
        call()
    message = str(info.value)
    assert argument in message, message
    for part in (was, expected):
        assert re.search(part, message), f"{part!r} is not in {message!r}"


def check_still_works(buffer: deep_ep.Buffer) -> None:
    results = buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))
    TRIAL.check_dispatch(buffer.rank, results)
    TRIAL.check_combine(buffer.rank, TRIAL.combine(buffer, buffer.rank, results[4]))


@pytest.mark.parametrize("bad", LAYOUT, ids=names(LAYOUT))
def test_layout(bad: Bad) -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "peer")
        good = {"topk_idx": TRIAL.work.topk_idx[buffer.rank], "num_experts": CASE.experts}
        check_refused(lambda: buffer.get_dispatch_layout(**{**good, bad[0]: bad[1]}), bad)
        check_still_works(buffer)

    run_ranks(2, on_each_rank, seed=1)


@pytest.mark.parametrize("bad", DISPATCH, ids=names(DISPATCH))
def test_dispatch(bad: Bad) -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "peer")
        arguments = dispatch_arguments(TRIAL.work, buffer.rank, **{bad[0]: bad[1]})
        if bad[0] == "handle":
            arguments = {"x": arguments["x"], "handle": bad[1]}
        check_refused(lambda: buffer.dispatch(**arguments), bad)
        check_still_works(buffer)

    run_ranks(2, on_each_rank, seed=1)


@pytest.mark.parametrize("bad", COMBINE, ids=names(COMBINE))
def test_combine(bad: Bad) -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "peer")
        handle = buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))[4]
        arguments = {"x": TRIAL.expert.x[buffer.rank], "handle": handle, bad[0]: bad[1]}
        check_refused(lambda: buffer.combine(**arguments), bad)
        check_still_works(buffer)

    run_ranks(2, on_each_rank, seed=1)


@pytest.mark.parametrize("bad", BUFFER, ids=names(BUFFER))
def test_buffer(bad: Bad) -> None:
    def on_each_rank(group: Any) -> None:
        arguments = {"group": group, "num_nvl_bytes": CASE.num_nvl_bytes, bad[0]: bad[1]}
        check_refused(lambda: deep_ep.Buffer(arguments.pop("group"), **arguments), bad)
        check_still_works(make_buffer(group, CASE, "peer"))

    run_ranks(2, on_each_rank, seed=1)


NVL_SEND, NVL_RECV, RDMA_SEND, RDMA_RECV = (
    f"num_max_{path}_chunked_{end}_tokens" for path in ("nvl", "rdma") for end in ("send", "recv")
)


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"num_sms": 0}, ValueError, "num_sms=0: expected 1 to 256"),
        ({"num_sms": -2}, ValueError, "num_sms=-2: expected 1 to 256"),
        ({"num_sms": 257}, ValueError, "num_sms=257: expected 1 to 256"),
        ({"num_sms": "2"}, TypeError, "num_sms='2': expected an int"),
        ({"num_sms": True}, TypeError, "num_sms=True: expected an int"),
        *(
            ({name: value}, kind, f"{name}={value!r}: expected {wanted}")
            for name in (NVL_SEND, NVL_RECV, RDMA_SEND, RDMA_RECV)
            for value, kind, wanted in ((0, ValueError, "1 to"), (-6, ValueError, "1 to"), (6.0, TypeError, "an int"))
        ),
        *(({name: 10**12}, ValueError, f"{name}=10{'0' * 11}: expected 1 to") for name in (NVL_RECV, RDMA_RECV)),
        ({NVL_SEND: 256, NVL_RECV: 256}, ValueError, f"{NVL_SEND}=256: expected less than {NVL_RECV}=256"),
        ({NVL_SEND: 300}, ValueError, f"{NVL_SEND}=300: expected less than {NVL_RECV}=256"),
        ({RDMA_SEND: 200, RDMA_RECV: 200}, ValueError, f"{RDMA_SEND}=200: expected at most half of {RDMA_RECV}=200"),
        ({RDMA_SEND: 300}, ValueError, f"{RDMA_SEND}=300: expected at most half of {RDMA_RECV}=256"),
    ],
)
def test_config(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}"):
        deep_ep.Config(**arguments)


@pytest.mark.once
def test_config_rounds_before_it_compares() -> None:
    """As in V1: a send covers at most half of a queue, which consists of whole chunks."""
    assert deep_ep.Config(num_max_rdma_chunked_send_tokens=129).num_max_rdma_chunked_recv_tokens == 258


@pytest.mark.once
@pytest.mark.parametrize("hint", ["get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 8), "hidden_bytes=-1: expected 1 to"),
        ((0, 8), "hidden_bytes=0: expected 1 to"),
        ((14336.0, 8), "hidden_bytes=14336.0: expected an int"),
        ((None, 8), "hidden_bytes=None: expected an int"),
        ((14336, 0), "num_ranks=0: expected 1 to"),
        ((14336, -8), "num_ranks=-8: expected 1 to"),
        ((14336, "8"), "num_ranks='8': expected an int"),
        ((14336, 10**9), "num_ranks=1000000000: expected 1 to"),
    ],
)
def test_size_hints(hint: str, arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        getattr(deep_ep.Config(), hint)(*arguments)


def test_one_rank_alone_may_be_wrong() -> None:
    """A bad argument is detected before anything is launched, so the peers are unaffected and the rank may try
    again."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "weak")
        if buffer.rank == 1:
            with pytest.raises((ValueError, TypeError), match="x"):
                buffer.dispatch(**dispatch_arguments(TRIAL.work, 1, x=torch.zeros(6, 64)))
        check_still_works(buffer)

    run_ranks(2, on_each_rank, seed=1)


@pytest.mark.parametrize(
    "bad", [("hidden", 12, "12", "multiple of 8"), ("hidden", "64", "'64'", "int"), ("topk", 33, "33", "1 to 32")]
)
def test_warmup(bad: Bad) -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "peer")
        check_refused(lambda: buffer.warmup(**{"hidden": 64, "topk": 2, bad[0]: bad[1]}), bad)
        buffer.warmup(64, 2)
        check_still_works(buffer)

    run_ranks(2, on_each_rank, seed=1)


def test_low_latency_rows_that_are_elsewhere() -> None:
    def on_each_rank(group: Any) -> None:
        with deep_ep.Buffer(group, 0, 1 << 20, low_latency_mode=True) as buffer:
            x, ids = torch.zeros(2, 128, dtype=BF16, device="meta"), torch.zeros(2, 1, dtype=I64)
            bad = elsewhere("x", x)
            check_refused(lambda: buffer.low_latency_dispatch(x, ids, 8, 2, use_fp8=False), bad)

    run_ranks(2, on_each_rank)


def test_rows_of_ops_that_are_elsewhere() -> None:
    def on_each_rank(group: Any) -> None:
        with deep_ep.Buffer(group, 1 << 20) as buffer:
            x, bytes_, scales = (torch.zeros(6, 64, dtype=dtype) for dtype in (BF16, FP8, torch.float32))
            for given, argument in (((x.to("meta"), None), "x"), ((bytes_, scales.to("meta")), "scales")):
                check_refused(partial(rows_to_send, *given, False, buffer), elsewhere(argument, x))
            check_refused(lambda: rows_to_send(bytes_.to("meta"), scales, False, buffer), elsewhere("x", x))

    run_ranks(1, on_each_rank)


def test_a_buffer_may_be_where_the_tensor_is() -> None:
    """That is advised for devices that a Buffer can be on."""
    with pytest.raises(TypeError) as info:
        arguments.tensor("x", torch.zeros(2), torch.float32, (2,), torch.device("cuda", 1))
    advice = "the device= that the Buffer was made with: move it there, or make the Buffer with device='cpu'"
    assert str(info.value) == f"x=float32[2] on cpu: expected float32[2], contiguous, on cuda:1, {advice}"


def test_what_is_right_is_not_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of an error is only built when there is an error: each call checks a dozen correct tensors."""

    def describe(value: Any) -> str:
        raise AssertionError(f"described {value}")

    monkeypatch.setattr(arguments, "describe", describe)
    right = torch.zeros(2, 3)
    assert arguments.tensor("right", right, torch.float32, (None, 3), right.device) is right


def test_limits_are_those_of_the_formats() -> None:
    assert (arguments.MAX_RANKS, arguments.MAX_TOKENS) == (C.MAX_RANKS, C.MAX_TOKENS)
