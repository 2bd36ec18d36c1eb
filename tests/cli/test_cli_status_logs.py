from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from onebit_serve.cli import ask, logs, status
from onebit_serve.core.errors import OnebitError, UsageError

READY = {
    "name": "gpu",
    "served_id": "m",
    "device": "vulkan",
    "role": "chat",
    "state": "ready",
    "since_s": 12.3,
    "port": 4242,
    "pid": 77,
    "load_ms": 812.4,
    "warm_up_ms": 2100.0,
    "restarts": 1,
    "in_flight": 2,
}
LOADING = {
    "name": "cpu",
    "served_id": "n",
    "device": "cpu",
    "role": "chat",
    "state": "loading",
    "since_s": 0.5,
    "restarts": 0,
    "in_flight": 0,
    "waiting": 3,
    "warm_up_skipped": "cpu",
    "last_line": "load_tensors: [1/2]",
}


class Scripted:
    """A server that says what a test wants."""

    def __init__(self):
        self.backends = [READY]
        self.status = "ok"
        self.key = ""
        self.asked = []
        self.logs = {"gpu": [b"one\n", b"two\n"], "cpu": [b"three\n"], "a/b c": [b"odd\n"]}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.answer(self)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, handler):
        self.asked.append(handler.path)
        path = handler.path.partition("?")[0]
        if self.key and handler.headers.get("Authorization") != f"Bearer {self.key}":
            self.send(handler, 401, {"error": {"message": "an API key is needed"}})
        elif path == "/v1/status":
            body = {"version": "1.0", "status": self.status, "backends": self.backends}
            self.send(handler, 200, body)
        elif path.endswith("/logs"):
            name = path.split("/")[3].replace("%2F", "/").replace("%20", " ")
            handler.send_response(200)
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            for line in self.logs[name]:
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            handler.wfile.write(b"0\r\n\r\n")
        else:
            self.send(handler, 404, {"error": {"message": "there is no route"}})

    def send(self, handler, code, body):
        data = json.dumps(body).encode()
        handler.send_response(code)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


@pytest.fixture
def served():
    one = Scripted()
    yield one
    one.server.shutdown()
    one.server.server_close()


def run(command, *words, env=None):
    return CliRunner().invoke(command.command, words, env=env, catch_exceptions=False)


def failure(command, *words, env=None):
    result = CliRunner().invoke(command.command, words, env=env)
    assert isinstance(result.exception, OnebitError), result.output
    return result.exception


# ------------------------------------------------------------------------------------ status


def test_a_ready_server_is_shown_and_exits_0(served):
    result = run(status, "--url", served.url)
    assert result.exit_code == 0
    title, head, row = result.output.splitlines()
    assert title == f"1bit serve 1.0 at {served.url}: ready"
    assert head.split()[:3] == ["backend", "state", "model"]
    assert head.split()[-2:] == ["running", "waiting"]
    assert row.split() == [
        *["gpu", "ready", "m", "vulkan", "4242", "77", "12.3", "s"],
        *["812", "ms", "2.1", "s", "1", "2", "0"],
    ]


def test_one_that_is_not_ready_exits_1_and_says_why(served):
    served.status, served.backends = "loading", [READY, LOADING]
    result = run(status, "--url", served.url)
    assert result.exit_code == 1
    assert ": loading\n" in result.output
    assert result.output.splitlines()[3].split()[-2:] == ["0", "3"]
    assert result.output.endswith("cpu: said last: load_tensors: [1/2]\n")


def test_a_named_backend_decides_alone(served):
    served.status, served.backends = "loading", [READY, LOADING]
    assert run(status, "--url", served.url, "gpu").exit_code == 0
    result = run(status, "--url", served.url, "cpu")
    assert result.exit_code == 1
    assert "gpu" not in result.output


def test_a_degraded_backend_is_shown_as_such(served):
    served.backends = [{**READY, "degraded": "the warm-up was cancelled"}]
    result = run(status, "--url", served.url)
    assert result.exit_code == 0
    assert "gpu: degraded: the warm-up was cancelled" in result.output
    assert result.output.splitlines()[2].split()[1] == "degraded"


