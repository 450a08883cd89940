"""The machine that a process is on, and the address at which others reach it."""

from __future__ import annotations

import ipaddress
import os
import socket

from deep_ep_py.base.environment import ADDRESS

_AFAR = ("192.0.2.1", "2001:db8::1")
"""Addresses that belong to no machine (RFC 5737, RFC 3849): the route to them is the route to other networks."""


def machine_name() -> str:
    """Return an identifier common to all processes of a machine, whatever its containers are called.

    Processes in different network namespaces count as being on different machines: they do not see each other's
    sockets.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"


def own_address() -> str:
    """Return the IP address at which ranks on other machines reach this one.

    It is DEEP_EP_ADDRESS if that is set; otherwise the source address of the route to MASTER_ADDR, or failing that, of
    the route to other networks. Addresses that only this machine reaches do not count.

    Raises
    ------
    ValueError
        DEEP_EP_ADDRESS is not an address of this machine, or is not set and there are no such routes.
    """
    if given := os.environ.get(ADDRESS):
        try:
            if ipaddress.ip_address(given).is_unspecified:
                raise ValueError("it stands for all addresses")
            with socket.socket(_family(given), socket.SOCK_DGRAM) as probe:
                probe.bind((given, 0))
        except (OSError, ValueError) as error:
            raise ValueError(f"{ADDRESS}={given!r}: expected an IP address of this machine ({error})") from None
        return given
    for target in (os.environ.get("MASTER_ADDR"), *_AFAR):
        source = _source_towards(target) if target else None
        if source is not None and not ipaddress.ip_address(source).is_loopback:
            return source
    raise ValueError(
        f"this machine has only loopback routes, and {ADDRESS} is not set: expected it to be this machine's address in "
        "the network of the others"
    )


def listen_at(address: str) -> tuple[socket.socket, int]:
    """Return a TCP socket that other machines can connect to, and its port, chosen by the system."""
    listener = socket.socket(_family(address), socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind((address, 0))
    listener.listen(socket.SOMAXCONN)
    listener.setblocking(False)
    return listener, int(listener.getsockname()[1])


def make_connection(address: str) -> socket.socket:
    """Return a non-blocking TCP socket of the right family to connect to an address."""
    connection = socket.socket(_family(address), socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    connection.setblocking(False)
    bound_silence(connection)
    return connection


def bound_silence(connection: socket.socket) -> None:
    """Make a connection end when the other machine's kernel stops answering, however long its process takes."""
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5), ("TCP_USER_TIMEOUT", 10_000)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET


def _source_towards(target: str) -> str | None:
    """Return the address from which packets to a target would be sent, without sending any."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return None
