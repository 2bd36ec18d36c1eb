"""Every knob of the fake does what it says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from llama_process import Llama, frames, received, until

from onebit_serve.fake_llama.knobs import KNOBS, KnobError, parse

Fake = Callable[..., Llama]


def gone(pid: int) -> bool:
    """Tell whether a process has ended (a zombie has)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def answers(url: str) -> bool:
    """Tell whether a completion is answered within half a second."""
    try:
        httpx.post(f"{url}/completion", json={"prompt": "x"}, timeout=0.5, trust_env=False)
    except httpx.TransportError:
        return False
    return True


def run(program: str, *arguments: str, knobs: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "FAKE_LLAMA": knobs}
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, env=env, timeout=30, check=False
    )


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ("nonsense=1", "unknown knob 'nonsense'"),
        ("load=soon", "load='soon'"),
        ("load=-1", "load='-1'"),
        ("load", "'load' is no key=value"),
        ("dead_at=never-ever", "dead_at"),
        ("dead_at=req0", "numbered from 1"),
        ("dead_at=5s:NOSUCH", "no signal is called NOSUCH"),
        ("hang_at=load:some", "only :all"),
        ("fail=500", "WHAT@N"),
        ("chunks=0", "joinN"),
        ("term=maybe", "llama, obey"),
        ("build=0.7", "b10068"),
        ("refuse=3", "SECONDS:FILE"),
        ("garbage=some", "none, all"),
        ("bos=perhaps", "1 or 0"),
        ("fail='500@1", "No closing quotation"),
    ],
)
def test_a_bad_knob_is_said_and_ends_with_2(fake_llama: str, knobs: str, said: str) -> None:
    done = run(fake_llama, knobs=knobs)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_flag_wins_over_the_variable() -> None:
    knobs = parse({"FAKE_LLAMA": "load=3 ka=2"}, ["load=1", "first-byte=0.5"])
    assert (knobs.load, knobs.ka, knobs.first_byte) == (1, 2, 0.5)


def test_every_default_can_be_read_and_every_knob_is_typed() -> None:
    knobs = parse({}, [])
    assert set(type(knobs).__annotations__) == set(KNOBS)
    assert knobs.load == 0


def test_starts_gives_each_start_its_own_value(tmp_path: Path) -> None:
    env = {"FAKE_LLAMA": f"starts={tmp_path / 'n'} load=20|1 line=a|b|c"}
    read = [parse(env, []) for _ in range(3)]
    assert [knobs.load for knobs in read] == [20, 1, 1]
    assert [knobs.line for knobs in read] == ["a", "b", "c"]
    with pytest.raises(KnobError):
        parse({"FAKE_LLAMA": "load=20|1"}, [])


def test_a_start_that_only_prints_is_not_counted(fake_llama: str, tmp_path: Path) -> None:
    knobs = f"starts={tmp_path / 'n'} version=first|second"
    for _ in range(2):
        assert run(fake_llama, "--version", knobs=knobs).stderr.startswith("first\n")
    assert not (tmp_path / "n").exists()


def test_knobs_are_flags_too(fake: Fake) -> None:
    llama = fake("", "--fake-version", "mine", "--fake-text=hello").ready()
    assert llama.complete("x", n_predict=2)["content"] == "hello"


def test_load_and_its_lines(fake: Fake) -> None:
    llama = fake("load=0.4 lines=0.1 line='downloading {percent} %'")
    until(lambda: llama.health() == 503, "the loading state")
    llama.ready()
    assert [e["event"] for e in llama.record("loaded")] == ["loaded"]
    assert llama.log.count("downloading ") >= 3


def test_the_first_requests_pay_extra(fake: Fake) -> None:
    llama = fake("first=0.3:2").ready()
    ms = [llama.complete("x")["timings"]["prompt_ms"] for _ in range(3)]
    assert [took >= 300 for took in ms] == [True, True, False]
    replies = llama.record("reply")
    assert replies[0]["seconds"] >= 0.3


@pytest.mark.parametrize(
    ("how", "code"), [("", 1), (":7", 7), (":SEGV", -signal.SIGSEGV), (":KILL", -signal.SIGKILL)]
)
def test_it_dies_while_loading(fake: Fake, how: str, code: int) -> None:
    llama = fake(f"load=0.1 dead_at=load{how} last='out of memory, it seems'")
    assert llama.wait() == code
    assert "out of memory, it seems" in llama.log
    assert "model loaded" not in llama.log


