from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import psutil
import pytest
import trio

from onebit_serve.bench import arms
from onebit_serve.bench.run import Settings
from onebit_serve.core import prompts, report
from onebit_serve.core.errors import OnebitError, UsageError

COMMAND = (sys.executable, str(Path(__file__).parent / "tiny_server.py"))


def comparison(*texts, **more):
    asked = more.pop("settings", {})
    settings = Settings(
        **({"prompts": "short", "conversations": prompts.built_in("short"), "repeats": 2} | asked)
    )
    fields = {"loads": 1, "noise": False, "command": COMMAND} | more
    return arms.Comparison(
        arms=tuple(arms.parse_arm(text) for text in texts), settings=settings, **fields
    )


async def ran(wanted):
    session = arms.Session(wanted)
    with trio.fail_after(60):
        await session.run()
    return session.results


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("cold=", arms.Arm("cold")),
        ("cold=ONEBIT_NO_WARMUP=1", arms.Arm("cold", (), {"ONEBIT_NO_WARMUP": "1"})),
        ("a=A=1 B='x y' --flag v=w", arms.Arm("a", ("--flag", "v=w"), {"A": "1", "B": "x y"})),
        ("w=--warm-prompts 'my file.json'", arms.Arm("w", ("--warm-prompts", "my file.json"))),
    ],
)
def test_an_arm_is_variables_then_flags(text, arm):
    assert arms.parse_arm(text) == arm


@pytest.mark.parametrize("text", ["cold", "=x", " =x", "a='x"])
def test_an_arm_without_a_name_or_with_open_quotes_is_refused(text):
    with pytest.raises(UsageError, match="--arm"):
        arms.parse_arm(text)


def test_arms_take_turns_in_every_place():
    three = [arms.Arm(tag) for tag in "abc"]
    orders = ["".join(arm.tag for arm in arms.order(three, load)) for load in range(1, 7)]
    assert orders == ["abc", "cba", "bca", "acb", "cab", "bac"]
    for place in range(3):
        assert sorted(order[place] for order in orders) == sorted("aabbcc")


def test_the_first_arm_is_measured_against_itself_unless_told_not_to():
    wanted = comparison("a=", "b=", noise=True)
    assert [arm.tag for arm in wanted.every_arm] == ["a", "b", "a again"]
    assert [arm.tag for arm in comparison("a=", "b=").every_arm] == ["a", "b"]


@pytest.mark.parametrize(
    ("arms", "arguments", "locks"),
    [
        (("a=",), (), ["accelerator"]),
        (("a=", "b=--no-warmup"), ("--device", "cpu"), ["cpu"]),
        (("a=--device=cpu", "b=--device vulkan"), (), ["accelerator", "cpu"]),
        (("a=--device=cpu", "b="), (), ["accelerator", "cpu"]),
    ],
)
def test_the_devices_that_the_arms_use_are_locked(arms, arguments, locks):
    assert comparison(*arms, arguments=arguments).locks == locks


def test_all_requests_are_counted_beforehand():
    settings = {"concurrency": (1, 4), "repeats": 3}
    wanted = comparison("a=", "b=", loads=2, noise=True, direct=True, settings=settings)
    assert wanted.requests == 3 * 2 * 15 * 2


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        ([["--a"], ["-m", "M"], ["--b"]], ["--a", "-m", "M", "--b"]),
        ([["--a", "--", "-fa", "on"], [], ["--b"]], ["--a", "--b", "--", "-fa", "on"]),
        ([["--", "-x"], ["--b", "--", "-y"]], ["--b", "--", "-x", "-y"]),
        ([[], ["--b", "--"]], ["--b"]),
    ],
)
def test_arguments_of_the_backend_stand_last(parts, joined):
    assert arms.put_together(*parts) == joined


async def test_every_arm_load_and_concurrency_gets_a_server_of_its_own():
    wanted = comparison("a=", "b=", loads=2, settings={"concurrency": (1, 2)})
    found = await ran(wanted)
    assert [(run.tag, run.load) for run in found.runs] == [
        *(("a", 1), ("a", 1), ("b", 1), ("b", 1)),
        *(("b", 2), ("b", 2), ("a", 2), ("a", 2)),
    ]
    assert len({run.url for run in found.runs}) == 8
    assert len({request.run for request in found.requests}) == 8
    assert all(run.ready_ms > 0 for run in found.runs)
    assert all(run.complete for run in found.runs)


async def test_request_1_of_a_slow_starting_server_is_seen_to_be_slower():
    found = await ran(comparison("cold=--first 0.2", "warm=", settings={"repeats": 3}))
    table = report.first_table(found, ("ttft",))
    slower = {row[1]: float(row[5]) for row in table.rows}
    assert slower["cold"] > 10 * 0.2
    assert slower["cold"] > slower["warm"]


async def test_flags_and_variables_reach_the_server_and_are_kept():
    texts = json.dumps({"texts": ["a", "b", "c", "d", "e"]})
    found = await ran(comparison(f"a=TINY='{texts}' --x 1", arguments=("--y", "2")))
    (run,) = found.runs
    assert run.flags == ("--x", "1", "--y", "2")
    assert run.environment == {"TINY": texts}
    assert found.requests[0].output_tokens == 5


async def test_models_are_passed_on_one_server_each():
    found = await ran(comparison("a=", models=("one.gguf", "two.gguf")))
    assert [run.flags for run in found.runs] == [("-m", "one.gguf"), ("-m", "two.gguf")]


async def test_the_backend_beside_the_door_is_measured_too():
    found = await ran(comparison("a=--direct", direct=True))
    assert {request.target for request in found.requests} == {"door", "direct"}
    assert report.relay_table(found).rows


