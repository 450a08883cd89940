"""How ranks choose paths: from an ordered list, each pair takes the first that works in both directions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import deep_ep_py as deep_ep
from deep_ep_py.base.native import C
from deep_ep_py.device.cpu import CpuDevice
from deep_ep_py.device.cuda import CudaDevice
from deep_ep_py.testing import run_ranks
from deep_ep_py.transport.bootstrap.groups import make_bootstrap
from deep_ep_py.transport.topology.agreement import agree
from deep_ep_py.transport.topology.fabrics import Choice
from deep_ep_py.transport.topology.paths import IbgdaPath, Places, ProxyPath
from deep_ep_py.transport.topology.routes import Reach, Routes
from deep_ep_py.transport.topology.topology import Topology

pytestmark = pytest.mark.once

DEVICE = CpuDevice()
TWO_MACHINES = (0, 0, 1, 1)


def of(rank: int, fabric: Any, machines: tuple[int, ...] = (0, 0, 0, 0), ranks_per_node: Any = None) -> Topology:
    return Topology.of(rank, len(machines), DEVICE, fabric, ranks_per_node, None, machines=machines)


def agreed(make: Callable[[int], Topology], ranks: int = 4) -> list[Any]:
    """Return what the agreement has returned or raised on each rank."""
    found: list[Any] = [None] * ranks

    def on_each_rank(group: Any) -> None:
        try:
            found[group.rank()] = agree(make_bootstrap(group), lambda: make(group.rank()))
        except Exception as error:
            found[group.rank()] = error

    run_ranks(ranks, on_each_rank)
    return found


@pytest.mark.parametrize(
    ("fabric", "ranks_per_node", "routes"),
    [
        (["peer"], None, "peer peer peer peer"),
        (["peer", "ibgda"], None, "peer peer peer peer"),
        (["peer", "ibgda"], 2, "peer peer ibgda ibgda"),
        (["peer", "proxy", "ibgda"], 2, "peer peer proxy proxy"),
        (["ibgda"], None, "peer ibgda ibgda ibgda"),
        (("proxy", "ibgda"), None, "peer proxy proxy proxy"),
        (["weak"], 1, "peer weak weak weak"),
        ("mixed", None, "peer weak peer weak"),
        ("ibgda", None, "peer ibgda ibgda ibgda"),
        ("ibgda", 4, "peer peer peer peer"),
        ("weak", None, "peer weak weak weak"),
        ("weak", 2, "peer peer weak weak"),
    ],
)
def test_the_first_that_reaches_is_taken(fabric: Any, ranks_per_node: int | None, routes: str) -> None:
    for topology in agreed(lambda rank: of(rank, fabric, ranks_per_node=ranks_per_node)):
        if topology.rank == 0:
            assert topology.routes == tuple(routes.split())
        assert topology.networks == tuple(sorted({*routes.split()} - {"peer"}))


def test_a_list_without_peer_makes_each_rank_a_node() -> None:
    topology = of(1, ["ibgda"])
    assert (topology.nodes, topology.mapped) == (4, (False, True, False, False))


@pytest.mark.parametrize(("text", "given"), [("ibgda", "ibgda"), ("peer, proxy", ["peer", "proxy"])])
def test_the_environment_has_the_same(text: str, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there = of(0, given)
    monkeypatch.setenv("DEEP_EP_FABRIC", text)
    assert of(0, None).routes == there.routes
    assert of(0, "weak").routes == ("peer", "weak", "weak", "weak"), "an argument takes precedence over it"


@pytest.mark.parametrize(
    ("fabric", "ranks_per_node", "said"),
    [
        ("copper", None, "fabric='copper': expected one of peer, ibgda, proxy on cpu"),
        ("peer,proxy", None, "fabric='peer,proxy': expected one of peer, ibgda, proxy on cpu; several go in a list"),
        (["peer", "copper"], None, r"fabric=\['peer', 'copper'\]: expected some of peer, ibgda"),
        ([], None, r"fabric=\[\]: expected at least one name"),
        (7, None, "fabric=7: expected the name of a fabric, or a list of names"),
        (["ibgda", "peer"], None, "expected 'peer' first or not at all"),
        (["ibgda", "ibgda"], None, "expected each name once"),
        (["peer", "mixed"], None, "expected 'mixed' by itself"),
        (["ibgda"], 2, r"ranks_per_node=2: expected 'peer' first in fabric=\['ibgda'\] with it"),
        (["peer", "ibgda"], 3, "ranks_per_node=3: expected a divisor of the 4 ranks"),
    ],
)
def test_bad_arguments(fabric: Any, ranks_per_node: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        of(0, fabric, ranks_per_node=ranks_per_node)


def test_ranks_without_a_path_are_shown() -> None:
    for fabric, machines in (("peer", TWO_MACHINES), ("ibgda", TWO_MACHINES), (["peer", "weak"], TWO_MACHINES)):
        for error in agreed(lambda rank, fabric=fabric, machines=machines: of(rank, fabric, machines)):
            assert isinstance(error, ValueError)
            first, *table = str(error).splitlines()
            assert first.startswith(f"fabric={fabric!r}: expected a path between every two of the 4 ranks; rank 0 does")
            assert "rank 0 does not reach rank 2 (peer: it is on another machine" in first
            assert first.endswith("'proxy' works between machines")
            assert table[:3] == ["     0123", "  0  .P--", "  1  P.--"]
            assert "  -: none" in table


def test_nodes_of_one_machine_without_a_network() -> None:
    error = agreed(lambda rank: of(rank, ["peer"], ranks_per_node=2))[3]
    assert "rank 0 does not reach rank 2 (peer: it is on another node, of 2 ranks here)" in str(error)
    assert "between machines" not in str(error)


def test_a_path_is_taken_only_where_it_leads_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 reaches all ranks by software NICs but none reaches it, so the others use the next path to it."""

    def refusal(self: IbgdaPath, peer: int) -> str:
        return "" if peer != 1 else "rank 1 hides"

    monkeypatch.setattr(IbgdaPath, "refusal", refusal)
    monkeypatch.setattr(IbgdaPath, "mutual", False)
    found = agreed(lambda rank: of(rank, ["ibgda", "proxy"]))
    assert found[0].routes == ("peer", "proxy", "ibgda", "ibgda")
    assert found[1].routes == ("proxy", "peer", "proxy", "proxy")
    assert {one.networks for one in found} == {("ibgda", "proxy")}
    for error in agreed(lambda rank: of(rank, ["ibgda"])):
        assert "rank 0 does not reach rank 1 (ibgda: rank 1 hides)" in str(error)


