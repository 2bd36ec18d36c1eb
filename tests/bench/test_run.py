from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
import trio
from tiny_server import TinyServer

from onebit_serve.bench import client, run, surroundings
from onebit_serve.core import prompts
from onebit_serve.core.errors import OnebitError

TIMINGS = {
    "cache_n": 4,
    "prompt_n": 6,
    "prompt_ms": 2.0,
    "prompt_per_second": 3000.0,
    "predicted_n": 3,
    "predicted_per_second": 50.0,
}
USAGE = {"prompt_tokens": 10, "completion_tokens": 3}


def settings(**more):
    fields = {"prompts": "short", "conversations": prompts.built_in("short"), "repeats": 2}
    return run.Settings(**(fields | more))


async def measured(server, wanted, load=1, **targets):
    where = await client.resolve(client.endpoint(server.url))
    recorder = run.Recorder(run.new_run("a", server.url, load=load))
    with trio.fail_after(20):
        await run.measure(wanted, {"door": where, **targets}, recorder, hash_files=False)
    return recorder


async def test_every_cell_gets_its_waves_and_every_request_its_place():
    with TinyServer(timings=TIMINGS) as server:
        recorder = await measured(server, settings(concurrency=(1, 3)))
    places = [(r.concurrency, r.repeat, r.stream) for r in recorder.requests]
    assert sorted(places) == [(1, 1, 1), (1, 2, 1)] + [
        (3, repeat, stream) for repeat in (1, 2) for stream in (1, 2, 3)
    ]
    assert {r.model for r in recorder.requests} == {"tiny"}
    assert recorder.run.complete
    assert recorder.run.settings["models"] == ["tiny"]


async def test_a_wave_waits_for_the_one_before():
    inside, most = 0, 0
    with TinyServer(first_s=0.02) as server:
        chat = server._chat

        def counted(connection):
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            chat(connection)
            inside -= 1

        server._chat = counted
        await measured(server, settings(concurrency=(2,), repeats=3))
    assert most == 2


async def test_the_request_is_what_the_settings_say():
    with TinyServer() as server:
        await measured(server, settings(max_tokens=7, system="Be brief.", seed=5, repeats=1))
    (body,) = server.bodies
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0, 5, 7)
    assert (body["stream"], body["model"]) == (True, "tiny")
    assert not {"cache_prompt", "ignore_eos"} & set(body)


async def test_llama_servers_own_settings_are_sent_when_asked_for():
    with TinyServer() as server:
        await measured(server, settings(cache_prompt=False, ignore_eos=True, repeats=1))
    assert (server.bodies[0]["cache_prompt"], server.bodies[0]["ignore_eos"]) == (False, True)


@pytest.mark.parametrize(("unique", "different"), [(True, 4), (False, 1)])
async def test_prompts_are_unique_unless_asked_otherwise(unique, different):
    with TinyServer() as server:
        await measured(server, settings(unique=unique, concurrency=(2,)))
    sent = {body["messages"][-1]["content"] for body in server.bodies}
    assert len(sent) == different


async def test_conversations_of_a_file_are_taken_in_turn_alike_in_every_cell_and_target():
    wanted = settings(
        conversations=prompts.parse('["a", "b", "c"]', name="p"), concurrency=(1, 2), repeats=4
    )
    with TinyServer() as door, TinyServer() as beside:
        direct = await client.resolve(client.endpoint(beside.url))
        await measured(door, wanted, direct=direct)
    for server in (door, beside):
        sent = [body["messages"][0]["content"].rpartition(" ")[2] for body in server.bodies]
        assert sent[:4] == ["a", "b", "c", "a"]
        waves = ["".join(sorted(sent[at : at + 2])) for at in range(4, len(sent), 2)]
        assert waves == ["ab", "ac", "bc", "ab"]


async def test_rates_are_the_backends_where_it_gives_them():
    with TinyServer(timings=TIMINGS, usage=USAGE) as server:
        recorder = await measured(server, settings(repeats=1))
    (request,) = recorder.requests
    assert (request.rates_by, request.prefill_tok_s, request.decode_tok_s) == ("backend", 3000, 50)
    assert (request.prompt_tokens, request.cached_tokens, request.output_tokens) == (10, 4, 3)
    assert request.wait_ms == pytest.approx(max(0, request.ttft_ms - 2), abs=0.01)


async def test_rates_are_the_clients_where_the_backend_is_silent():
    with TinyServer(usage=USAGE, first_s=0.01, gap_s=0.01) as server:
        recorder = await measured(server, settings(repeats=1))
    (request,) = recorder.requests
    assert (request.rates_by, request.wait_ms) == ("client", None)
    assert request.prefill_tok_s == pytest.approx(10 / request.ttft_ms * 1000, rel=0.01)
    assert request.decode_tok_s == pytest.approx(1000 / request.tpot_ms, rel=0.01)