def test_it_dies_at_health_after_seconds_and_at_a_request(fake: Fake) -> None:
    at_health = fake("dead_at=health:3")
    until(lambda: at_health.health() == 0 and at_health.process.poll() is not None, "its end")
    assert at_health.wait() == 3
    assert fake("dead_at=0.2s:ABRT").wait() == -signal.SIGABRT
    llama = fake("dead_at=req2:9").ready()
    llama.complete("x")
    with pytest.raises(httpx.TransportError):
        llama.complete("x")
    assert llama.wait() == 9


def test_it_dies_in_the_middle_of_a_stream(fake: Fake) -> None:
    llama = fake("dead_at=req1/chunk5:KILL").ready()
    with llama.open_stream("/completion", {"prompt": "x", "n_predict": 50}) as sock:
        answer = b"".join(received(sock))
    assert answer.count(b"data: ") == 5
    assert not answer.endswith(b"0\r\n\r\n")
    assert llama.wait() == -signal.SIGKILL


def test_it_hangs_at_a_request_and_health_stays(fake: Fake) -> None:
    llama = fake("hang_at=req2").ready()
    llama.complete("x")
    with pytest.raises(httpx.ReadTimeout):
        llama.post("/completion", {"prompt": "x"}, timeout=0.2)
    with pytest.raises(httpx.ReadTimeout):
        llama.post("/v1/chat/completions", {"messages": []}, timeout=0.2)
    assert llama.health() == 200
    assert llama.get("/slots").status_code == 200


def test_it_hangs_in_a_stream_with_its_slot_busy(fake: Fake) -> None:
    llama = fake("hang_at=req1/chunk3").ready()
    sock = llama.open_stream("/completion", {"prompt": "x", "n_predict": 50})
    seen = b""
    for part in received(sock):
        seen += part
        if seen.count(b"data: ") == 3:
            break
    sock.close()
    until(lambda: llama.record("gone"), "the record of the client that left")
    assert llama.busy() == 1
    assert llama.health() == 200


def test_it_hangs_as_a_whole_or_while_loading(fake: Fake) -> None:
    llama = fake("hang_at=0.3s:all").ready()
    until(lambda: llama.record("hangs"), "the hang")
    with pytest.raises(httpx.ReadTimeout):
        llama.get("/health", timeout=0.2)
    loading = fake("load=0.05 hang_at=load")
    until(lambda: loading.record("hangs"), "the hang")
    assert loading.health() == 503
    assert loading.process.poll() is None


@pytest.mark.parametrize(("term", "ignored"), [("obey", 0), ("2", 2), ("ignore", 4)])
def test_term_is_obeyed_or_ignored(fake: Fake, term: str, ignored: int) -> None:
    llama = fake(f"term={term}").ready()
    for sent in range(1, ignored + 1):
        llama.process.terminate()
        until(lambda n=sent: len(llama.record("signal")) == n, "the signal")  # type: ignore[misc]
        assert llama.process.poll() is None
    if term != "ignore":
        llama.process.terminate()
        assert llama.wait() == 0


def test_term_while_loading_is_death_by_the_signal(fake: Fake) -> None:
    llama = fake("load=60")
    until(lambda: llama.health() == 503, "the loading state")
    llama.process.terminate()
    assert llama.wait() == -signal.SIGTERM
    stubborn = fake("load=60 term=ignore")
    until(lambda: stubborn.health() == 503, "the loading state")
    stubborn.process.terminate()
    until(lambda: stubborn.record("signal"), "the signal")
    assert stubborn.process.poll() is None


@pytest.mark.parametrize("kind", ["group", "setsid", "stubborn"])
def test_a_grandchild_stays_behind_with_the_pipes(fake: Fake, kind: str) -> None:
    llama = fake(f"fork={kind}").ready()
    grandchild = llama.record("fork")[0]["grandchild"]
    try:
        assert (os.getpgid(grandchild) == os.getpgid(llama.process.pid)) == (kind != "setsid")
        assert Path(f"/proc/{grandchild}/fd/2").readlink().suffix == ".log"
        llama.process.terminate()
        assert llama.wait() == 0
        assert not gone(grandchild)
    finally:
        os.kill(grandchild, signal.SIGKILL)
        until(lambda: gone(grandchild), "the grandchild's end")


def test_noise_comes_at_the_rate_asked_for(fake: Fake) -> None:
    llama = fake("noise=1000000").ready()
    until(lambda: len(llama.log) > 300_000, "the noise")
    assert llama.complete("x")["stop"] is True


