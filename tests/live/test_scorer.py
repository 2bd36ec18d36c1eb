"""Scorers: a scripted one of ours, the real `laya-serve` where there is one, all that breaks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trio
import trio.testing

from onebit_serve.core.http import Reply
from onebit_serve.core.laya import WARM_UP_TEXTS
from onebit_serve.core.policy import Routes
from onebit_serve.live.scorer import HttpScorer, LineScorer, NoAnswerError, Router, is_healthy
from onebit_serve.live.upstream import GoneError, open_stream

SCRIPTED = Path(__file__).parent.parent / "scripted_laya.py"
ROUTES = Routes("hrx", {"code": "vulkan", "prose": "hrx", "short": "cpu", "long_doc": "rocm"})
CHAT = "/v1/chat/completions"
TEXTS = {"fix this code": "code", "write an essay": "prose", "how old is he": "short"}


def chat(text):
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


def answer(kind, confidence=0.7):
    return {"answers": {"kind": {"type": "choice", "choice": kind, "confidence": confidence}}}


def saying(*replies):
    """Return a request function that gives these replies, the last one for ever."""
    left = list(replies)

    async def request(_method, _path, _body):
        await trio.lowlevel.checkpoint()
        reply = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    return request


def ok(value):
    return Reply(200, json.dumps(value).encode())


async def exchange(port, method, target, body=b"", key=""):
    async with open_stream(port, method, target, body, key) as stream:
        return Reply(stream.status, await stream.read())


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.asynccontextmanager
async def http_server(command, port, **environment):
    child = subprocess.Popen(  # noqa: ASYNC220  # returns in a quarter of a millisecond
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    async def request(method, path, body):
        return await exchange(port, method, path, body)

    try:
        with trio.fail_after(30):
            while not await is_healthy(request):
                assert child.poll() is None, "the scorer ended while it started"
                await trio.sleep(0.02)
        yield request, child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@contextlib.asynccontextmanager
async def scripted_http(*flags):
    port = free_port()
    command = [sys.executable, str(SCRIPTED), "--port", str(port), *flags]
    async with http_server(command, port) as (request, child):
        yield request, child


@contextlib.asynccontextmanager
async def scripted_lines(*flags):
    """Run the scripted scorer on pipes, wired as the supervisor wires a daemon."""
    command = [sys.executable, str(SCRIPTED), *flags]
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    scorer = LineScorer()

    async def read():
        async for data in process.stdout:
            scorer.feed(data)
        scorer.gone("it exited")

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(scorer.write, process.stdin.send_all)
            with trio.fail_after(30):
                await scorer.ready.wait()
            yield scorer, process
            nursery.cancel_scope.cancel()
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def test_a_scripted_server_sorts_requests_into_classes() -> None:
    async with scripted_http() as (request, _):
        router = Router(ROUTES, HttpScorer(request), deadline_s=5)
        await router.warm_up()
        for text, kind in TEXTS.items():
            decision = await router.decide(CHAT, chat(text))
            assert decision.header == f"{kind} 0.70 {ROUTES.devices[kind]}"
        assert (await router.decide(CHAT, chat("x" * 1024))).header == "long_doc - rocm"


async def test_a_daemon_answers_many_questions_at_once_by_their_id() -> None:
    async with scripted_lines("--shuffle") as (scorer, _):
        router = Router(ROUTES, scorer, deadline_s=5)
        await router.warm_up()
        found = {}

        async def ask(text):
            found[text] = (await router.decide(CHAT, chat(text))).kind

        asked = {f"{text} {number}": kind for text, kind in TEXTS.items() for number in range(8)}
        async with trio.open_nursery() as nursery:
            for text in asked:
                nursery.start_soon(ask, text)
        assert found == asked


async def test_the_fake_backend_of_laya_serve_speaks_the_same_protocol() -> None:
    program = str(Path(sys.executable).with_name("laya-serve"))
    port = free_port()
    command = [program, "--host", "127.0.0.1", "--port", str(port)]
    async with http_server(command, port, LAYA_SERVE_BACKEND="fake") as (request, _):
        scorer = HttpScorer(request)
        choice = await scorer.ask("Write a Rust function that sums a slice.")
        assert (choice.kind, choice.confidence) == ("code", 0.0)
        router = Router(ROUTES, scorer, deadline_s=5)
        await router.warm_up()
        assert (await router.decide(CHAT, chat("hello"))).header == "default - hrx"
        assert (await router.decide(CHAT, chat("x" * 1024))).header == "long_doc - rocm"
        assert router.tally.failures == {}
        with pytest.raises(NoAnswerError) as caught:
            await HttpScorer(request, model="nobody's").ask("hello")
        assert "422" in caught.value.reason


async def test_later_turns_go_where_the_first_went_without_asking() -> None:
    scorer = HttpScorer(saying(ok(answer("code")), ok(answer("prose"))))
    router = Router(ROUTES, scorer, deadline_s=1)
    first = await router.decide(CHAT, chat("hello"))
    later = await router.decide(CHAT, chat("hello"))
    assert (first.device, later.device) == ("vulkan", "vulkan")
    assert (first.remembered, later.remembered) == (False, True)
    assert router.tally.asked == 1


async def test_what_is_no_conversation_is_not_routed() -> None:
    router = Router(ROUTES, HttpScorer(saying(ok(answer("code")))), deadline_s=1)
    assert await router.decide("/v1/embeddings", b"{}") is None
    assert router.tally.view()["routes"] == []


async def test_an_opening_that_nobody_answered_is_asked_about_in_the_next_conversation() -> None:
    scorer = HttpScorer(saying(GoneError("no connection"), ok(answer("code"))))
    router = Router(ROUTES, scorer, deadline_s=1)
    later = {"messages": [*json.loads(chat("hello"))["messages"], {"role": "assistant"}]}
    first = await router.decide(CHAT, chat("hello"))
    second = await router.decide(CHAT, json.dumps(later).encode())
    assert (first.header, second.header) == ("default - hrx", "default - hrx")
    assert second.remembered  # its cache is where the first turn went
    assert (await router.decide(CHAT, chat("hello"))).header == "code 0.70 vulkan"
    assert (router.tally.asked, router.tally.failures) == (2, {"down": 1})


async def test_an_explanation_that_fails_is_not_counted_or_said() -> None:
    said: list[str] = []
    router = Router(ROUTES, HttpScorer(saying(Reply(500, b""))), deadline_s=1, say=said.append)
    decision = await router.explain(CHAT, chat("hello"))
    assert "Laya is down: it answered 500" in decision.why
    assert (router.tally.asked, router.tally.failures, said) == (0, {}, [])


async def test_an_explanation_is_neither_remembered_nor_counted() -> None:
    router = Router(ROUTES, HttpScorer(saying(ok(answer("code")))), deadline_s=1)
    decision = await router.explain(CHAT, chat("hello"))
    assert decision.header == "code 0.70 vulkan"
    assert router.tally.view()["routes"] == []
    assert await router.explain("/v1/embeddings", b"{}") is None
    await router.decide(CHAT, chat("hello"))
    assert (await router.explain(CHAT, chat("hello"))).remembered


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        (GoneError("no connection"), "down"),
        (ConnectionResetError(), "down"),
        (Reply(501, b"{}"), "down"),
        (Reply(404, b"{}"), "down"),
        (Reply(422, b"{}"), "down"),
        (Reply(503, b"{}"), "busy"),
        (Reply(529, b"{}"), "busy"),
        (Reply(200, b"<html>"), "nonsense"),
        (ok({"answers": {}}), "nonsense"),
        (ok(answer("poetry")), "nonsense"),
    ],
)
async def test_a_scorer_that_fails_means_the_default_device(reply, word) -> None:
    said: list[str] = []
    scorer = HttpScorer(saying(reply, reply, ok(answer("code")), reply))
    router = Router(ROUTES, scorer, deadline_s=1, say=said.append)
    for number in range(4):
        decision = await router.decide(CHAT, chat(f"text {number}"))
        assert decision.header == ("code 0.70 vulkan" if number == 2 else "default - hrx")
    assert router.tally.failures == {word: 3}
    assert [line.split(",")[0].split(":")[0] for line in said] == [
        "Laya does not answer",
        "Laya answers again",
        "Laya does not answer",
    ]


async def test_a_slow_scorer_means_the_default_device_at_the_deadline(
    autojump_clock,  # noqa: ARG001  # pytest-trio looks for it among the arguments
) -> None:
    async def request(_method, _path, _body):
        await trio.sleep(60)

    router = Router(ROUTES, HttpScorer(request), deadline_s=2)
    missed = []
    router.missed = lambda: missed.append(1)
    decision = await router.decide(CHAT, chat("hello"))
    assert decision.header == "default - hrx"
    assert router.tally.failures == {"slow": 1}
    assert missed == [1]
    (row,) = router.tally.view()["routes"]
    assert row["decide_most_s"] == pytest.approx(2)


async def test_without_a_scorer_only_the_size_decides() -> None:
    router = Router(ROUTES, None, deadline_s=1)
    assert (await router.decide(CHAT, chat("hello"))).header == "default - hrx"
    assert (await router.decide(CHAT, chat("x" * 2000))).header == "long_doc - rocm"
    assert (router.tally.asked, router.tally.failures) == (0, {})
    with pytest.raises(NoAnswerError):
        await router.warm_up()


async def test_warming_up_asks_once_for_each_length() -> None:
    states = []

    async def request(_method, _path, body):
        await trio.lowlevel.checkpoint()
        states.append(json.loads(body)["state"])
        return ok(answer("short"))

    await Router(ROUTES, HttpScorer(request), deadline_s=1).warm_up()
    assert states == list(WARM_UP_TEXTS)
    lengths = [len(state.split()) for state in states]
    assert lengths == sorted(set(lengths))


@pytest.mark.parametrize(
    "how", ["--hang", "--garbage", "--error", "--half-line", "--die", "--silent-id"]
)
async def test_a_daemon_that_breaks_fails_no_request(how) -> None:
    async with scripted_lines(how) as (scorer, _):
        router = Router(ROUTES, scorer, deadline_s=0.2)
        decisions = []

        async def ask(number):
            decisions.append(await router.decide(CHAT, chat(f"fix this code {number}")))

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(ask, number)
        assert {decision.header for decision in decisions} == {"default - hrx"}
        assert sum(router.tally.failures.values()) == len(decisions) == 100


async def test_a_daemon_that_is_killed_fails_what_was_asked_and_what_comes() -> None:
    async with scripted_lines("--hang") as (scorer, process):
        caught: list[NoAnswerError] = []

        async def ask():
            try:
                await scorer.ask("hello")
            except NoAnswerError as error:
                caught.append(error)

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await trio.testing.wait_all_tasks_blocked()
                process.kill()
            await ask()
        assert [error.word for error in caught] == ["down", "down"]


def test_lines_that_are_no_answers_are_noise() -> None:
    scorer = LineScorer()
    for data in (b"loading ...\n", b"\xff\n[1]\n", b'{"id": "9"}\n', b"x" * (2 << 20), b"\n"):
        scorer.feed(data)
    assert not scorer.ready.is_set()
    scorer.feed(b'{"status":"re')
    scorer.feed(b'ady","model":"laya"}\n')
    assert scorer.ready.is_set()
