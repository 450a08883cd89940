"""A process of the same user that is no rank: it finds the ranks' sockets in /proc/net/unix and connects to them first.

Arguments: its behavior, the process whose sockets it looks for, their number, and a file for its pickle to create. It
prints "ready" and continues until its input ends.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path


class MakesFile:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def names_of(pid: str, count: int) -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    names = {line.split()[-1] for line in lines if f"@deep_ep_py-{pid}-" in line}
    assert len(names) == count, names
    return ["\0" + name[1:] for name in sorted(names)]


def connect(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    try:
        connection.connect(name)
    except OSError:
        connection.close()
        raise
    return connection


def send_pickles(names: list[str], path: str) -> list[socket.socket]:
    """Connect to one of them as every rank."""
    connections = []
    for rank in range(len(names)):
        connections.append(connect(names[0]))
        connections[-1].send(struct.pack("i", rank))
        with suppress(BrokenPipeError, ConnectionResetError):  # already detected
            connections[-1].send(pickle.dumps(MakesFile(path)))
    return connections


def fill(names: list[str]) -> list[socket.socket]:
    """Connect until the backlog is full."""
    connections = []
    for name in names:
        with suppress(OSError):
            while True:
                connections.append(connect(name))
    return connections


def main() -> None:
    what, pid, count, path = sys.argv[1:]
    names = names_of(pid, int(count))
    connections = {
        "pickles": lambda: send_pickles(names, path),
        "is silent": lambda: [connect(name) for name in names],
        "fills the backlog": lambda: fill(names),
        "goes on filling it": lambda: fill(names),
    }[what]()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.001 if what == "goes on filling it" else None)[0]:
        for connection in connections[: len(connections) // 2]:
            connection.close()
        connections = connections[len(connections) // 2 :] + fill(names)


if __name__ == "__main__":
    main()
