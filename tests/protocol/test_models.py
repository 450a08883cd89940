"""The rules of docs/PROTOCOL.md in models with every order of events, and the shortest failure without each rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from models.catalogue import CASES, MODELS, Case
from models.explore import Model, Step, explore, name_of, rules_of
from places import ROOT

pytestmark = pytest.mark.once


@dataclass(frozen=True)
class Reaching:
    """The same model, in which reaching the end counts as the failure."""

    model: Model[Any]

    def initial(self) -> Any:
        return self.model.initial()

    def steps(self, state: Any) -> Iterator[Step[Any]]:
        return self.model.steps(state)

    def wrong(self, state: Any) -> str | None:
        return "the end" if self.model.ended(state) else None

    def ended(self, state: Any) -> bool:
        return self.model.ended(state)


def marks_of(model: Model[Any]) -> list[pytest.MarkDecorator]:
    """Return the marks of a model. Of those whose states take seconds, one of the same kind is not thorough."""
    large = any(size in name_of(model) for size in ("calls=4", "commands=4", "gives_up=0, blocks=4"))
    return [pytest.mark.thorough] if large else []


@pytest.mark.parametrize("model", [pytest.param(one, id=name_of(one), marks=marks_of(one)) for one in MODELS])
def test_with_all_rules_nothing_goes_wrong(model: Model[Any]) -> None:
    assert explore(model) is None
    assert explore(Reaching(model)), "the end is never reached"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_without_the_rule_something_does(case: Case) -> None:
    found = case.counterexample()
    assert found is not None
    *steps, wrong = found
    assert re.search(case.wrong, wrong)
    assert len(steps) == case.steps


def test_every_rule_of_every_model_is_in_the_catalogue() -> None:
    assert {(type(model), rule) for model in MODELS for rule in rules_of(model)} == {
        (type(case.model), case.rule) for case in CASES
    }
    assert len({(type(case.model), case.rule) for case in CASES}) == len(CASES)


def test_the_document_names_the_model_of_each_rule() -> None:
    text = (ROOT / "docs" / "PROTOCOL.md").read_text()
    named: set[tuple[str, str, str]] = set()
    for number, section in re.findall(r"^### (P\d+)\.(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE):
        for file, rules in re.findall(
            r"\*Model:\* `tests/protocol/models/(\w+)\.py`, rules? (.*?)\.\n", section, re.DOTALL
        ):
            named |= {(number, file, rule) for rule in re.findall(r"`(\w+)`", rules)}
    assert named == {(case.number, case.file, case.rule) for case in CASES}


# --- the explorer itself ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counter:
    """A counter that increases by 1 or 3; 7 is forbidden, and 5 is a dead end."""

    never_by_three: bool = True
    stops_at: int = 5

    def initial(self) -> int:
        return 0

    def steps(self, state: int) -> Iterator[Step[int]]:
        if state == self.stops_at:
            return
        yield "one", state + 1
        if not self.never_by_three:
            yield "three", state + 3

    def wrong(self, state: int) -> str | None:
        return f"{state} must not be" if state == 7 else None

    def ended(self, state: int) -> bool:
        return state == 6


def test_the_explorer_finds_a_shortest_way() -> None:
    assert explore(Counter(never_by_three=False, stops_at=9)) == ["one", "three", "three", "7 must not be"]


def test_the_explorer_finds_a_deadlock() -> None:
    assert explore(Counter()) == ["one"] * 5 + ["deadlock: nothing can go on"]


def test_the_explorer_takes_an_end_for_no_deadlock() -> None:
    assert explore(Counter(stops_at=6)) is None
