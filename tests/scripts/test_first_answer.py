"""`make serve` in small: the first answer is printed once ready, and stopping is the server's."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "first_answer.py"
Run = Callable[[str], "subprocess.Popen[str]"]

SERVES = """
    import http.server, json, signal, sys, threading

    class Door(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            question = asked["messages"][0]["content"]
            body = json.dumps({"choices": [{"message": {"content": f"heard: {question}"}}]})
            self.send_response(STATUS)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())
        def log_message(self, *_):
            pass

    door = http.server.HTTPServer(("127.0.0.1", 0), Door)
    threading.Thread(target=door.serve_forever, daemon=True).start()
    def stop(number, _):
        print(f"stopping for {number}", file=sys.stderr, flush=True)
        sys.exit(7)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    print(f"1bit serve: ready on http://127.0.0.1:{door.server_port}", file=sys.stderr, flush=True)
    while True:
        signal.pause()
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Start the script with a server made of the given Python text."""
    children: list[subprocess.Popen[str]] = []

    def start(text: str) -> subprocess.Popen[str]:
        server = tmp_path / "server.py"
        server.write_text(textwrap.dedent(text))
        child = subprocess.Popen(
            [sys.executable, SCRIPT, sys.executable, server],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        with child:
            child.kill()


def read_until(child: subprocess.Popen[str], words: str) -> str:
    """Return what the script printed up to the line with these words."""
    text = ""
    for line in child.stdout or ():
        text += line
        if words in line:
            break
    return text


def test_the_first_answer_and_the_next_question_are_printed_once_the_server_is_ready(
    run: Run,
) -> None:
    child = run(SERVES.replace("STATUS", "200"))
    text = read_until(child, "curl")
    assert "heard: Name three colors." in text
    assert "/v1/chat/completions" in text
    assert "Name three animals." in text
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once_and_the_exit_code_is_the_servers(
    run: Run, number: signal.Signals
) -> None:
    child = run(SERVES.replace("STATUS", "200"))
    read_until(child, "curl")
    child.send_signal(number)
    _, errors = child.communicate(timeout=60)
    assert errors.count(f"stopping for {number}") == 1
    assert child.returncode == 7


def test_the_line_to_copy_asks_the_next_question(run: Run) -> None:
    child = run(SERVES.replace("STATUS", "200"))
    line = read_until(child, "curl").splitlines()[-1]
    asked = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False
    )
    if asked.returncode == 127:
        pytest.skip("curl is not installed")
    assert "heard: Name three animals." in asked.stdout
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)


def test_a_server_that_does_not_start_ends_it_with_that_exit_code_and_its_own_words(
    run: Run,
) -> None:
    child = run("import sys; sys.exit('error: port 8000 is taken')")
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert output == ""
    assert "port 8000 is taken" in errors


def test_an_answer_that_fails_is_said_and_the_server_stays(run: Run) -> None:
    child = run(SERVES.replace("STATUS", "503"))
    assert "(no answer: HTTP Error 503" in read_until(child, "curl")
    assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == 7