SHAPES = {
    "planned": 13,
    "warmed": 5,
    "cheap": 2,
    "share": 0.714,
    "spent_s": 21.5,
    "gained_s": 14.83,
    "now": "9 tokens",
    "requests": [
        {"warms": "1 tokens", "first_ms": 10.0, "second_ms": None},
        {"warms": "4 tokens", "first_ms": 3700.0, "second_ms": 30.0},
        {"warms": "8 tokens", "first_ms": 14876.0, "second_ms": 43.0},
        {"warms": "2 sequences", "first_ms": 15.0, "second_ms": 19.0},
    ],
}


def test_shapes_are_counted_and_the_costliest_are_shown_or_all_of_a_named_backend(served):
    served.backends = [{**READY, "shapes": SHAPES}]
    lines = run(status, "--url", served.url).output.splitlines()[3:]
    assert lines[0] == (
        "gpu: 5 of 13 shapes are warm, 2 left out as cheap; 71% of expected requests pay nothing; "
        "21.5 s spent, 14.8 s gained; now 9 tokens"
    )
    assert lines[1:] == [
        "gpu:   8 tokens: 14.9 s, then 43 ms",
        "gpu:   4 tokens: 3.7 s, then 30 ms",
        "gpu:   2 sequences: 15 ms, then 19 ms",
    ]
    named = run(status, "--url", served.url, "gpu").output.splitlines()[4:]
    assert named[0] == "gpu:   1 tokens: 10 ms"
    assert len(named) == 4


def test_an_unknown_backend_is_a_slip(served):
    error = failure(status, "--url", served.url, "gpuu")
    assert (error.exit_code, error.hint) == (2, "the backends are gpu")


def test_json_is_what_the_server_said(served):
    said = json.loads(run(status, "--url", served.url, "--json").output)
    assert said == {"version": "1.0", "status": "ok", "backends": [READY]}
    assert json.loads(run(status, "--url", served.url, "--json", "gpu").output) == READY


def test_on_a_terminal_a_table_is_drawn(served):
    script = "from onebit_serve.cli import main; raise SystemExit(main())"
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", 0) as screen:
        process = subprocess.Popen(
            [sys.executable, "-c", script, "status", "--url", served.url],
            stdout=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "140"},
        )
        os.close(theirs)
        seen = b""
        try:
            while block := screen.read(4096):
                seen += block
        except OSError:  # Linux: the other end of the terminal is closed
            pass
        assert process.wait() == 0
    assert b"\x1b[32mready" in seen
    assert "─".encode() in seen


# ------------------------------------------------------------------------------------ finding it


def test_nobody_there_is_said_with_the_address():
    error = failure(status, "--url", "127.0.0.1:1")
    assert error.exit_code == 1
    assert error.message == "no 1bit serve answers at http://127.0.0.1:1: Connection refused"


def test_somebody_else_there_is_said(served):
    served.answer = lambda handler: served.send(handler, 404, ["no"])
    assert "404" in failure(status, "--url", served.url).message
    served.answer = lambda handler: handler.wfile.write(b"SSH-2.0-x\r\n")
    assert failure(status, "--url", served.url).message.startswith("no 1bit serve answers at ")


def test_the_variable_names_the_server_and_the_flag_wins(served):
    assert run(status, env={"ONEBIT_URL": served.url}).exit_code == 0
    assert run(status, "--url", served.url, env={"ONEBIT_URL": "http://127.0.0.1:1"}).exit_code == 0


def test_the_configuration_names_the_server(served, tmp_path):
    config = tmp_path / "serve.toml"
    config.write_text(f'[server]\nhost = "0.0.0.0"\nport = {served.server.server_port}\n')
    assert run(status, "--config", str(config)).exit_code == 0


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("", "http://127.0.0.1:8000"),
        ('host = "::"\nport = 1', "http://[::1]:1"),
        ('host = "[::1]"', "http://[::1]:8000"),
        ('host = "box.lan"', "http://box.lan:8000"),
    ],
)
def test_an_address_to_listen_on_becomes_one_to_connect_to(text, url, tmp_path):
    config = tmp_path / "serve.toml"
    config.write_text(f"[server]\n{text}\n")
    assert ask.find(None, str(config), None, {}).url == url


