"""Whether stores and exchanges of a host are lost to a GPU's atomics on the same word, in pinned and in GPU memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu_lab import probe
from deep_ep_py.base.native import C
from deep_ep_py.base.options import OutputFile

BOUNDARY = (
    "One thread of a kernel changes a word for half a second while the host changes it too. Adds 0: the kernel adds 0, "
    "as a look by an atomic does; the host writes 1, 2, 3, ..., and a value is lost if it is not there microseconds "
    "later. Exchanges: the kernel takes values by exchanging the word with 0; the host puts 1 there whenever it finds "
    "0. Lost is what was put, less what was taken and what is left; a negative number was taken twice. A host reaches "
    "pinned memory by loads, stores and exchanges, and GPU memory by copies on a stream of its own."
)
SECONDS = 0.5
_TIMEOUT_NS = 5_000_000_000
_WORD, _STOP, _DONE, _TAKEN = 0, 8, 16, 24  # in cache lines of their own
_LOOKS = 3  # between a host's store and its look


@dataclass(frozen=True)
class Word:
    """How a host reaches the word."""

    where: str
    how: str
    address: int
    load: Callable[[], int]
    put: Callable[[int], None]


class AbortWord:
    """A GPU, a word in its memory, and pinned memory with another word."""

    def __init__(self) -> None:
        self._context = C.cuda.Context(probe.gpu().index or 0)
        self._memory = C.cuda.Memory(self._context)
        self._pinned = self._memory.pinned_words(32)
        self._on_gpu = probe.Results(self._context, 1)
        self._launcher = C.cuda.Launcher(self._context, warps=1, cooperative=False)
        code = probe.compiled("abort_word.cu", "gpu_lab::change_word", self._context)
        self._launcher.load("change_word", probe.NO_SHAPE, code.cubin, code.symbol)

    def words(self) -> list[Word]:
        """Return the ways in which a host changes a word."""
        pinned, memory, address = self._pinned, self._memory, self._on_gpu.address
        there = pinned.address(_WORD)

        def exchange(value: int) -> None:
            pinned.exchange(_WORD, value)

        return [
            Word("pinned", "store", there, lambda: pinned.load(_WORD), lambda value: pinned.store(_WORD, value)),
            Word("pinned", "exchange", there, lambda: pinned.load(_WORD), exchange),
            Word(
                "GPU",
                "copy",
                address,
                lambda: memory.load_word(address),
                lambda one: memory.store_words([address], one),
            ),
        ]

    def run(self, word: Word, exchanges: bool) -> list[Any]:
        """Let both change the word; return a row of the report."""
        word.put(0)
        for index in (_STOP, _DONE, _TAKEN):
            self._pinned.store(index, 0)
        others = (self._pinned.address(index) for index in (_STOP, _DONE, _TAKEN))
        arguments = probe.words(word.address, *others, int(exchanges), _TIMEOUT_NS)
        serial = self._launcher.launch("change_word", probe.NO_SHAPE, 1, 1, 0, arguments)
        put, lost = self._hand_over(word) if exchanges else self._write_and_look(word)
        self._pinned.store(_STOP, 1)
        self._launcher.wait(serial)
        if exchanges:
            lost = put - self._pinned.load(_TAKEN) - word.load()
        ended = "" if self._pinned.load(_DONE) else "it did not run to its end"
        return [word.where, word.how, "exchanges" if exchanges else "adds 0", put, lost, ended]

    @staticmethod
    def _write_and_look(word: Word) -> tuple[int, int]:
        value, lost, until = 0, 0, time.monotonic() + SECONDS
        while time.monotonic() < until:
            value += 1
            word.put(value)
            lost += any(word.load() != value for _ in range(_LOOKS))
        return value, lost

    @staticmethod
    def _hand_over(word: Word) -> tuple[int, int]:
        put, until = 0, time.monotonic() + SECONDS
        while time.monotonic() < until:
            if word.load() == 0:
                word.put(1)
                put += 1
        return put, 0


@click.command()
@click.option("--json", "json_file", type=OutputFile(), help="Write the figures here.")
def main(json_file: Path | None) -> None:
    """Count what is lost."""
    experiment = AbortWord()
    rows = [experiment.run(word, exchanges) for word in experiment.words() for exchanges in (False, True)]
    columns = ["memory", "the host's", "the kernel", "put", "lost", "remark"]
    probe.write_figures(json_file, BOUNDARY, [probe.table("One word changed by a GPU and a host", columns, rows)])


if __name__ == "__main__":
    main()
