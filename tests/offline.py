"""A guard against network access: an audit hook that allows this machine alone, and remembers other attempts.

Sockets of datagrams may be "connected" to any address: nothing is sent, and Ray and Dask find their own address so.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
from typing import Any

ATTEMPTS: list[str] = []  # of the running test
NAMES = {None, "", "localhost", "localhost.localdomain", socket.gethostname(), socket.getfqdn()}


def guard() -> None:
    """Refuse connections to other machines from now on, in this process."""
    sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        connection, address = arguments
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type & socket.SOCK_DGRAM:
            return
        host = address[0]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if not _here(host):
        ATTEMPTS.append(f"{event} {host}")
        raise OSError(errno.ENETUNREACH, f"Tests have no network ({event} {host}).")


def _here(host: str | None) -> bool:
    """Return whether a host is this machine; numbers need no look-up, but connections to them may leave it."""
    if host in NAMES:
        return True
    try:
        address = ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified or str(address) in _own()


def _own() -> set[str]:
    """The addresses of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing
            return {probe.getsockname()[0]}
        except OSError:
            return set()