def test_a_log_that_nobody_reads_stops_the_server(fake_llama: str, tmp_path: Path) -> None:
    llama = Llama.__new__(Llama)
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "FAKE_LLAMA": "noise=5000000"}
    command = [fake_llama, "-m", str(model), "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=env) as process:
        llama.url = f"http://127.0.0.1:{port}"
        try:
            until(lambda: llama.health() == 200, "the server")
            until(lambda: not answers(llama.url), "the server to block")
            assert process.stderr is not None
            process.stderr.read(65536)
        finally:
            process.kill()


@pytest.mark.parametrize("cut", ["1", "7", "char", "join3"])
def test_streams_are_cut_where_asked_and_stay_the_same(fake: Fake, cut: str) -> None:
    whole = fake("text=unicode").ready()
    llama = fake(f"text=unicode chunks={cut}").ready()
    body = {"prompt": "x", "n_predict": 40}
    text = whole.post("/completion", {**body, "stream": True}).text
    with llama.open_stream("/completion", body) as sock:
        raw = b"".join(received(sock)).partition(b"\r\n\r\n")[2]
    parts = []
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        parts.append(raw[: int(size, 16)])
        raw = raw[int(size, 16) + 2 :]
    assert [e["content"] for e in frames(b"".join(parts).decode())] == [
        e["content"] for e in frames(text)
    ]
    inside = sum("\ufffd" in part.decode(errors="replace") for part in parts)
    if cut == "char":
        assert inside > 20
    if cut.isdecimal():
        assert max(map(len, parts)) == int(cut)
    if cut == "join3":
        assert parts[0].count(b"data: ") == 3


def test_the_unicode_text_has_characters_of_all_widths(fake: Fake) -> None:
    content = fake("text=unicode").ready().complete("x", n_predict=150)["content"]
    assert {len(char.encode()) for char in content} == {1, 2, 3, 4}


def test_requests_fail_as_asked(fake: Fake) -> None:
    body = '{\\"error\\":{\\"message\\":\\"mine\\"}}'
    llama = fake(f'fail="400@1;503@2:{body};500@4+:Compute error."').ready()
    answers = [llama.post("/completion", {"prompt": "x", "n_predict": 1}) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [400, 503, 200, 500, 500]
    assert answers[1].json() == {"error": {"message": "mine"}}
    assert answers[3].json()["error"]["message"] == "Compute error."
    assert llama.health() == 200


def test_a_stream_fails_after_its_head(fake: Fake) -> None:
    llama = fake('fail="stream@1:Compute error.;format@2-3"').ready()
    first = frames(llama.post("/completion", {"prompt": "x", "stream": True}).text)
    assert first[-1]["error"]["message"] == "Compute error."
    assert len(first) == 2
    second = frames(llama.post("/completion", {"prompt": "x", "stream": True}).text)
    assert "does not match the expected Content-only format" in second[-1]["error"]["message"]
    assert len(second) > 10
    third = llama.post("/completion", {"prompt": "x"})
    assert third.status_code == 500
    assert "does not match the expected" in third.json()["error"]["message"]


def test_connections_are_reset_or_cut(fake: Fake) -> None:
    llama = fake('fail="reset@1;cut@2"').ready()
    with pytest.raises(httpx.ReadError):
        llama.post("/completion", {"prompt": "x"})
    with pytest.raises(httpx.RemoteProtocolError):
        llama.post("/completion", {"prompt": "x", "stream": True})


def test_idle_connections_end_when_asked(fake: Fake) -> None:
    llama = fake("ka=0.2").ready()
    with socket.create_connection(("127.0.0.1", llama.port), timeout=20) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b'"ok"' in b"".join(received(sock))
    at_once = fake("ka=0").ready()
    assert at_once.get("/health").headers["connection"] == "close"


def test_devices_and_layers_are_told(fake_llama: str, fake: Fake) -> None:
    listed = "HRX0: AMD (98304 MiB, 9 MiB free); Vulkan0: other (2048 MiB, 2048 MiB free)"
    done = run(fake_llama, "--list-devices", knobs=f"devices='{listed}'")
    assert done.stdout == (
        "Available devices:\n  HRX0: AMD (98304 MiB, 9 MiB free)\n"
        "  Vulkan0: other (2048 MiB, 2048 MiB free)\n"
    )
    llama = fake(f"devices='{listed}' layers=0/33", "--device", "HRX0", "-lv", "4").ready()
    assert "offloaded 0/33 layers to GPU" in llama.log
    assert "HRX0: AMD" in run(fake_llama, "--list-devices", knobs="model=hrx").stdout


def test_health_can_be_slow(fake: Fake) -> None:
    llama = fake("health_delay=0.3").ready()
    with pytest.raises(httpx.ReadTimeout):
        llama.get("/health", timeout=0.1)
    assert llama.get("/props", timeout=20).status_code == 200


def test_a_busy_port_can_be_played(fake: Fake, tmp_path: Path) -> None:
    knobs = f"starts={tmp_path / 'n'} busy_port=1|0"
    first = fake(knobs)
    assert first.wait() == 1
    assert "couldn't bind HTTP server socket" in first.log
    assert fake(knobs).ready().health() == 200


def test_garbage_comes_always_or_only_streamed_and_later(fake: Fake) -> None:
    good = fake().ready().complete("x", n_predict=20)["content"]
    assert good.isascii()
    assert not fake("garbage=1").ready().complete("x", n_predict=20)["content"].isascii()
    llama = fake("garbage=stream@3").ready()
    body = {"prompt": "x", "n_predict": 20, "stream": True}
    streams = [frames(llama.post("/completion", body).text) for _ in range(3)]
    texts = ["".join(event["content"] for event in events) for events in streams]
    assert [text == good for text in texts] == [True, True, False]
    assert llama.complete("x", n_predict=20)["content"] == good


@pytest.mark.parametrize(
    ("knobs", "stream", "freed"),
    [
        ("", False, True),
        ("", True, True),
        ("build=0.6.0", False, False),
        ("build=0.6.0", True, True),
        ("cancel=never", True, False),
    ],
)
def test_a_client_that_leaves_is_noticed_or_not(
    fake: Fake, knobs: str, *, stream: bool, freed: bool
) -> None:
    llama = fake(f"tps=50 {knobs}").ready()
    body = {"prompt": "x", "n_predict": 100_000 if freed else 60, "stream": stream}
    sock = llama.open_stream("/completion", body)
    until(lambda: llama.busy() == 1, "a busy slot")
    sock.close()
    until(lambda: llama.record("gone"), "the record of the client that left")
    if freed:
        until(lambda: llama.busy() == 0, "the slot to be free")
    until(lambda: llama.record("reply"), "the end of the request")
    made = llama.record("reply")[0]["tokens"]
    assert (made < 60) == freed


def test_answers_can_be_late_and_paced(fake: Fake) -> None:
    llama = fake("first_byte=0.3 tps=100").ready()
    begun = time.monotonic()
    timings = llama.complete("x", n_predict=21)["timings"]
    assert time.monotonic() - begun >= 0.5
    assert timings["predicted_ms"] == pytest.approx(200)
    slow = fake("pps=100").ready()
    begun = time.monotonic()
    assert slow.complete([100] * 30)["timings"]["prompt_ms"] == pytest.approx(300)
    assert time.monotonic() - begun >= 0.3


def test_memory_comes_back_some_time_after_the_other_ended(fake: Fake, tmp_path: Path) -> None:
    knobs = f"refuse=0.5:{tmp_path / 'memory'}"
    first = fake(knobs).ready()
    second = fake(knobs)
    assert second.wait() == 1
    assert "failed to allocate" in second.log
    assert "exiting due to model loading error" in second.log
    first.process.kill()
    first.wait()
    assert fake(knobs).wait() == 1

    def starts() -> bool:
        third = fake(knobs)
        until(lambda: third.process.poll() is not None or third.health() == 200, "a start")
        return third.process.poll() is None

    until(starts, "the memory to come back")


def test_version_text_and_build_are_told(fake_llama: str, fake: Fake) -> None:
    assert run(fake_llama, "--version", knobs="version='version: 9'").stderr.startswith(
        "version: 9\n"
    )
    assert "86a2835" in run(fake_llama, "--version", knobs="build=0.6.0").stderr
    llama = fake("build=0.6.0", "--api-key", "k").ready()
    assert llama.get("/v1/models").status_code == 401


def test_the_record_tells_what_was_sent(fake: Fake) -> None:
    llama = fake("", "--bogus", "3", "-a", "pub", environment={"LLAMA_API_KEY": "secret-word"})
    until(lambda: llama.health() == 200, "the server")
    key = {"Authorization": "Bearer secret-word"}
    body = {"prompt": "äx", "n_predict": 1}
    llama.post("/completion", body, headers=key)
    big = {"prompt": "x", "n_predict": 1, "pad": "y" * 100_000}
    llama.post("/completion", big, headers=key)
    (started,) = llama.record("start")
    assert started["unknown"] == ["--bogus", "3"]
    assert started["argv"][-2:] == ["-a", "pub"]
    assert started["descriptors"] == [0, 1, 2]
    assert started["environment"]["LLAMA_API_KEY"] == "..."
    requests = [r for r in llama.record("request") if r["work"]]
    assert [r["work"] for r in requests] == [1, 2]
    assert json.loads(requests[0]["body"]) == body
    assert "body" not in requests[1]
    assert requests[1]["body_bytes"] > 100_000
    assert len(requests[1]["body_sha256"]) == 64
    assert any(line.lower().startswith("content-length") for line in requests[0]["headers"])
    llama.client.close()
    until(lambda: llama.record("closed"), "the record of the connection's end")


def test_the_page_can_be_missing(fake: Fake) -> None:
    assert "<!doctype html>" in fake().ready().get("/").text
    assert fake("page=0").ready().get("/").status_code == 404


@pytest.mark.parametrize("kind", ["chatml", "date", "ignore", "think"])
def test_templates_can_be_awkward(fake: Fake, kind: str) -> None:
    llama = fake(f"template={kind}").ready()

    def rendered(said: str, **more: object) -> str:
        body = {"messages": [{"role": "user", "content": said}], **more}
        return str(llama.post("/apply-template", body).json()["prompt"])

    assert (rendered("a") == rendered("b")) == (kind == "ignore")
    assert (rendered("a") == rendered("a")) == (kind != "date")
    quiet = rendered("a", chat_template_kwargs={"enable_thinking": False})
    assert ("<think>" in quiet) == (kind == "think")


def test_embeddings_and_reranking_have_modes_of_their_own(fake: Fake) -> None:
    llama = fake("", "--embeddings").ready()
    data = llama.post("/v1/embeddings", {"input": ["a", "b"]}).json()["data"]
    assert [len(entry["embedding"]) for entry in data] == [64, 64]
    packed = llama.post("/v1/embeddings", {"input": "a", "encoding_format": "base64"}).json()
    assert isinstance(packed["data"][0]["embedding"], str)
    assert llama.post("/completion", {"prompt": "x"}).status_code == 500
    too_long = llama.post("/v1/embeddings", {"input": "Z" * 600})
    assert too_long.status_code == 500
    assert "(601 tokens) is too large to process" in too_long.json()["error"]["message"]
    rerank = fake("", "--reranking").ready()
    body = {"query": "red car", "documents": ["a blue boat", "a red car"]}
    results = rerank.post("/v1/rerank", body).json()["results"]
    assert [result["index"] for result in results] == [1, 0]


def test_an_unlimited_answer_ends_by_itself(fake: Fake) -> None:
    llama = fake("reply=7").ready()
    answer = llama.post("/completion", {"prompt": "x"}).json()
    assert (answer["tokens_predicted"], answer["stop_type"]) == (7, "eos")
    stopped = llama.complete("x", n_predict=40, stop=["the"])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", "the")
    assert "the" not in stopped["content"]


def test_the_context_of_the_model_can_be_set(fake: Fake) -> None:
    llama = fake("ctx_train=2048", "-np", "1").ready()
    assert llama.get("/props").json()["default_generation_settings"]["n_ctx"] == 2048


def test_values_of_a_wrong_type_are_400(fake: Fake) -> None:
    llama = fake().ready()
    for body in ({"prompt": "x", "n_predict": "many"}, {"prompt": "x", "id_slot": {}}):
        assert llama.post("/completion", body).status_code == 400
    assert llama.complete("x")["stop"] is True


def test_who_waits_for_a_slot_gets_it_or_may_leave(fake: Fake) -> None:
    llama = fake("tps=20", "-np", "1").ready()
    body = {"prompt": "x", "n_predict": 100_000}
    first, second = (llama.open_stream("/completion", body) for _ in range(2))
    until(lambda: len([r for r in llama.record("request") if r["work"]]) == 2, "both requests")
    second.close()
    until(lambda: llama.record("gone"), "the one that left")
    third = llama.open_stream("/completion", {"prompt": "x", "n_predict": 1})
    first.close()
    assert b'"stop":true' in b"".join(received(third))
    third.close()


def test_the_manual_lists_every_knob_and_no_other() -> None:
    manual = Path(__file__).parents[2] / "docs" / "fake-backend.md"
    table = manual.read_text().partition("## Knobs")[2].partition("## The cost model")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name.strip(" `") for row in rows for name in row.split(",")}
    assert named == set(KNOBS)


def test_it_imports_nothing_heavy() -> None:
    """Starting it many times is what it is for; these cost more than all of its own modules."""
    code = "import sys, onebit_serve.fake_llama; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    heavy = {"asyncio", "dataclasses", "subprocess", "argparse", "http.client", "hashlib", "trio"}
    assert not heavy & set(loaded.stdout.split())
