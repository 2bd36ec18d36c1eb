"""A scorer that answers by keywords: HTTP with `--port`, else JSON lines on stdin and stdout.

It speaks the protocols of `laya-serve` and of ggmlc's `laya` daemon, and breaks in every way that a
test asks for. Confidence is 0.7 for texts with a keyword and 0 for others.
"""
# ruff: noqa: T201  # a stand-in for a program that prints

from __future__ import annotations

import argparse
import http.server
import json
import os
import sys
import time

KEYWORDS = {"code": "code", "essay": "prose", "how": "short"}


def judge(asked: dict) -> dict:
    """Answer one request as a scorer does."""
    (name,) = asked["questions"]
    words = asked["state"].split()
    kind = next((KEYWORDS[word] for word in words if word in KEYWORDS), None)
    classes = list(asked["questions"][name]["criteria"])
    shares = dict.fromkeys(classes, 1 / len(classes))
    if kind:
        shares = {c: 0.9 if c == kind else 0.1 / (len(classes) - 1) for c in classes}
    answer = {
        "type": "choice",
        "choice": kind or classes[0],
        "probabilities": shares,
        "confidence": 0.7 if kind else 0.0,
    }
    return {
        "model": "laya",
        "answers": {name: answer},
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


class Handler(http.server.BaseHTTPRequestHandler):
    """The HTTP side."""

    options: argparse.Namespace

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.reply(200 if self.path == "/health" else 404, b'{"status":"ok"}')

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.options.hang:
            time.sleep(3600)
        if self.options.die:
            os._exit(3)
        if self.options.failing:
            self.reply(500, b"{}")
            return
        self.reply(200, b"<html>" if self.options.garbage else json.dumps(judge(asked)).encode())

    def log_message(self, *_: object) -> None:
        pass


def lines(options: argparse.Namespace) -> None:
    """Answer line after line; `--shuffle` answers in pairs, the second one first."""
    print("loading a model that is not there", flush=True)
    print(json.dumps({"status": "ready", "model": "laya"}), flush=True)
    held: list[str] = []
    for line in sys.stdin:
        if options.hang:
            time.sleep(3600)
        if options.die:
            sys.exit(3)
        if options.garbage:
            print("segmentation fault, sort of \x00\xff", flush=True)
            continue
        if options.half_line:
            print('{"id": "1", "answers"', end="", flush=True)
            continue
        asked = json.loads(line)
        if options.error:
            print(json.dumps({"id": asked["id"], "error": "out of memory"}), flush=True)
            continue
        said = judge(asked) if options.silent_id else {"id": asked["id"], **judge(asked)}
        held.append(json.dumps(said))
        # Alone in the warm-up, in pairs where many ask at once.
        if not options.shuffle or len(held) == 2 or asked["state"].startswith("hello"):
            for one in reversed(held):
                print(one, flush=True)
            held.clear()


def main() -> None:
    """Read the options and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int)
    for flag in (
        "any-host",
        "failing",
        "hang",
        "die",
        "garbage",
        "error",
        "half-line",
        "silent-id",
        "shuffle",
    ):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args()
    if options.port is None:
        lines(options)
        return
    Handler.options = options
    host = "0.0.0.0" if options.any_host else "127.0.0.1"
    with http.server.ThreadingHTTPServer((host, options.port), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
