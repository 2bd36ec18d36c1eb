"""A server of one small page of code: streams a few words, with whatever fault a test asks for.

Run as a program it prints the ready line that `1bit serve` prints, so that it can stand in for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time

ROLE = {"choices": [{"delta": {"role": "assistant", "content": None}, "index": 0}]}


class TinyServer:
    """Answers each connection in a thread of its own.

    Args:
        texts: What it streams, one event each.
        first_s: Seconds before the first text.
        gap_s: Seconds between texts.
        timings: The `timings` of the last event; `None` for none.
        usage: The `usage` of the last event; `None` for none.
        fault: `""`, `cut` (after the first text), `status` (503), `garbage` (not HTTP), `silent`
            (closes), `sse error`, `no end` (no finish and no [DONE]), `empty`, `bad json`.
        routes: Answers to GET, by path.
        die_after: Chats after which it stops listening; 0 never does.
        pieces: Bytes sent at a time; 0 sends each event whole.
    """

    def __init__(self, **knobs):
        self.texts = knobs.get("texts", ["", "one ", "two ", "three"])
        self.first_s = knobs.get("first_s", 0.0)
        self.gap_s = knobs.get("gap_s", 0.0)
        self.timings = knobs.get("timings")
        self.usage = knobs.get("usage")
        self.fault = knobs.get("fault", "")
        self.routes = knobs.get("routes", {"/v1/models": {"data": [{"id": "tiny"}]}})
        self.die_after = knobs.get("die_after", 0)
        self.pieces = knobs.get("pieces", 0)
        self.bodies = []
        self.heads = []
        self.first_text_at = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(10)

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection):
        with connection:
            data = b""
            while b"\r\n\r\n" not in data:
                more = connection.recv(65536)
                if not more:
                    return
                data += more
            head, _, body = data.partition(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            length = next(
                (int(x.split(":")[1]) for x in lines if x.lower().startswith("content-length")), 0
            )
            while len(body) < length:
                body += connection.recv(65536)
            method, path, _ = lines[0].split(" ")
            self.heads.append(head.decode())
            with contextlib.suppress(OSError):  # the client left
                if method == "GET" or not path.endswith("/chat/completions"):
                    self._page(connection, path)
                else:
                    self.bodies.append(json.loads(body))
                    self._chat(connection)

    def _page(self, connection, path):
        answer = self.routes.get(path)
        body = json.dumps(answer if answer is not None else {"error": "no such page"}).encode()
        status = "200 OK" if answer is not None else "404 Not Found"
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)

    def _chat(self, connection):
        if self.die_after and len(self.bodies) >= self.die_after:
            # first, so that a client that has our last byte finds nobody any more
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self.fault == "silent":
            return
        if self.fault == "garbage":
            connection.sendall(b"220 mail.example ESMTP\r\n")
            return
        if self.fault == "status":
            body = b'{"error":{"message":"Loading model","code":503}}'
            head = f"HTTP/1.1 503 Busy\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            return
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        self._event(connection, ROLE)
        time.sleep(self.first_s)
        if self.fault == "bad json":
            self._send(connection, b"data: {nonsense\n\n")
        for number, text in enumerate([] if self.fault == "empty" else self.texts):
            if number:
                time.sleep(self.gap_s)
            self._event(connection, {"choices": [{"delta": {"content": text}}]})
            if text and self.fault == "cut":
                return
            if text and self.fault == "sse error":
                self._event(connection, {"error": {"message": "Compute error", "code": 500}})
                return
        if self.fault != "no end":
            last = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
            last |= {"timings": self.timings} if self.timings else {}
            last |= {"usage": self.usage} if self.usage else {}
            self._event(connection, last)
            self._send(connection, b"data: [DONE]\n\n")
        connection.sendall(b"0\r\n\r\n")

    def _event(self, connection, value):
        self._send(connection, b"data: " + json.dumps(value).encode() + b"\n\n")

    def _send(self, connection, data):
        step = self.pieces or len(data)
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))


def main():
    """Serve until stopped. Knobs come as JSON in TINY; `--first S` is slow on its first chat."""
    knobs = json.loads(os.environ.get("TINY", "{}"))
    if "--fail" in sys.argv:
        sys.stderr.write("model file is cursed\n")
        sys.exit(3)
    if "--deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "--hang" in sys.argv:
        threading.Event().wait()
    server = TinyServer(**knobs)
    if "--direct" in sys.argv:
        beside = TinyServer(**knobs)
        server.routes["/v1/status"] = {"backends": [{"name": "a", "port": beside.port}]}
    if "--first" in sys.argv:
        server.first_s = float(sys.argv[sys.argv.index("--first") + 1])
        later = threading.Thread(target=_speed_up, args=(server,), daemon=True)
        later.start()
    sys.stderr.write(f"1bit serve: ready on {server.url}\n")
    threading.Event().wait()


def _speed_up(server):
    while not server.bodies:
        time.sleep(0.005)
    time.sleep(server.first_s / 2)
    server.first_s = 0


if __name__ == "__main__":
    main()