async def test_without_any_counts_events_with_text_are_tokens():
    with TinyServer() as server:
        recorder = await measured(server, settings(repeats=1))
    (request,) = recorder.requests
    assert (request.output_tokens, request.prompt_tokens, request.prefill_tok_s) == (3, None, None)


def test_one_token_has_no_decode_rate():
    seen = client.Stream(began_s=0.0, first_s=0.5, last_s=0.5, end_s=0.6, texts=1, finished=True)
    seen.timings = client.Timings(
        prompt_n=5, prompt_ms=1.0, prompt_per_second=5000.0, predicted_n=1, predicted_per_second=1e6
    )
    numbers = run.numbers_of(seen)
    assert (numbers["decode_tok_s"], numbers["tpot_ms"], numbers["ttft_ms"]) == (None, None, 500)


def test_texts_that_came_in_one_piece_have_no_time_between_them():
    seen = client.Stream(began_s=0.0, first_s=0.5, last_s=0.5, end_s=0.6, texts=3, finished=True)
    numbers = run.numbers_of(seen)
    assert (numbers["tpot_ms"], numbers["decode_tok_s"]) == (None, None)


async def test_no_first_text_is_seen_before_the_server_sends_it():
    sent_s = []
    with TinyServer(texts=["", "x", "y"], first_s=0.01) as server:
        event = server._event

        def recorded(connection, value):
            if value["choices"][0]["delta"].get("content") == "x":
                sent_s.append(time.perf_counter())
            event(connection, value)

        server._event = recorded
        where = await client.resolve(client.endpoint(server.url))
        seen = [await client.stream(where, "/v1/chat/completions", b"{}") for _ in range(5)]
    for one, sent in zip(seen, sent_s, strict=True):
        assert one.began_s + 0.01 <= sent <= one.first_s


async def test_a_server_that_goes_away_ends_the_run_and_keeps_what_there_is():
    with TinyServer(die_after=2) as server:
        where = await client.resolve(client.endpoint(server.url))
        recorder = run.Recorder(run.new_run("a", server.url))
        with pytest.raises(OnebitError, match=r"went away in wave 3 .*refused") as caught:
            await run.measure(settings(repeats=9), {"door": where}, recorder)
    assert caught.value.exit_code == 1
    assert [r.error for r in recorder.requests] == ["", "", "refused"]
    assert not recorder.run.complete
    assert "went away" in recorder.run.note
    assert recorder.run.usage


async def test_a_cell_without_a_success_ends_the_run_with_the_servers_words():
    with TinyServer(fault="status") as server:
        with pytest.raises(OnebitError, match=r"no request succeeded .*http 503: Loading model"):
            await measured(server, settings(concurrency=(1, 2)))
        assert len(server.bodies) == 2


async def test_a_request_past_its_limit_is_a_timeout():
    with TinyServer(first_s=5) as server:
        with pytest.raises(OnebitError, match=r"timeout: no end after 0\.02 s"):
            await measured(server, settings(limit_s=0.02, repeats=1))
        server._threads.clear()  # it still sleeps; nobody needs to wait for it


@pytest.mark.parametrize("load", [1, 2])
async def test_two_targets_take_turns_from_wave_to_wave_and_from_load_to_load(load):
    with TinyServer() as door, TinyServer() as beside:
        direct = await client.resolve(client.endpoint(beside.url))
        recorder = await measured(door, settings(repeats=3), load=load, direct=direct)
    order = ["door", "direct", "direct", "door"] * 2
    start = 2 * (load - 1)
    assert [r.target for r in recorder.requests] == order[start : start + 6]


async def test_each_target_needs_a_success():
    with TinyServer() as door, TinyServer(fault="cut") as beside:
        direct = await client.resolve(client.endpoint(beside.url))
        with pytest.raises(OnebitError, match="no request succeeded by the way `direct`"):
            await measured(door, settings(), direct=direct)


async def test_tokens_are_counted_without_running_the_model_and_not_when_told_not_to():
    routes = {
        "/v1/models": {"data": [{"id": "tiny"}]},
        "/apply-template": {"prompt": "p"},
        "/tokenize": {"tokens": [1, 2, 3]},
    }
    with TinyServer(routes=routes) as server:
        counted = await measured(server, settings(repeats=1))
        asked = len([h for h in server.heads if "/tokenize" in h])
        skipped = await measured(server, settings(repeats=1, count_tokens=False))
        assert len([h for h in server.heads if "/tokenize" in h]) == asked == 1
    assert counted.run.settings["prompt_tokens"] == [3]
    assert "prompt_tokens" not in skipped.run.settings
    assert len(server.bodies) == 2


async def test_what_is_stored_says_all_but_the_texts():
    stored = settings(system="x" * 50, system_name="s.txt").stored()
    assert stored["system"] == "s.txt, 50 characters"
    assert (stored["temperature"], stored["conversations"]) == (0, 1)
    assert json.loads(json.dumps(stored)) == stored


