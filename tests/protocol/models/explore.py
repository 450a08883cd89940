"""Explores every state that a model can reach, breadth first, so that the path to a bad state is a shortest one."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import fields
from typing import Protocol, TypeVar

RANKS = "ABC"  # names of ranks 0, 1 and 2 in the texts of steps

State = TypeVar("State", bound=Hashable)
Step = tuple[str, State]
T = TypeVar("T")


class Model(Protocol[State]):
    """A frozen dataclass whose fields are the rules, all kept by default. Steps are the next possible actions of each
    rank, host, kernel and network; any of them may come next.
    """

    def initial(self) -> State: ...

    def steps(self, state: State) -> Iterator[Step[State]]:
        """Yield everything that can happen next: its description, and the state it leads to."""

    def wrong(self, state: State) -> str | None:
        """Return an error that must never occur, if it has."""

    def ended(self, state: State) -> bool:
        """Return whether everything is done, so that no next step is required."""


def explore(model: Model[State]) -> list[str] | None:
    """Return None if no bad state can be reached; otherwise a shortest path to one: its steps, and the error."""
    start = model.initial()
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    todo = deque([start])
    while todo:
        state = todo.popleft()
        wrong = model.wrong(state)
        nexts = [] if wrong else list(model.steps(state))
        if not wrong and not nexts and not model.ended(state):
            wrong = "deadlock: nothing can go on"
        if wrong:
            return [*_way_to(state, came_from), wrong]
        for text, following in nexts:
            if following not in came_from:
                came_from[following] = (state, text)
                todo.append(following)
    return None


def _way_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> list[str]:
    texts = []
    while (before := came_from[state]) is not None:
        state, text = before
        texts.append(text)
    return texts[::-1]


def rules_of(model: Model[State]) -> list[str]:
    """Return the names of a model's rules."""
    return [field.name for field in fields(model) if field.default is True]  # type: ignore[arg-type]


def name_of(model: Model[State]) -> str:
    """Return a model's name and sizes."""
    rules = rules_of(model)
    sizes = [f"{field.name}={getattr(model, field.name)}" for field in fields(model) if field.name not in rules]  # type: ignore[arg-type]
    return f"{type(model).__name__}({', '.join(sizes)})"


def with_item(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """Return the tuple with the item at `index` replaced."""
    return (*items[:index], item, *items[index + 1 :])
