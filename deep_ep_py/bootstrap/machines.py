"""Which machine a process is on, and at which address others reach it."""

from __future__ import annotations

import ipaddress
import os
import socket

from deep_ep_py.core.environment import ADDRESS

_AFAR = ("192.0.2.1", "2001:db8::1")
"""Addresses that are no machine's (RFC 5737, RFC 3849): the way there is the way to other networks."""


def machine_name() -> str:
    """Return what all processes of a machine have in common, whatever its containers call themselves.

    Processes in different network namespaces count as on different machines: they do not see each other's sockets.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"


def own_address() -> str:
    """Return the IP address at which ranks of other machines find this one.

    It is that of DEEP_EP_ADDRESS, else the one from which the machine of MASTER_ADDR is reached, else the one from
    which other networks are.

    Raises
    ------
    ValueError
        DEEP_EP_ADDRESS is no address of this machine.
    """
    if given := os.environ.get(ADDRESS):
        try:
            if ipaddress.ip_address(given).is_unspecified:
                raise ValueError("that stands for all of them")
            with socket.socket(_family(given), socket.SOCK_DGRAM) as probe:
                probe.bind((given, 0))
        except (OSError, ValueError) as error:
            raise ValueError(f"{ADDRESS}={given!r}: expected an IP address of this machine ({error})") from None
        return given
    for target in (os.environ.get("MASTER_ADDR"), *_AFAR):
        source = _source_towards(target) if target else None
        if source is not None and not ipaddress.ip_address(source).is_loopback:
            return source
    return "127.0.0.1"


def listen_at(address: str) -> tuple[socket.socket, int]:
    """Return a TCP socket that other machines can connect to, and its port, which the system chooses."""
    listener = socket.socket(_family(address), socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind((address, 0))
    listener.listen(socket.SOMAXCONN)
    listener.setblocking(False)
    return listener, int(listener.getsockname()[1])


def make_connection(address: str) -> socket.socket:
    """Return a TCP socket that can be connected to an address."""
    connection = socket.socket(_family(address), socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    connection.setblocking(False)
    bound_silence(connection)
    return connection


def bound_silence(connection: socket.socket) -> None:
    """Have a connection end when the other machine's kernel does not answer, however long its process takes."""
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5), ("TCP_USER_TIMEOUT", 10_000)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET


def _source_towards(target: str) -> str | None:
    """Return the address from which packets to a target would be sent. None is sent."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return None
