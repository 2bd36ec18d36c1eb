from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from onebit_serve.live.probe import is_healthy, owns_port

LISTEN = """
import socket, subprocess, sys
sock = socket.socket()
sock.bind(("127.0.0.1", 0))
if sys.argv[1] == "listen":
    sock.listen()
    print(sock.getsockname()[1], flush=True)
elif sys.argv[1] == "bind":
    print(sock.getsockname()[1], flush=True)
else:
    subprocess.Popen([sys.executable, "-c", sys.argv[2], "listen"])
sys.stdin.read()
"""


@pytest.fixture
def answering() -> Iterator[tuple[int, list[int]]]:
    """An HTTP server: its port, and the statuses that it answers one after the other."""
    statuses: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = json.dumps({"path": self.path}).encode()
            self.send_response(statuses.pop(0))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1], statuses
    server.shutdown()
    thread.join()
    server.server_close()


async def test_only_200_is_healthy(answering):
    port, statuses = answering
    statuses += [200, 503, 404]
    assert [await is_healthy(port) for _ in range(3)] == [True, False, False]


async def test_nobody_is_neither_healthy_nor_ill():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert await is_healthy(sock.getsockname()[1]) is None


@pytest.mark.parametrize(
    ("mode", "owns"), [("listen", True), ("bind", False), ("grandchild", True)]
)
def test_a_port_belongs_to_the_child_that_listens_there_or_to_one_of_its_own(mode, owns):
    child = subprocess.Popen(
        [sys.executable, "-c", LISTEN, mode, LISTEN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        port = int(child.stdout.readline())
        assert owns_port(child.pid, port) is owns
        child.stdin.close()


def test_a_port_of_somebody_else_does_not_belong_to_the_child():
    with socket.socket() as ours, subprocess.Popen(["sleep", "300"]) as child:
        ours.bind(("127.0.0.1", 0))
        ours.listen()
        port = ours.getsockname()[1]
        assert owns_port(os.getpid(), port)
        assert not owns_port(child.pid, port)
        child.kill()
        child.wait()
        assert not owns_port(child.pid, port)
