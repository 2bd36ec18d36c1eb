"""Warm prompts in a running `1bit serve`: ready, used, pushed out, cleared, killed, reloaded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading

import httpx
import pytest
from front_door import Front
from llama_process import DEADLINE_S, until

from onebit_serve.cli import main
from onebit_serve.cli.prepare import prepare
from onebit_serve.core.errors import UsageError

ONE = "You review Rust code. Answer in the language of the question, and be brief. " * 6
TWO = "Translate manuals from German into English, and keep all of their numbers. " * 6
OTHER = "Another system prompt altogether, which nobody has warmed before it came. " * 6
PATH = "/v1/chat/completions"
DONE = "warm-up done (strict-prefix):"


def ask(text, system=ONE, **more):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 2, "temperature": 0, **more}


def write(folder, *systems):
    file = folder / "prompts.json"
    file.write_text(json.dumps([[{"role": "system", "content": text}] for text in systems]))
    return str(file)


@pytest.fixture
def start(fake_llama, tiny_models, tmp_path):
    """Start front doors of the fake, or of a program that is named."""
    started = []

    def begin(*arguments, systems=(ONE, TWO), kind="llama", program=fake_llama, knobs=""):
        model = str(tiny_models / f"tiny-{kind}.gguf")
        file = write(tmp_path, *systems)
        words = ("-m", model, "--device=cpu", "--llama-server", program, "--warm-prompts", file)
        started.append(Front(tmp_path, *words, *arguments, knobs=knobs))
        return started[-1].ready()

    yield begin
    for front in started:
        front.stop()


def standing(front):
    return front.backend()["warm_prompts"]


def cached(front, text, system=ONE, **more):
    reply = front.post(PATH, ask(text, system, **more))
    assert reply.status_code == 200, reply.text
    return reply.json()["timings"]["cache_n"]


def wait_warm(front, lines):
    """Wait until so many warm-ups are said to be done, and all of the last is proven."""
    until(lambda: len(front.said(DONE)) >= lines, f"{lines} warm-ups in the log")
    shown = standing(front)
    assert all(entry["proven"] for entry in shown["entries"]), front.log
    return shown


def test_prompts_are_proven_before_ready_and_hits_are_counted_by_the_backends_own_count(start):
    front = start()
    lines = front.log.splitlines()
    done = next(i for i, line in enumerate(lines) if f"{DONE} 2 completed, 0 skipped" in line)
    assert done < next(i for i, line in enumerate(lines) if "ready on" in line)
    before = standing(front)
    assert before["entry_count"] == 2
    assert [entry["slots"] for entry in before["entries"]] == [[0, 2], [1, 3]]
    assert before["hits"] == 0
    assert cached(front, "hello") >= before["entries"][0]["tokens"]
    assert front.post(PATH, ask("7 times 6", TWO, stream=True)).status_code == 200
    cached(front, "hello", OTHER)
    until(lambda: standing(front)["hits"] == 2, "two hits")
    assert [entry["hits"] for entry in standing(front)["entries"]] == [1, 1]
    tokens = before["tokens"]
    page = front.client.get("/metrics").text
    assert 'onebit_warm_prompts_entry_count{backend="cpu"} 2' in page
    assert 'onebit_warm_prompts_hits_total{backend="cpu"} 2' in page
    assert f'onebit_warm_prompts_tokens_saved_total{{backend="cpu"}} {tokens}' in page
    assert 'onebit_requests_total{backend="cpu",outcome="answered"} 3' in page


def test_replies_that_are_put_together_from_streams_count_too(start):
    front = start(knobs="build=0.6.0", systems=(ONE,))  # a build that misses departures
    bodies = [
        json.loads(entry["body"]) for entry in front.requests() if entry["path"] == "/completion"
    ]
    assert bodies
    assert all(body["stream"] for body in bodies)  # so that a client who comes can cancel them
    assert cached(front, "hello") >= standing(front)["tokens"]
    until(lambda: standing(front)["hits"] == 1, "the hit")


def test_what_other_traffic_pushed_out_is_put_back_while_idle(start):
    front = start("-np", "1", "-cram", "0", systems=(ONE,))
    cached(front, "hello", OTHER)
    tokens = standing(front)["tokens"]
    assert cached(front, "first") < tokens
    cached(front, "hello", OTHER)  # what the first request left is pushed out again
    front.wait_said("put back while idle: warm prompt entry 1")
    assert standing(front)["entries"][0]["evicted"] is False
    assert cached(front, "second") >= tokens - 1


@pytest.mark.parametrize("query", ["", "?full=1"])
def test_a_clearing_under_load_fails_no_request_and_is_followed_by_a_warm_up(start, query):
    front = start()
    pid = front.backend()["pid"]
    stop, answers = threading.Event(), []

    def load(number):
        with httpx.Client(trust_env=False, timeout=DEADLINE_S) as client:
            while not stop.is_set():
                body = ask(f"{number} and {len(answers)}")
                answers.append(client.post(front.url + PATH, json=body).status_code)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(answers) > 5, "some traffic")
        reply = front.client.delete(f"/v1/cache/prefix{query}")
        assert reply.status_code == 200
        scope = "all" if query else "slots"
        wanted = {"status": "cleared", "rewarm_scheduled": True, "scope": scope}
        assert reply.json() == wanted
        wait_warm(front, 2)
        seen = len(answers)
        until(lambda: len(answers) > seen + 5, "more traffic")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(answers) == {200}
    assert (front.backend()["pid"] == pid) is (not query)
    assert not front.said("is not warm")


def test_what_was_not_reached_in_time_is_warmed_before_any_client_comes(start, tmp_path):
    config = tmp_path / "serve.toml"
    config.write_text("[warmup]\ndeadline_s = 1\n")
    slow = ("--config", str(config), "--warm-prompts-concurrency", "1")
    front = start(*slow, systems=(ONE, ONE + TWO), knobs="first_byte=0.4")
    front.wait_said("not reached within 1 s (deadline_s)")
    front.wait_said("put back while idle: warm prompt")
    until(lambda: standing(front)["entry_count"] == 2, "both")
    first, second = (set(entry["slots"]) for entry in standing(front)["entries"])
    assert not first & second


@pytest.mark.parametrize(
    ("failure", "while_idle"),
    [("500@2", False), ("reset@2", False), ("500@2-3", True)],
)
def test_failures_that_pass_leave_no_prompt_cold(start, failure, while_idle):
    front = start(knobs=f"fail={failure}")
    until(lambda: standing(front)["entry_count"] == 2, "both prompts")
    assert bool(front.said("put back while idle")) is while_idle


def test_what_load_kept_from_being_proven_is_put_back_while_idle(start):
    front = start(knobs="pps=3000 tps=200")
    stop = threading.Event()

    def load(number):
        with httpx.Client(trust_env=False, timeout=DEADLINE_S) as client:
            while not stop.is_set():
                client.post(front.url + PATH, json=ask(f"{number}", f"{number} {OTHER}"))

    threads = [threading.Thread(target=load, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        front.client.delete("/v1/cache/prefix")
        until(lambda: len(front.said(DONE)) == 2, "the warm-up behind the traffic")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    until(lambda: standing(front)["entry_count"] == 2, "both prompts")


def test_without_warm_prompts_a_clearing_empties_the_slots_all_the_same(
    fake_llama, tiny_models, tmp_path
):
    model = str(tiny_models / "tiny-llama.gguf")
    words = ("-m", model, "--device=cpu", "--llama-server", fake_llama, "-cram", "0")
    front = Front(tmp_path, *words)
    try:
        front.ready()
        cached(front, "hello")
        assert cached(front, "hello") > 20
        reply = front.client.delete("/v1/cache/prefix")
        assert reply.json()["rewarm_scheduled"] is False
        assert cached(front, "hello") < 20
        assert "warm_prompts" not in front.backend()
        assert front.client.get("/v1/cache/prefix").status_code == 405
        front.post("/v1/backends/cpu/stop")
        until(lambda: front.backend()["state"] == "stopped", "the stop")
        refused = front.client.delete("/v1/cache/prefix")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_ready")
    finally:
        front.stop()


def test_a_killed_backend_is_warm_again_before_it_is_ready_and_the_counts_go_on(start):
    front = start()
    cached(front, "hello")
    until(lambda: standing(front)["hits"] == 1, "the hit")
    os.kill(front.backend()["pid"], signal.SIGKILL)
    shown = wait_warm(front, 2)
    assert shown["hits"] == 1
    assert cached(front, "again") >= shown["entries"][0]["tokens"]


@pytest.mark.parametrize("lazy", [False, True])
def test_a_state_folder_that_somebody_removed_is_made_anew_for_the_next_child(
    start, tmp_path, lazy
):
    config = tmp_path / "serve.toml"
    config.write_text("[backend]\nlazy = true\n" if lazy else "")
    front = start("--config", str(config))
    state = tmp_path / "xdg" / "state"
    shutil.rmtree(state)
    if lazy:
        cached(front, "hello")
    else:
        os.kill(front.backend()["pid"], signal.SIGKILL)
    wait_warm(front, 1 if lazy else 2)
    assert (state / "onebit" / "slots").stat().st_mode & 0o777 == 0o700


def test_where_no_state_folder_can_be_made_the_backend_runs_without_saved_slots(start, tmp_path):
    config = tmp_path / "serve.toml"
    config.write_text("[warm_prompts]\nsave = true\n")
    front = start("--config", str(config))
    state = tmp_path / "xdg" / "state"
    shutil.rmtree(state)
    state.write_text("a file")
    os.kill(front.backend()["pid"], signal.SIGKILL)
    shown = wait_warm(front, 2)
    assert {entry["source"] for entry in shown["entries"]} == {"prefill"}
    (line,) = front.said("is started without --slot-save-path")
    assert f"cannot keep saved slots in {state}/onebit/slots: Not a directory" in line


def test_a_backend_that_starts_with_its_first_request_is_warm_for_it(start, tmp_path):
    config = tmp_path / "serve.toml"
    config.write_text("[backend]\nlazy = true\n")
    front = start("--config", str(config))
    assert not front.said(DONE)
    assert cached(front, "hello") >= standing(front)["entries"][0]["tokens"] > 0


def test_a_stopped_backend_shows_its_prompts_as_gone(start):
    front = start()
    front.post("/v1/backends/cpu/stop")
    until(lambda: front.backend()["state"] == "stopped", "the stop")
    entries = standing(front)["entries"]
    assert [entry["why"] for entry in entries] == ["its backend is not running"] * 2
    assert standing(front)["entry_count"] == 0


def test_a_reload_reads_the_file_again_and_a_bad_one_changes_nothing(start, tmp_path):
    front = start()
    write(tmp_path, ONE, TWO, OTHER)
    assert front.post("/v1/reload").status_code == 200
    assert wait_warm(front, 2)["entry_count"] == 3
    (tmp_path / "prompts.json").write_text("[[]]")
    refused = front.post("/v1/reload")
    assert refused.status_code == 400
    assert "entry 1 has no messages" in refused.json()["error"]["message"]
    (tmp_path / "prompts.json").write_text("[" * 5000)
    refused = front.post("/v1/reload")
    assert refused.status_code == 400
    assert "is not JSON" in refused.json()["error"]["message"]
    (tmp_path / "prompts.json").unlink()
    os.mkfifo(tmp_path / "prompts.json")
    refused = front.post("/v1/reload")
    assert refused.status_code == 400
    assert "not a regular file" in refused.json()["error"]["message"]
    assert standing(front)["entry_count"] == 3


def test_saved_slots_are_restored_at_the_next_start(start, tmp_path):
    config = tmp_path / "serve.toml"
    config.write_text("[warm_prompts]\nsave = true\n")
    first = start("--config", str(config))
    assert {entry["source"] for entry in standing(first)["entries"]} == {"prefill"}
    first.stop()
    folder = tmp_path / "xdg" / "state" / "onebit" / "slots"
    assert folder.stat().st_mode & 0o077 == 0
    assert len(list(folder.glob("warm-*.bin"))) == 2
    second = start("--config", str(config))
    assert {entry["source"] for entry in standing(second)["entries"]} == {"disk"}
    assert cached(second, "hello") >= standing(second)["entries"][0]["tokens"]


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_a_real_llama_server_keeps_them_too(start, real_llama_server, kind):
    front = start("-c", "8192", "-t", "1", kind=kind, program=real_llama_server)
    shown = wait_warm(front, 1)
    for text in ("hello", "7 times 6", " space", "\nline", "你好"):
        assert cached(front, text) >= shown["entries"][0]["tokens"] - 1, text
    until(lambda: standing(front)["hits"] == 5, "five hits")
    assert front.client.delete("/v1/cache/prefix").status_code == 200
    wait_warm(front, 2)
    assert cached(front, "first again", TWO) >= shown["entries"][1]["tokens"] - 1


def test_a_real_chat_model_is_served_with_its_prompt_in_the_cache(
    start, smollm2, real_llama_server
):
    one_slot = ("-m", smollm2, "-np", "1", "-c", "2048")
    front = start(*one_slot, program=real_llama_server, systems=(ONE,))
    (entry,) = wait_warm(front, 1)["entries"]
    for text in ("hello", " space", "\nline", "\ttab", "😀", '"quoted"'):
        assert cached(front, text) >= entry["tokens"] - 1, text


def test_what_a_real_llama_server_lost_in_its_sleep_is_put_back(start, real_llama_server):
    sleepy = ("-c", "4096", "-t", "1", "--sleep-idle-seconds", "1")
    front = start(*sleepy, program=real_llama_server, systems=(ONE, TWO))
    front.wait_said(DONE)
    url = "/v1/backends/cpu/logs"
    until(lambda: "entering sleeping state" in front.client.get(url).text, "its sleep")
    cached(front, "who wakes it", OTHER)
    front.wait_said("put back while idle: warm prompt entry 1, entry 2")
    slots = [slot for entry in standing(front)["entries"] for slot in entry["slots"]]
    assert sorted(slots) == [0, 1, 2, 3]
    assert cached(front, "hello", TWO) >= standing(front)["entries"][1]["tokens"] - 1


# ------------------------------------------------------------------------- without a process


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ('[[{"role": "user", "content": "hi"}], [{"role": "user"}]]', "entry 2, message 1: has"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_before_anything_starts(
    text, message, tmp_path, tiny_models, fake_llama
):
    file = tmp_path / "p.json"
    if text is not None:
        file.write_text(text)
    model = str(tiny_models / "tiny-llama.gguf")
    words = ("-m", model, "--device", "cpu", "--llama-server", fake_llama)
    with pytest.raises(UsageError, match=message) as caught:
        prepare([*words, "--warm-prompts", str(file)], os.environ)
    assert caught.value.exit_code == 2


def test_a_dry_run_tells_of_them(tmp_path, tiny_models, fake_llama, capsys):
    words = ["serve", "--dry-run", "-m", str(tiny_models / "tiny-llama.gguf"), "--device", "cpu"]
    words += ["--llama-server", fake_llama, "--warm-prompts", write(tmp_path, ONE, TWO)]
    assert main(words) == 0
    assert "prompts      2 put into the prompt cache before ready" in capsys.readouterr().out


def test_looking_at_a_plan_makes_no_folder(tmp_path, tiny_models, fake_llama):
    words = ["-m", str(tiny_models / "tiny-llama.gguf"), "--device", "cpu"]
    words += ["--llama-server", fake_llama, "--warm-prompts", write(tmp_path, ONE)]
    state = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    made = prepare(words, state)
    assert str(tmp_path / "state/onebit/slots") in made.plan.backends[0].arguments
    assert not (tmp_path / "state").exists()
    prepare(words, state, starts=True)
    assert (tmp_path / "state/onebit/slots").is_dir()
