"""Comments on an event stream whose backend has not answered yet.

Proxies and clients give up on a connection that is silent for too long (300 s and less are common),
while a model loads or a long prompt is prefilled. Where `ping_s` asks for it, the head of an event
stream is sent early and a comment follows every so often. The price: the status is 200 by then, so
what goes wrong later can only be said as an event.
"""

from __future__ import annotations

import socket

import trio

from onebit_serve.core import wire
from onebit_serve.core.wire import Refusal
from onebit_serve.live.upstream import send_all

__all__ = ["Heartbeat"]

_COMMENT = b"8\r\n: ping\n\n\r\n"
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"X-Accel-Buffering: no\r\nTransfer-Encoding: chunked\r\n"
)


class Heartbeat:
    """Keeps one waiting client's connection alive.

    Args:
        sock: The client's socket, non-blocking.
        every_s: Seconds of silence before each comment.
        lines: More header lines for the head, each with its CR LF.

    Attributes:
        begun: Whether the head has been sent.
    """

    def __init__(self, sock: socket.socket, every_s: float, lines: bytes = b"") -> None:
        self.begun = False
        self._sock = sock
        self._every_s = every_s
        self._lines = lines
        self._sending = trio.Lock()
        self._stopped = False

    async def run(self) -> None:
        """Send comments until stopped, or until the client is gone."""
        try:
            while True:
                await trio.sleep(self._every_s)
                async with self._sending:
                    if self._stopped:
                        return
                    first = b"" if self.begun else _HEAD + self._lines + b"\r\n"
                    self.begun = True
                    await send_all(self._sock, first + _COMMENT)
        except OSError:
            return  # the watch on the client sees it too

    async def stop(self) -> bool:
        """Send no more comments; return whether the stream has begun."""
        self._stopped = True
        async with self._sending:
            return self.begun

    async def end(self, refusal: Refusal) -> None:
        """Say what went wrong and end the stream that has begun."""
        event = wire.error_event(refusal)
        await send_all(self._sock, b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))
