"""Each synchronization idiom checked against the PTX memory model, and the model against textbook programs."""

from __future__ import annotations

import re

import pytest

from litmus.idioms import LITMUS
from litmus.model import Executions
from litmus.program import CTA, GPU, SYS, Litmus, Outcome, Program, add, barrier, load, store, thread
from places import CSRC

pytestmark = pytest.mark.once

BY_NAME = {litmus.name: litmus for litmus in LITMUS}


def outcomes(program: Program, program_order_is_causal: bool = False) -> list[Outcome]:
    return list(Executions(program, program_order_is_causal).outcomes())


@pytest.mark.parametrize("name", BY_NAME)
def test_the_idiom_holds(name: str) -> None:
    litmus: Litmus = BY_NAME[name]
    found = outcomes(litmus.program)
    assert found, "there must be some execution"
    assert not any(litmus.never(outcome) for outcome in found)


@pytest.mark.parametrize(("name", "wrong"), [(one.name, wrong) for one in LITMUS for wrong in one.broken])
def test_without_its_parts_it_does_not(name: str, wrong: str) -> None:
    litmus = BY_NAME[name]
    assert any(litmus.never(outcome) for outcome in outcomes(litmus.broken[wrong], program_order_is_causal=True))


def test_every_idiom_is_cited_and_every_citation_is_an_idiom() -> None:
    cited: set[str] = set()
    for path in CSRC.rglob("*.h"):
        text = re.sub(r"\n\s*// ", " ", path.read_text())
        for names in re.findall(r"Litmus:\s*([a-z_, ]+)", text):
            cited |= {name.strip() for name in names.split(",")}
    assert cited == set(BY_NAME)


# --- the model itself -------------------------------------------------------------------------------------------------


def seen(program: Program, **registers: int) -> bool:
    return any(all(outcome[name] == value for name, value in registers.items()) for outcome in outcomes(program))


def test_store_buffering_is_allowed_without_sc_fences() -> None:
    program = Program(
        (
            thread("a", 0, store("x", 1, "release", SYS), load("r0", "y", "acquire", SYS)),
            thread("b", 0, store("y", 1, "release", SYS), load("r1", "x", "acquire", SYS)),
        )
    )
    assert seen(program, r0=0, r1=0) and seen(program, r0=1, r1=1)


def test_coherence_of_one_place() -> None:
    program = Program(
        (
            thread("a", 0, store("x", 1, "relaxed", SYS)),
            thread("b", 0, load("r0", "x", "relaxed", SYS), load("r1", "x", "relaxed", SYS)),
        )
    )
    assert not seen(program, r0=1, r1=0) and seen(program, r0=0, r1=1)


def test_atomics_do_not_lose_updates() -> None:
    program = Program(
        (
            thread("a", 0, add("r0", "x", 1, "relaxed", SYS)),
            thread("b", 0, add("r1", "x", 1, "relaxed", SYS)),
        )
    )
    assert not seen(program, r0=0, r1=0) and seen(program, r0=0, r1=1) and seen(program, r0=1, r1=0)


def test_a_release_reaches_through_other_atomics() -> None:
    program = Program(
        (
            thread("a", 0, store("data", 1), add("r0", "x", 1, "release", SYS)),
            thread("b", 0, add("r1", "x", 1, "relaxed", SYS)),
            thread("c", 0, load("r2", "x", "acquire", SYS), load("r3", "data")),
        )
    )
    assert not seen(program, r1=1, r2=2, r3=0) and seen(program, r0=1, r1=0, r2=1, r3=0)


def test_causality_adds_up() -> None:
    """A write and a release, an acquire and a release by a second thread, an acquire by a third."""

    def program(middle: str) -> Program:
        return Program(
            (
                thread("a", 0, store("data", 1), store("x", 1, "release", SYS)),
                thread("b", 0, load("r0", "x", middle, SYS), store("y", "r0", "release", SYS)),
                thread("c", 0, load("r1", "y", "acquire", SYS), load("r2", "data")),
            )
        )

    assert not seen(program("acquire"), r1=1, r2=0) and seen(program("relaxed"), r1=1, r2=0)


def test_barriers_are_of_one_block() -> None:
    def program(block: int) -> Program:
        return Program(
            (
                thread("a", 0, store("data", 1), barrier(1)),
                thread("a", block, barrier(1), load("r0", "data")),
            )
        )

    assert not seen(program(0), r0=0) and seen(program(1), r0=0)


def test_scopes() -> None:
    def program(scope: str, device: str, block: int) -> Program:
        return Program(
            (
                thread("a", 0, store("data", 1), store("x", 1, "release", scope)),
                thread(device, block, load("r0", "x", "acquire", scope), load("r1", "data")),
            )
        )

    for scope, device, block, holds in (
        (CTA, "a", 0, True),
        (CTA, "a", 1, False),
        (GPU, "a", 1, True),
        (GPU, "b", 0, False),
        (SYS, "b", 0, True),
    ):
        assert seen(program(scope, device, block), r0=1, r1=0) != holds