async def test_direct_without_a_port_to_be_found_is_said():
    with pytest.raises(OnebitError, match=r"no backend's port at /v1/status"):
        await ran(comparison("a=", direct=True))


CHAT = {"name": "a", "role": "chat", "state": "ready", "port": 5, "pid": 6}


def test_the_chat_backend_is_the_one_beside_the_door():
    embedding = {"name": "e", "role": "embedding", "state": "ready", "port": 4}
    assert arms._chat_backend({"backends": [embedding, CHAT]}, "u") == (5, 6)


@pytest.mark.parametrize(
    ("backends", "said"),
    [
        ([CHAT, CHAT | {"name": "b"}], r"several chat backends \(a, b\)"),
        ([CHAT | {"state": "backoff"}], "backend a is backoff and not ready"),
        ([CHAT | {"port": None}], "no backend's port"),
    ],
)
def test_a_backend_beside_the_door_that_is_not_sure_is_refused(backends, said):
    with pytest.raises(OnebitError, match=said):
        arms._chat_backend({"backends": backends}, "u")


async def test_a_server_that_fails_to_start_is_said_with_its_last_lines():
    session = arms.Session(comparison("a=", "b=WHERE='here now' --fail"))
    said = r"arm b, load 1: .*code 3 .*model file is cursed"
    with pytest.raises(OnebitError, match=said) as caught:
        await session.run()
    assert "try it by hand: WHERE='here now' " in caught.value.hint
    assert {request.tag for request in session.results.requests} == {"a"}


async def test_a_server_that_is_never_ready_is_given_up_and_stopped():
    with pytest.raises(OnebitError, match=r"not ready after 0\.3 s"):
        await ran(comparison("a=--hang", start_limit_s=0.3))


async def test_a_program_that_is_not_there_is_a_usage_error():
    with pytest.raises(UsageError, match="no-such-program is no program"):
        await ran(comparison("a=", command=("no-such-program",)))


async def test_no_server_is_left_behind_when_it_is_cancelled():
    texts = json.dumps({"texts": ["x"] * 1000, "gap_s": 0.05})
    wanted = comparison(f"a=TINY='{texts}'")
    seen = trio.Event()
    session = arms.Session(wanted, began=lambda _what: seen.set())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.run)
        with trio.fail_after(30):
            await seen.wait()
            while not session._recorders:  # noqa: ASYNC110 - nobody tells of a server's readiness
                await trio.sleep(0.01)
        process = session._server._process
        nursery.cancel_scope.cancel()
    assert process.returncode is not None
    assert not psutil.pid_exists(process.pid)
    assert [run.complete for run in session.results.runs] == [False]


async def test_a_server_that_ignores_the_wish_to_stop_is_killed_on_request():
    server = arms.Server([sys.executable, "-c", _DEAF], os.environ)
    with trio.fail_after(30):
        async with server.running(20, "a"):
            server.kill()
    assert server._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("flag", ["", "--deaf"])
async def test_a_server_behind_a_wrapper_is_stopped_too(flag, monkeypatch):
    monkeypatch.setattr(arms, "_REST_S", 10 if not flag else 0.1)
    program = f"{shlex.join(COMMAND)} {flag} & wait"
    server = arms.Server(["sh", "-c", program], os.environ)
    with trio.fail_after(30):
        async with server.running(20, "a"):
            children = psutil.Process(server._process.pid).children()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert children
    assert not alive


_DEAF = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("1bit serve: ready on http://127.0.0.1:1", file=sys.stderr, flush=True)
time.sleep(60)
"""


async def test_the_ready_line_is_found_in_json_too():
    server = arms.Server([sys.executable, "-c", _JSON_LOG], os.environ)
    with trio.fail_after(30):
        async with server.running(20, "a") as url:
            assert url == "http://127.0.0.1:1"


_JSON_LOG = """
import sys, time
print('{"msg": "1bit serve: ready on http://127.0.0.1:1"}', file=sys.stderr, flush=True)
time.sleep(60)
"""


async def test_fresh_caches_are_empty_folders_that_go_with_the_server():
    found = await ran(comparison("a=", caches="drop"))
    folder = Path(found.runs[0].environment["MESA_SHADER_CACHE_DIR"])
    assert "XDG_STATE_HOME" in found.runs[0].environment
    assert not folder.exists()  # noqa: ASYNC240 - one look at the end


def test_a_forgotten_file_is_still_there(tmp_path):
    model = tmp_path / "m.gguf"
    model.write_bytes(b"x" * 8192)
    assert arms.model_files(["-m", str(model), "--mmproj=" + str(model), "-c", "5"]) == [model] * 2
    arms.forget([model, tmp_path / "none"])
    assert model.read_bytes() == b"x" * 8192


def test_all_parts_of_a_split_model_are_forgotten(tmp_path):
    names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    for name in [*names, "m-00001-of-00003.gguf", "n-00001-of-00002.gguf"]:
        (tmp_path / name).write_bytes(b"x")
    found = arms.model_files(["-m", str(tmp_path / names[0])])
    assert [path.name for path in found] == names


async def test_a_page_cache_that_cannot_be_dropped_is_said_before_anything_starts(tmp_path):
    model = tmp_path / "m.gguf"
    model.write_bytes(b"x")
    with pytest.raises(UsageError, match="arm b name no GGUF file"):
        await ran(comparison(f"a=-m {model}", "b=", page_cache="drop"))
    found = await ran(comparison(f"a=-m {model}", page_cache="drop", settings={"repeats": 1}))
    assert found.runs[0].complete
