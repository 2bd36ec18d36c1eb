"""A backend that does, byte for byte, what the body of a request tells it to.

It answers llama-server's questions (`--version`, `--list-devices`, `--help`), is healthy at once,
and records what reaches it. A POST whose body is `{"script": [STEP, ...]}` is answered by the steps
alone; each is one of

    "text"            send it, as latin-1
    {"times": [T, N]} send a text N times
    {"gate": FILE}    wait until a file exists
    {"gone": true}    wait until the other side is gone, and record when
    {"deaf": true}    take no more connections
    {"end": HOW}      close, reset or exit (the process, at once)

`SCRIPT_VERSION` is what it calls itself; its slot is busy while the file `SCRIPT_BUSY` exists.

It stands alone: the standard library and nothing of ours.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

HELP = """-m,    --model FNAME                    model
--port PORT                             port
--host HOST                             host
-a,    --alias STRING                   alias
--device DEV                            device
-c,    --ctx-size N                     context
"""
LOCK = threading.Lock()
LISTENER = socket.socket()


def record(event: str, **fields: object) -> None:
    line = json.dumps({"event": event, "time": time.time(), **fields}) + "\n"
    with LOCK, Path(os.environ["SCRIPT_REC"]).open("a") as file:
        file.write(line)


class EndError(Exception):
    """The connection is over."""


def read_request(sock: socket.socket, data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the head and body of the next request, and what follows it."""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        if not piece:
            raise EndError
        data += piece
    head, _, data = data.partition(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    parts, have = [data], len(data)
    while have < length:
        piece = sock.recv(1 << 20)
        if not piece:
            raise EndError
        parts.append(piece)
        have += len(piece)
    data = b"".join(parts)
    return head, data[:length], data[length:]


def wait_gone(sock: socket.socket) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    poll.poll()


def play(sock: socket.socket, target: str, steps: list) -> None:
    for step in steps:
        if isinstance(step, str):
            sock.sendall(step.encode("latin-1"))
        elif "times" in step:
            text, count = step["times"]
            sock.sendall(text.encode("latin-1") * count)
        elif "gate" in step:
            while not Path(step["gate"]).exists():
                time.sleep(0.002)
        elif "deaf" in step:
            LISTENER.close()
        elif "gone" in step:
            wait_gone(sock)
            record("gone", path=target)
        elif step["end"] == "exit":
            os._exit(9)
        else:
            if step["end"] == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise EndError


def plain(target: str) -> object:
    if target == "/slots":
        return [{"id": 0, "is_processing": Path(os.environ.get("SCRIPT_BUSY", "/none")).exists()}]
    return {"status": "ok"}


def serve(sock: socket.socket) -> None:
    data = b""
    with sock:
        try:
            while True:
                head, body, data = read_request(sock, data)
                first, *lines = head.decode("latin-1").split("\r\n")
                method, target, _ = first.split(" ")
                scripted = method == "POST" and b'"script"' in body[:10000]
                if target not in ("/health", "/slots"):
                    digest = hashlib.sha256(body).hexdigest()
                    record(
                        "request",
                        method=method,
                        path=target,
                        headers=lines,
                        body=body[:10000].decode("latin-1"),
                        body_bytes=len(body),
                        body_sha256=digest,
                    )
                if scripted:
                    play(sock, target, json.loads(body)["script"])
                else:
                    reply = json.dumps(plain(target)).encode()
                    if method == "HEAD":
                        reply = b""
                    start = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                    sock.sendall(start + b"Content-Length: %d\r\n\r\n%s" % (len(reply), reply))
        except (EndError, OSError):
            return


def accept() -> None:
    poll = select.poll()
    poll.register(LISTENER, select.POLLIN)
    while True:
        poll.poll(20)  # not in accept(), which would keep a closed listener listening
        if LISTENER.fileno() < 0:
            return
        LISTENER.settimeout(0.02)
        try:
            sock, _ = LISTENER.accept()
        except OSError:
            continue
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=serve, args=(sock,), daemon=True).start()


def main() -> None:
    words = sys.argv[1:]
    if "--version" in words:
        sys.stderr.write(os.environ.get("SCRIPT_VERSION", "version: 1 (scripted)") + "\n")
    elif "--list-devices" in words:
        sys.stdout.write("Available devices:\n")
    elif "--help" in words:
        sys.stdout.write(HELP)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        LISTENER.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        flag = "--port" if "--port" in words else "-p"
        LISTENER.bind(("127.0.0.1", int(words[words.index(flag) + 1])))
        LISTENER.listen(512)
        threading.Thread(target=accept, daemon=True).start()
        while True:
            signal.pause()


if __name__ == "__main__":
    main()
