"""The time limit of a Buffer that a framework makes comes from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import deep_ep_py as deep_ep
from cases import Case
from deep_ep_py.testing import run_ranks, sleep
from harness import build, dispatch_arguments

WORK = build(Case("late", 2, 3, hidden=64, topk=1, experts=2))
MAKERS: dict[str, Callable[[Any], Any]] = {
    "V1": lambda group: deep_ep.Buffer(group, 1 << 20),
    "V2": lambda group: deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=64, num_topk=1),
}


@pytest.mark.parametrize("which", MAKERS)
@pytest.mark.parametrize("limit", [None, "400"])
def test_a_rank_that_compiles_for_long(monkeypatch: pytest.MonkeyPatch, which: str, limit: str | None) -> None:
    if limit is not None:
        monkeypatch.setenv("DEEP_EP_TIMEOUT", limit)

    def on_each_rank(group: Any) -> str:
        buffer, rank = MAKERS[which](group), group.rank()
        if rank == 1:
            sleep(150)
        try:
            if which == "V1":
                buffer.dispatch(**dispatch_arguments(WORK, rank))
            else:
                buffer.dispatch(WORK.x[rank], topk_idx=WORK.topk_idx[rank], num_experts=2)
        except deep_ep.DeepEPError as error:
            return str(error)
        return "right"

    said = run_ranks(2, on_each_rank)
    if limit is not None:
        assert list(said) == ["right", "right"]
    else:
        assert "gave up in dispatch after 100 s" in said[0] and "DEEP_EP_TIMEOUT" in said[0]


@pytest.mark.parametrize("which", MAKERS)
@pytest.mark.parametrize("limit", ["never", "0", "-1", "nan"])
def test_a_limit_that_is_none(monkeypatch: pytest.MonkeyPatch, which: str, limit: str) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT", limit)

    def on_each_rank(group: Any) -> None:
        with pytest.raises(ValueError, match=f"DEEP_EP_TIMEOUT='{limit}': expected more than 0"):
            MAKERS[which](group)

    run_ranks(2, on_each_rank)
