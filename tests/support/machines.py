"""Two machines on this one: network namespaces connected only by a virtual cable."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest

from launches import free_port, of_ranks, torchrun_nodes
from places import ROOT, WORKERS

MACHINES = 2


class Machines:
    """Two machines joined by a cable.

    Parameters
    ----------
    name : str
        Prefix of their namespaces' names.
    """

    def __init__(self, name: str) -> None:
        self._namespaces = [f"{name}-{machine}" for machine in range(MACHINES)]
        self._network = f"10.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}"

    def address(self, machine: int) -> str:
        """Return a machine's address on the cable."""
        return f"{self._network}.{machine + 1}"

    def make(self) -> None:
        """Create the machines.

        Raises
        ------
        OSError, subprocess.CalledProcessError
            This machine does not allow the user to create them.
        """
        for namespace in self._namespaces:
            _ip("netns", "add", namespace)
            # A network local to the machine is listed first and leads nowhere; it has the same address on both.
            _ip("-netns", namespace, "link", "add", "inner", "type", "veth", "peer", "name", "other")
            _ip("-netns", namespace, "address", "add", "10.63.0.1/24", "dev", "inner")
            for end in ("inner", "other"):
                _ip("-netns", namespace, "link", "set", end, "up")
        ends = [["netns", namespace] for namespace in self._namespaces]
        _ip("link", "add", "cable", *ends[0], "type", "veth", "peer", "name", "cable", *ends[1])
        for machine in range(MACHINES):
            self._ip(machine, "address", "add", f"{self.address(machine)}/24", "dev", "cable")
            self._ip(machine, "link", "set", "lo", "up")
            self._ip(machine, "link", "set", "cable", "up")

    def remove(self) -> None:
        """Remove the machines and the cable."""
        for namespace in self._namespaces:
            with suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "delete", namespace)

    def cut(self, machine: int) -> None:
        """Unplug the cable from a machine."""
        self._ip(machine, "link", "set", "cable", "down")

    def inside(self, machine: int, command: Sequence[str]) -> list[str]:
        """Return a command that runs another one on a machine."""
        return ["ip", "netns", "exec", self._namespaces[machine], *command]

    def _ip(self, machine: int, *arguments: str) -> None:
        _ip("-netns", self._namespaces[machine], *arguments)

    def torchrun(self, ranks_per_machine: int, logs: Path, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
        """Run a launcher on each machine and return the completed processes."""
        return torchrun_nodes(
            MACHINES, ranks_per_machine, logs, *arguments, master=self.address(0), on_node=self.inside
        )

    @contextmanager
    def ranks(self, ranks_per_machine: int, worker: str, *arguments: str) -> Iterator[Ranks]:
        """Run a worker of `workers` on each machine, with a process per rank and no launcher that would end all
        processes when one ends. Processes still running at the end of the body are killed.
        """
        size = ranks_per_machine * MACHINES
        place = {"WORLD_SIZE": str(size), "MASTER_ADDR": self.address(0), "MASTER_PORT": str(free_port())}
        with ExitStack() as stack:
            processes = []
            for rank in range(size):
                command = self.inside(rank // ranks_per_machine, [sys.executable, str(WORKERS / worker), *arguments])
                environment = {**of_ranks(), **place, "RANK": str(rank)}
                errors = stack.enter_context(tempfile.TemporaryFile())
                process = subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=errors, bufsize=0, cwd=ROOT
                )
                stack.enter_context(process)
                stack.callback(process.kill)
                processes.append((process, errors))
            yield Ranks(processes)


class Ranks:
    """Processes that report in lines of JSON, each with a file for its standard error."""

    def __init__(self, processes: list[tuple[subprocess.Popen[bytes], IO[bytes]]]) -> None:
        self.processes = processes
        self._read = [b""] * len(processes)

    def next(self, rank: int, seconds: float = 60.0) -> dict[str, Any]:
        """Return a rank's next line, which must arrive in time."""
        process, errors = self.processes[rank]
        assert process.stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._read[rank]:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
            more = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if not more:
                errors.seek(0)
                raise AssertionError(f"rank {rank} printed nothing in {seconds:g} s. stderr: {errors.read().decode()}")
            self._read[rank] += more
        line, _, self._read[rank] = self._read[rank].partition(b"\n")
        return dict(json.loads(line))

    def signal(self, rank: int, number: int) -> None:
        """Send a rank's process a signal."""
        self.processes[rank][0].send_signal(number)


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Make two machines for a test, or skip it where the user lacks the privilege."""
    machines = Machines(f"deep-ep-{os.getpid()}")
    try:
        try:
            machines.make()
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or error
            pytest.skip(f"cannot create network namespaces (needs root and the package iproute2): {said}")
        yield machines
    finally:
        machines.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
