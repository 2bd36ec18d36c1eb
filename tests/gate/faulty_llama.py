"""A llama-server with a fault: the real one, and a proxy in front of it that changes replies.

    python faulty_llama.py FAULT REAL ARGUMENTS...

Faults: `none`, `token:N` (the Nth token of each longer answer is another), `noise:SIGMA` (normal
noise of so many nat on every reported log probability, the same for the same prompt, as a wrong
kernel would), `forget` (the middle third of a chat is lost), `stale` (a prompt with a warmed prefix
gets nonsense), `malformed` (answers are refused as builds refuse malformed text), `ring:FILE` (a
request makes the kernel log a ring timeout in FILE), `die:N` (the server dies at request N).
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TIMEOUT = "amdgpu 0000:c5:00.0: amdgpu: ring gfx_0.0.0 timeout, signaled seq=10, emitted seq=12\n"
MALFORMED = "The model produced output that does not match the expected Content-only format"


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def forget_middle(text):
    third = len(text) // 3
    filler = "The ferry was late. "
    return text[:third] + (filler * third)[:third] + text[2 * third :]


def add_noise(request, reply, sigma):
    for step, entry in enumerate(reply.get("completion_probabilities") or []):
        for top in entry["top_logprobs"]:
            dice = random.Random(f"{len(request['prompt'])} {step} {top['id']}")
            top["logprob"] += dice.gauss(0, sigma)


def change_token(reply, number):
    steps = reply.get("completion_probabilities") or []
    if len(steps) >= number:
        steps[number - 1].update(id=steps[number - 1]["id"] + 1, token="?")


def make_nonsense(reply):
    for entry in reply.get("completion_probabilities") or []:
        tops = entry["top_logprobs"]
        for top, logprob in zip(tops, [t["logprob"] for t in reversed(tops)], strict=True):
            top["logprob"] = logprob
        entry.update({key: tops[-1][key] for key in ("id", "token")})


def handler(port, fault, argument, child):  # noqa: C901 - one branch a fault
    count = 0
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_args):
            pass

        def do_GET(self):
            self.relay(b"")

        def do_POST(self):
            self.relay(self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def relay(self, body):
            status, data = self.exchange(body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def exchange(self, body):
            nonlocal count
            chat = self.path.startswith("/v1/chat/completions")
            generates = self.path.startswith("/completion") or chat
            request = json.loads(body) if body else {}
            if generates:
                with lock:
                    count += 1
                    if fault == "die" and count == int(argument):
                        child.kill()
                        os._exit(9)
                if fault == "ring":
                    with Path(argument).open("a") as log:
                        log.write(TIMEOUT)
                if fault == "malformed" and not request.get("grammar"):
                    return 500, json.dumps({"error": {"message": MALFORMED}}).encode()
                if fault == "forget" and chat:
                    message = request["messages"][-1]
                    message["content"] = forget_middle(message["content"])
                    body = json.dumps(request).encode()
            status, data = send(port, self.command, self.path, body, self.headers)
            if status == 200 and self.path.startswith("/completion"):
                reply = json.loads(data)
                timings = reply.get("timings", {})
                if fault == "token":
                    change_token(reply, int(argument))
                elif fault == "noise":
                    add_noise(request, reply, float(argument))
                elif (
                    fault == "stale" and timings.get("cache_n", 0) > 64 and timings["prompt_n"] > 8
                ):
                    make_nonsense(reply)
                data = json.dumps(reply).encode()
            return status, data

    return Handler


def send(port, method, path, body, headers):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=body if method == "POST" else None,
        method=method,
        headers={
            "Content-Type": "application/json",
            "Authorization": headers.get("Authorization", ""),  # `1bit serve` gives a key
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError as error:
        return 503, json.dumps({"error": {"message": str(error)}}).encode()


def main():
    fault, _, argument = sys.argv[1].partition(":")
    real, arguments = sys.argv[2], sys.argv[3:]
    place = arguments.index("--port") + 1
    outer, inner = int(arguments[place]), free_port()
    arguments[place] = str(inner)
    child = subprocess.Popen([real, *arguments])
    server = ThreadingHTTPServer(("127.0.0.1", outer), handler(inner, fault, argument, child))
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = child.wait()
    os._exit(code if code >= 0 else 1)


if __name__ == "__main__":
    main()