def test_paths_that_lead_one_way_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, even in ((IbgdaPath, True), (ProxyPath, False)):
        monkeypatch.setattr(path, "mutual", False)
        refusal = _from_even if even else _from_odd
        monkeypatch.setattr(path, "refusal", lambda self, _, refusal=refusal: refusal(self.places.rank))
    error = agreed(lambda rank: of(rank, ["ibgda", "proxy"]))[0]
    assert "rank 0 reaches rank 1 only by ibgda (proxy: it is even); rank 1 reaches rank 0 only by proxy" in str(error)


def test_a_reason_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons may differ per rank, as with named queue pairs: more than there are letters or room in the exchange."""
    monkeypatch.setattr(IbgdaPath, "mutual", False)
    monkeypatch.setattr(IbgdaPath, "refusal", lambda self, peer: f"queue pair to PE {peer} is not an RC, " * 20)
    ranks = 1024
    reach = of(0, ["ibgda"], (0,) * ranks).reach
    assert len(json.dumps(reach.tell())) < 1 << 16
    assert reach.refusals(ranks - 1) == "ibgda: a reason besides the first 20"
    for error in agreed(lambda rank: of(rank, ["ibgda"], (0,) * 40), 40):
        assert isinstance(error, ValueError) and "ibgda: queue pair to PE 1 is not an RC" in str(error)


def _from_even(rank: int) -> str:
    return "it is odd" if rank % 2 else ""


def _from_odd(rank: int) -> str:
    return "" if rank % 2 else "it is even"


def test_what_one_rank_has_been_told_wrongly_fails_on_all() -> None:
    found = agreed(lambda rank: of(rank, "copper" if rank == 2 else None))
    assert [str(error).startswith("fabric='copper': expected") for error in found] == [False, False, True, False]
    assert str(found[0]).startswith("rank 2: fabric='copper': expected one of")
    assert {type(error) for error in found} == {ValueError}
    found = agreed(lambda rank: of(rank, "copper" if rank % 2 else []))
    assert [str(error).partition(":")[0] for error in found] == ["fabric=[]", "fabric='copper'"] * 2


@pytest.mark.parametrize(
    ("error", "said"), [(RuntimeError("no driver"), "no driver"), (MemoryError(), "MemoryError()")]
)
def test_what_one_rank_fails_of_otherwise_is_told_too(error: Exception, said: str) -> None:
    """For example an error of the driver that a path has queried, which is not a wrong argument. Some have no text."""

    def make(rank: int) -> Topology:
        if rank == 2:
            raise error
        return of(rank, None)

    found = agreed(make)
    assert [type(one) for one in found] == [deep_ep.DeepEPError] * 2 + [type(error)] + [deep_ep.DeepEPError]
    assert str(found[3]) == f"rank 2: {said}"


def test_ranks_that_were_given_different_lists() -> None:
    found = agreed(lambda rank: of(rank, ["peer", "proxy"] if rank == 3 else ["peer", "ibgda"], ranks_per_node=2))
    said = (
        "fabric=['peer', 'ibgda'] on rank 0: expected the same on all ranks, it is "
        "fabric=['peer', 'ibgda'] on ranks 0-2; fabric=['peer', 'proxy'] on rank 3"
    )
    assert str(found[0]) == said


def test_fabrics_are_told_as_they_were_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(rank: int) -> Topology:
        if rank == 3:
            monkeypatch.setenv("DEEP_EP_FABRIC", "peer,proxy,")
        topology = of(rank, None)
        monkeypatch.delenv("DEEP_EP_FABRIC", raising=False)
        return topology

    said = (
        "fabric=None on rank 0: expected the same on all ranks, it is "
        "fabric=None on ranks 0-2; DEEP_EP_FABRIC=['peer', 'proxy'] on rank 3"
    )
    assert str(agreed(make)[0]) == said


def test_the_proxy_says_why_not() -> None:
    near = Places(0, (0, 0), 1, in_process=False, provider="pigeons")
    far = Places(0, (0, 1), 1, in_process=False, provider="shm", address="127.0.0.1")
    refusals = ProxyPath(near).refusal(1), ProxyPath(far).refusal(1)
    if not C.proxy_providers():
        assert [refusal.partition(",")[0] for refusal in refusals] == ["this build has no libfabric"] * 2
        return
    assert "DEEP_EP_PROXY_PROVIDER='pigeons': expected one of efa" in refusals[0]
    assert refusals[1].startswith("libfabric "), refusals[1]


def test_a_rank_without_libfabric_is_not_one_with_another_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_PROXY_PROVIDER", "tcp")
    monkeypatch.setattr(ProxyPath, "refusal", lambda self, _: "no libfabric" if self.places.rank == 1 else "")
    for error in agreed(lambda rank: of(rank, ["peer", "proxy"], TWO_MACHINES)):
        assert "rank 1 does not reach rank 2 (peer: it is on another machine" in str(error), error
        assert "proxy: no libfabric)" in str(error)


class _Gpu:
    fabrics, default_fabrics = CudaDevice.fabrics, CudaDevice.default_fabrics
    asynchronous, torch_device = True, "cuda:0"


def test_a_gpu_is_not_given_software_nics_unless_they_are_named() -> None:
    gpu: Any = _Gpu()
    with pytest.raises(ValueError, match="ranks_per_node=1: expected fabric='proxy' with it on a GPU"):
        Choice.of(gpu, (0, 0), None, 1)
    assert Choice.of(gpu, (0, 0), "ibgda", 1).fabrics == ("peer", "ibgda")
    assert Choice.of(gpu, (0, 1), None, None).fabrics == ("peer", "proxy")


def test_a_buffer_takes_a_list() -> None:
    def on_each_rank(group: Any) -> None:
        buffer = deep_ep.Buffer(group, 1 << 20, fabric=["peer", "ibgda"], ranks_per_node=1)
        assert len(buffer.network_counters()) == 2

    run_ranks(2, on_each_rank)


def test_many_ranks_agree_at_once() -> None:
    """A rank sends at most some thousand characters, and queries each path once per rank."""
    ranks = 1024
    machines = tuple(rank // 8 for rank in range(ranks))
    reaches = [of(rank, None, machines).reach for rank in range(ranks)]
    assert max(sum(map(len, reach.rows)) for reach in reaches) < 4 * ranks
    routes = Routes.agreed(reaches, 9, "", machines)
    assert routes.networks == ("proxy",) and routes.own[8:16] == ("peer",) * 8
    assert Reach.told(reaches[9].tell()) == reaches[9]