def test_what_is_stored_tells_other_texts_of_the_same_name_and_length_apart():
    def hashes(text, system):
        asked = settings(conversations=prompts.parse(json.dumps([text]), name="p"), system=system)
        return [v for key, v in asked.stored().items() if key.endswith("_sha256")]

    one, other = hashes("a", "s"), hashes("b", "t")
    assert hashes("a", "s") == one
    assert not set(one) & set(other)
    assert hashes("a", "")[1] == ""


@pytest.mark.parametrize("local", [True, False])
async def test_only_a_model_of_this_machine_is_hashed(tmp_path, monkeypatch, local):
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    routes = {"/v1/models": {"data": [{"id": "m"}]}, "/props": {"model_path": str(model)}}
    monkeypatch.setattr(surroundings, "is_local", lambda _where: local)
    monkeypatch.setattr(surroundings, "find_server", lambda _where: None)
    with TinyServer(routes=routes) as server:
        where = await client.resolve(client.endpoint(server.url))
        recorder = run.Recorder(run.new_run("a", server.url))
        await run.measure(settings(repeats=1), {"door": where}, recorder)
    assert ("model" in recorder.run.files) == local


async def test_embedding_models_are_not_asked_to_chat():
    models = {"data": [{"id": "e", "role": "embedding"}, {"id": "c", "role": "chat"}]}
    with TinyServer(routes={"/v1/models": models}) as server:
        recorder = await measured(server, settings(repeats=1))
    assert recorder.requests[0].model == "c"


async def test_local_processes_are_found_and_their_use_is_kept():
    with TinyServer() as server:
        where = await client.resolve(client.endpoint(server.url))
        found = surroundings.find_server(where)
        assert found.pid == os.getpid()
        recorder = await measured(server, settings(repeats=1))
    (usage, *_) = recorder.run.usage
    assert usage.cell == "tiny short x1"
    assert usage.rss_bytes > 1024**2
    assert usage.wall_s > 0


def test_a_remote_server_has_no_local_process():
    where = client.Endpoint(host="192.0.2.1", port=80, address=("192.0.2.1", 80), family=2)
    assert surroundings.find_server(where) is None


def test_a_process_that_ended_leaves_what_was_seen():
    child = psutil.Popen(["sleep", "60"])
    watch = surroundings.Watch(psutil.Process(child.pid))
    watch.start()
    child.kill()
    child.wait()
    assert [use.pid for use in watch.finish("cell")] == [os.getpid(), child.pid]


def test_backends_are_told_from_what_else_a_supervisor_started():
    children = [psutil.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        watch = surroundings.Watch(psutil.Process(), [children[0].pid])
        watch.start()
        roles = {use.pid: use.role for use in watch.finish("cell")}
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [roles[child.pid] for child in children] == ["backend", "helper"]
    assert [process.pid for process in watch.backends] == [children[0].pid]


def test_a_backend_that_starts_within_a_cell_begins_with_nothing_used():
    watch = surroundings.Watch(psutil.Process(), [1])
    watch.start()
    busy = "x = sum(range(10**7)); print(x, flush=True); import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            watch.tell([child.pid])
            (use,) = (use for use in watch.finish("cell") if use.pid == child.pid)
        finally:
            child.kill()
    assert use.role == "backend"
    assert use.cpu_s > 0


async def test_backends_that_started_meanwhile_are_asked_for():
    backends = [{"name": "a", "port": 5, "pid": 6}, {"name": "b", "port": None, "pid": None}]
    with TinyServer(routes={"/v1/status": {"backends": backends}}) as server:
        where = await client.resolve(client.endpoint(server.url))
        assert await surroundings.backend_pids(where) == {6}


def test_files_are_hashed_and_missing_ones_are_left_out(tmp_path):
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    watch = surroundings.Watch(None)
    assert surroundings.files_of(watch, str(tmp_path / "none")) == {}
    found = surroundings.files_of(watch, str(model))["model"]
    assert found["size_bytes"] == 4
    assert found["sha256"].startswith("b83633aa")
    assert found["sha256_of"] == "whole file"


@pytest.mark.parametrize(
    ("status", "ports"),
    [
        ({"backends": [{"port": 1, "pid": 2}, {"port": None}, {"name": "x"}]}, [(1, 2)]),
        ({"backends": {"a": {"port": 5}}}, [(5, None)]),
        ({"backends": 3}, []),
        ([], []),
        (None, []),
    ],
)
def test_backend_ports_are_read_as_far_as_they_are_there(status, ports):
    assert surroundings.backend_ports(surroundings.backends_of(status)) == ports


def test_the_machine_and_the_versions_are_named():
    assert surroundings.machine()["memory_bytes"] > 0
    assert surroundings.versions()["python"].startswith("3.")