def test_a_free_port_cannot_be_found_by_the_configuration(tmp_path):
    config = tmp_path / "serve.toml"
    config.write_text("[server]\nport = 0\n")
    with pytest.raises(UsageError, match="the port is 0"):
        ask.find(None, str(config), None, {})


@pytest.mark.parametrize(
    "url",
    ["ftp://x", "http://", "http://x:99999", "http://[::1", "htp:/x", "http:/127.0.0.1:1", "x:"],
)
def test_what_is_no_url_is_refused_with_what_one_looks_like(url):
    error = failure(status, "--url", url)
    assert error.exit_code == 2
    assert error.message == f"{url} is no URL of a server"
    assert error.hint == "a URL looks like http://127.0.0.1:8000"


def test_a_proxy_of_the_environment_is_not_asked(served):
    assert run(status, "--url", served.url, env={"http_proxy": "http://127.0.0.1:1"}).exit_code == 0


def test_a_key_comes_from_a_file_or_the_environment(served, tmp_path):
    served.key = "secret"
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsecret\nother\n")
    assert run(status, "--url", served.url, "--api-key-file", str(keys)).exit_code == 0
    assert run(status, "--url", served.url, env={"ONEBIT_API_KEY": "secret,b"}).exit_code == 0
    error = failure(status, "--url", served.url, env={"ONEBIT_API_KEY": "wrong"})
    assert error.exit_code == 1
    assert "wants an API key" in error.message
    assert "wrong" not in error.message
    missing = failure(status, "--url", served.url, "--api-key-file", str(tmp_path / "none"))
    assert missing.exit_code == 2


# ------------------------------------------------------------------------------------ logs


def test_the_lines_of_a_backend_are_printed_as_they_are(served):
    result = run(logs, "--url", served.url)
    assert (result.exit_code, result.output) == (0, "one\ntwo\n")
    assert served.asked[-1] == "/v1/backends/gpu/logs?lines=200"
    assert run(logs, "--url", served.url, "-n", "5", "gpu").output == "one\ntwo\n"
    assert served.asked[-1] == "/v1/backends/gpu/logs?lines=5"


@pytest.mark.parametrize("follow", [(), ("-f",)])
def test_lines_of_several_backends_carry_its_name(served, follow):
    served.backends = [READY, LOADING]
    lines = run(logs, "--url", served.url, *follow).output.splitlines()
    assert sorted(lines) == ["cpu | three", "gpu | one", "gpu | two"]
    assert run(logs, "--url", served.url, *follow, "cpu").output == "three\n"
    assert served.asked[-1].endswith("lines=200&follow=1") == bool(follow)


def test_a_name_with_odd_characters_is_asked_for_as_it_is(served):
    served.backends = [{**READY, "name": "a/b c"}]
    assert run(logs, "--url", served.url).output == "odd\n"


def test_a_followed_line_is_printed_before_the_next_comes(served):
    first_seen = threading.Event()

    def trickle():
        yield b"first\n"
        assert first_seen.wait(20)
        yield b"second\n"

    served.logs["gpu"] = trickle()
    script = "from onebit_serve.cli import main; raise SystemExit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "logs", "-f", "--url", served.url],
        stdout=subprocess.PIPE,
    )
    with process.stdout as out:
        assert out.readline() == b"first\n"
        first_seen.set()
        assert out.read() == b"second\n"
    assert process.wait() == 0


def test_a_reader_that_goes_away_ends_it_quietly(served):
    served.logs["gpu"] = [b"x" * 1000 + b"\n"] * 2000
    script = "from onebit_serve.cli import main; raise SystemExit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "logs", "--url", served.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    with process.stderr as err:
        assert err.read() == b""
    assert process.wait() == 1


def test_logs_of_an_unknown_backend_are_a_slip(served):
    assert failure(logs, "--url", served.url, "other").exit_code == 2


def test_what_the_server_says_against_it_is_passed_on(served, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    door = ask.Door(served.url)
    with pytest.raises(OnebitError, match="there is no route"):
        list(door.lines("/v1/backends/x/nothing"))
