"""Takes the front door's address, before anything is spawned and without an event loop."""

from __future__ import annotations

import contextlib
import errno
import socket

from onebit_serve.core.errors import PortTakenError, UsageError

__all__ = ["bind"]

_BACKLOG = 512


def bind(host: str, port: int) -> socket.socket:
    """Take the front door's address.

    Args:
        host: An address or a name of this machine.
        port: The port; 0 takes a free one.

    Raises:
        PortTakenError: Somebody else has it; the message names the process where it can be seen.
        UsageError: The host is no address of this machine.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host} is no address: {error}", hint="try 127.0.0.1") from None
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(
                f"port {port} on {host} is taken{_holder(port)}",
                hint="stop it, or choose another with -p ([server] port); -p 0 takes a free one",
            ) from None
        if error.errno == errno.EACCES:
            raise PortTakenError(
                f"port {port} on {host} may not be used", hint="ports under 1024 need privileges"
            ) from None
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def _holder(port: int) -> str:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid
            if listens and connection.laddr and connection.laddr.port == port:
                name = psutil.Process(connection.pid).name()
                return f" by pid {connection.pid} ({name})"
    return ""
