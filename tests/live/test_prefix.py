"""Warm prompts against a real llama-server: every kind of model, and what the backend counts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess

import msgspec
import pytest
import trio

from onebit_serve.core.http import Reply
from onebit_serve.core.warm_prompts import match, parse
from onebit_serve.live.prefix import PromptWarmer
from onebit_serve.live.saves import Saves, private_directory
from onebit_serve.live.upstream import GoneError, open_stream

SYSTEM = "You are a helpful assistant. Answer in the language of the question, and be brief. " * 12
TWINS = [f"{SYSTEM} One.", f"{SYSTEM} Two."]
FIRST_CHARACTERS = (
    "letter",
    "7",
    " space",
    "\nline",
    "\n\nlines",
    "\ttab",
    "你好",
    "😀",
    '"quote"',
)
DENSE, RECURRENT = ("llama",), ("qwen35", "lfm2", "jamba", "mamba")


async def exchange(port, method, target, body=b"", key=""):
    async with open_stream(port, method, target, body, key) as stream:
        return Reply(stream.status, await stream.read())


def asker(port, key=""):
    async def request(method, path, body):
        return await exchange(port, method, path, body, key)

    return request


@contextlib.asynccontextmanager
async def server(program, model, *flags):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = ["--device", "none", "-t", "1", "-c", "8192", "--port", str(port), "--offline"]
    child = subprocess.Popen(  # noqa: ASYNC220  # returns in a quarter of a millisecond
        [program, "-m", model, *common, *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        with trio.fail_after(30):
            while True:
                with contextlib.suppress(GoneError):
                    if (await exchange(port, "GET", "/health")).status == 200:
                        break
                assert child.poll() is None, "llama-server ended while it loaded"
                await trio.sleep(0.02)
        yield port
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


async def chat(port, messages, **more):
    body = {"messages": messages, "max_tokens": 1, "temperature": 0, **more}
    reply = await exchange(port, "POST", "/v1/chat/completions", json.dumps(body).encode())
    assert reply.status == 200, reply.body
    return json.loads(reply.body)["timings"]["cache_n"]


def ask(text, system=SYSTEM):
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def entries(*systems, **more):
    lists = [{"messages": [{"role": "system", "content": s}], **more} for s in systems]
    return parse(json.dumps(lists), "prompts.json")


@pytest.fixture
def tiny(tiny_models):
    return lambda kind: str(tiny_models / f"tiny-{kind}.gguf")


@pytest.mark.parametrize("kind", [*DENSE, *RECURRENT, "gemma3"])
async def test_no_kind_of_model_loses_more_than_one_token_of_a_warmed_prefix(
    kind, tiny, real_llama_server
) -> None:
    async with server(real_llama_server, tiny(kind), "-np", "2") as port:
        warmer = PromptWarmer(asker(port), entries(SYSTEM))
        await warmer.warm()
        (standing,) = warmer.standings
        assert standing.proven, standing.why
        assert standing.slots == (0, 1)
        for text in FIRST_CHARACTERS:
            cached = await chat(port, ask(text))
            assert standing.tokens - cached <= 1, (text, cached)


async def test_a_sliding_window_longer_than_the_prefix_loses_five_tokens_at_most(
    tiny, real_llama_server
) -> None:
    async with server(real_llama_server, tiny("gemma3"), "-np", "1") as port:
        for text in FIRST_CHARACTERS:
            warmer = PromptWarmer(asker(port), entries("Be brief."))
            await warmer.clear()
            await warmer.warm()
            (standing,) = warmer.standings
            assert standing.proven, standing.why
            assert standing.tokens - await chat(port, ask(text, "Be brief.")) <= 5, text


async def test_a_real_model_with_its_own_template_finds_its_prefix(
    smollm2, real_llama_server
) -> None:
    async with server(real_llama_server, smollm2, "-np", "1") as port:
        said: list[str] = []
        warmer = PromptWarmer(asker(port), entries(SYSTEM[:200]), say=said.append)
        await warmer.warm()
        (standing,) = warmer.standings
        for text in FIRST_CHARACTERS[:5]:
            cached = await chat(port, ask(text, SYSTEM[:200]))
            assert standing.tokens - cached <= 1, (text, cached)
    line = f"warm-up done (strict-prefix): 1 completed, 0 skipped, {standing.tokens} prompt tokens"
    assert said[-1].startswith(line)


async def test_parallel_requests_all_find_one_prompt_that_was_put_into_every_slot(
    tiny, real_llama_server
) -> None:
    async with server(real_llama_server, tiny("qwen35"), "-np", "4") as port:
        warmer = PromptWarmer(asker(port), entries(SYSTEM))
        await warmer.warm()
        (standing,) = warmer.standings
        assert standing.slots == (0, 1, 2, 3)
        cached = []

        async def one(number):
            cached.append(await chat(port, ask(f"{number} is my number"), max_tokens=20))

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(one, number)
        assert min(cached) >= standing.tokens - 1


async def test_twins_in_slots_of_their_own_and_twelve_personas_through_the_host_cache(
    tiny, real_llama_server
) -> None:
    personas = [f"Persona {n * 7919}: {chr(97 + n) * 9} {SYSTEM[: 300 + 7 * n]}" for n in range(10)]
    async with server(real_llama_server, tiny("llama"), "-np", "4") as port:
        warmer = PromptWarmer(asker(port), entries(*personas, *TWINS))
        await warmer.warm()
        assert [s.why for s in warmer.standings] == [""] * 12
        # The twins first: they live in slots, out of which ten personas will push them.
        for index, system in reversed(list(enumerate([*personas, *TWINS]))):
            cached = await chat(port, ask("Who are you?", system))
            assert cached >= warmer.standings[index].tokens - 1, index


async def test_without_a_host_cache_only_the_slots_keep_prompts_and_the_rest_is_said(
    tiny, real_llama_server
) -> None:
    personas = [f"Persona {n * 7919}: {SYSTEM[:300]}" for n in range(6)]
    async with server(real_llama_server, tiny("llama"), "-np", "4", "-cram", "0") as port:
        said: list[str] = []
        warmer = PromptWarmer(asker(port), entries(*personas), host_bytes=0, say=said.append)
        await warmer.warm()
        assert [s.proven for s in warmer.standings] == [True] * 4 + [False] * 2
        assert any("entry 5" in line and "no host cache" in line for line in said)
        assert "4 completed, 2 skipped" in said[-1]


async def test_a_host_cache_that_is_too_small_is_found_out_by_the_proof_alone(
    tiny, real_llama_server
) -> None:
    personas = [f"Persona {n * 7919}: {chr(97 + n) * 9} {SYSTEM[: 900 + 7 * n]}" for n in range(9)]
    async with server(real_llama_server, tiny("qwen35"), "-np", "2", "-cram", "4") as port:
        said: list[str] = []
        warmer = PromptWarmer(
            asker(port), entries(*personas), host_bytes=4 << 20, token_bytes=2048, say=said.append
        )
        await warmer.warm()
        assert "go through the host cache of 4 MiB (--cache-ram), which may not keep all" in said[0]
        kept = sum(s.proven for s in warmer.standings)
        assert 2 <= kept < 9
        # Those of the file's beginning are kept; the first that is gone speaks for all after it.
        assert all(s.proven for s in warmer.standings[:kept])
        assert "tokens are reused" in warmer.standings[kept].why
        assert "has lost entry" in warmer.standings[-1].why
        assert not warmer.due
        for system, standing in zip(personas[:kept], warmer.standings, strict=False):
            assert await chat(port, ask("Who are you?", system)) >= standing.tokens - 1


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen35", "mamba"])
async def test_a_saved_slot_comes_back_after_a_kill_and_a_refused_one_is_prefilled(
    kind, tiny, real_llama_server, tmp_path
) -> None:
    folder = private_directory(tmp_path / "slots")
    saves = Saves(folder, binary="b10068", model=kind)
    flags = ("-np", "2", "--slot-save-path", str(folder))
    async with server(real_llama_server, tiny(kind), *flags) as port:
        warmer = PromptWarmer(asker(port), entries(SYSTEM), saves=saves)
        await warmer.warm()
        assert warmer.standings[0].source == "prefill"
    (saved,) = folder.glob("*")
    async with server(real_llama_server, tiny(kind), *flags) as port:
        warmer = PromptWarmer(asker(port), entries(SYSTEM), saves=saves)
        await warmer.warm()
        (standing,) = warmer.standings
        assert standing.proven
        assert standing.source == ("prefill" if kind == "gemma3" else "disk")
        assert standing.tokens - await chat(port, ask("hi")) <= 1
        # What a sliding window restores helps nobody, so it is not tried again.
        assert bool(saved.stat().st_size) == (kind != "gemma3")
        saved.write_bytes(b"no saved slot")
        await warmer.warm()
        assert warmer.standings[0].proven
        assert warmer.standings[0].source == "prefill"
        assert saved.stat().st_size > 1000


async def test_a_prompt_pushed_out_by_other_traffic_is_noticed_and_repaired(
    tiny, real_llama_server
) -> None:
    async with server(real_llama_server, tiny("qwen35"), "-np", "1", "-cram", "0") as port:
        warmer = PromptWarmer(asker(port), entries(SYSTEM), host_bytes=0)
        await warmer.warm()
        await chat(port, ask("something else", "Another system prompt altogether. " * 20))
        index = match(ask("first"), warmer.entries)
        assert index == 0
        warmer.used(index, await chat(port, ask("first")))
        assert warmer.due
        assert await warmer.repair() == 1
        assert not warmer.due
        cached = await chat(port, ask("second"))
        warmer.used(index, cached)
        assert cached >= warmer.standings[0].tokens - 1
        assert warmer.standings[0].hits == 1


async def test_without_a_host_cache_a_repair_pushes_no_other_warm_prompt_out(
    tiny, real_llama_server
) -> None:
    async with server(real_llama_server, tiny("qwen35"), "-np", "2", "-cram", "0") as port:
        warmer = PromptWarmer(asker(port), entries(*TWINS), host_bytes=0)
        await warmer.warm()
        # The first prompt's slot is the least recently used one from now on.
        await chat(port, ask("something else", "Another system prompt. " * 20), id_slot=1)
        warmer.used(1, 0)
        await warmer.repair()
        assert [s.slots for s in warmer.standings] == [(0,), (1,)]
        for system, standing in zip(TWINS, warmer.standings, strict=True):
            assert await chat(port, ask("hello", system)) >= standing.tokens - 1


@pytest.mark.parametrize("host_bytes", [None, 0])
@pytest.mark.parametrize("systems", [1, 2])
async def test_what_a_sleep_took_comes_back_in_all_the_slots_it_had(
    systems, host_bytes, tiny, real_llama_server
) -> None:
    flags = ("-np", "4", "-cram", "-1" if host_bytes is None else "0")
    async with server(real_llama_server, tiny("qwen35"), *flags) as port:
        warmer = PromptWarmer(asker(port), entries(*TWINS[:systems]), host_bytes=host_bytes)
        await warmer.warm()
        await warmer.clear()
        conversation = ask("I woke it", "Another system prompt. " * 20)
        await chat(port, conversation)
        warmer.lost_all()
        assert await warmer.repair() == systems
        assert not warmer.due
        assert sorted(slot for s in warmer.standings for slot in s.slots) == [0, 1, 2, 3]
        cached = []

        async def one(number):
            system = TWINS[number % systems]
            cached.append(await chat(port, ask(f"{number} is mine", system), max_tokens=20))

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(one, number)
        assert min(cached) >= warmer.standings[0].tokens - 1
        assert (await chat(port, conversation) > 20) == (host_bytes is None)


@pytest.mark.parametrize("before", [0, 2], ids=["before the plan", "after the first prompt"])
async def test_what_the_time_did_not_suffice_for_is_due_and_gets_a_slot_of_its_own(
    before, tiny, real_llama_server
) -> None:
    async with server(real_llama_server, tiny("llama"), "-np", "4") as port:
        open_for, request = before, asker(port)

        async def slow(method, path, body):
            nonlocal open_for
            if path == "/completion":
                open_for -= 1
                if open_for < 0:
                    await trio.sleep_forever()
            return await request(method, path, body)

        warmer = PromptWarmer(slow, entries(*TWINS), concurrency=1)
        await warmer.warm(limit_s=1 if before else 0)
        assert sorted(s.proven for s in warmer.standings) == [False, before > 0]
        assert any("not reached within" in s.why for s in warmer.standings)
        assert warmer.due == [0, 1]  # what was reached misses one of its two slots
        open_for = 1000
        await warmer.repair()
        assert not warmer.due
        assert [s.why for s in warmer.standings] == ["", ""]
        assert sorted(slot for s in warmer.standings for slot in s.slots) == [0, 1, 2, 3]
        for system, standing in zip(TWINS, warmer.standings, strict=True):
            assert await chat(port, ask("hello", system)) >= standing.tokens - 1


@pytest.mark.parametrize("save", [True, False])
async def test_clear_empties_every_slot_with_and_without_the_erase_action(
    save, tiny, real_llama_server, tmp_path
) -> None:
    flags = ("--slot-save-path", str(tmp_path)) if save else ()
    async with server(real_llama_server, tiny("llama"), "-np", "2", "-cram", "0", *flags) as port:
        warmer = PromptWarmer(asker(port), entries(SYSTEM))
        await warmer.warm()
        await warmer.clear()
        assert await chat(port, ask("hello")) < 8
        await warmer.clear()
        await warmer.warm()
        assert await chat(port, ask("hello")) >= warmer.standings[0].tokens - 1


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}",
         "ignores the user's text"),
        ("{{ strftime_now('%H:%M:%S') }}{% for m in messages %}{{ m.content }}{% endfor %}",
         "writes the time"),
        ("{% set f = '%S' %}{{ strftime_now(f) }}{{ messages[-1].content }}", "writes the time"),
        ("{% if 'brief' in messages[0].content %}{{ raise_exception('no system') }}{% endif %}",
         "no system"),
    ],
    ids=["ignores", "time", "time by a variable", "raises"],
)  # fmt: skip
async def test_a_template_that_cannot_be_warmed_is_refused_with_a_word(
    template, why, tiny, real_llama_server
) -> None:
    flags = ("-np", "1", "--jinja", "--chat-template", template)
    async with server(real_llama_server, tiny("llama"), *flags) as port:
        said: list[str] = []
        warmer = PromptWarmer(asker(port), entries(SYSTEM), say=said.append)
        await warmer.warm()
        assert why in warmer.standings[0].why
        assert "0 completed, 1 skipped, 0 prompt tokens" in said[-1]


async def test_a_date_in_a_template_does_not_keep_it_from_being_warmed(
    tiny, real_llama_server
) -> None:
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}\n{% endfor %}"
    async with server(
        real_llama_server, tiny("llama"), "-np", "1", "--jinja", "--chat-template", template
    ) as port:
        warmer = PromptWarmer(asker(port), entries(SYSTEM))
        await warmer.warm()
        assert warmer.standings[0].proven


async def test_tools_and_template_switches_belong_to_an_entry(tiny, real_llama_server) -> None:
    template = (
        "{% if tools %}{{ tools[0].function.name }} {% endif %}"
        "{% if enable_thinking %}think {% else %}straight {% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    flags = ("-np", "4", "--jinja", "--chat-template", template)
    async with server(real_llama_server, tiny("llama"), *flags) as port:
        both = entries(SYSTEM, thinking="both", tools=[tool])
        warmer = PromptWarmer(asker(port), both)
        await warmer.warm()
        assert [s.label for s in warmer.standings] == [
            "entry 1 (thinking on)",
            "entry 1 (thinking off)",
        ]
        assert all(s.proven for s in warmer.standings)
        for thinking in (True, False):
            cached = await chat(
                port,
                ask("hi"),
                tools=[tool],
                chat_template_kwargs={"enable_thinking": thinking},
            )
            assert cached >= warmer.standings[0].tokens - 1


async def test_histories_may_end_with_a_users_or_an_assistants_message(
    tiny, real_llama_server
) -> None:
    history = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What is a model?"},
        {"role": "assistant", "content": "A file of numbers."},
    ]
    request = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": SYSTEM}]
    async with server(real_llama_server, tiny("qwen35"), "-np", "2") as port:
        both = parse(msgspec.json.encode([history, request]), "prompts.json")
        warmer = PromptWarmer(asker(port), both)
        await warmer.warm()
        ended, open_ended = warmer.standings
        assert ended.proven
        assert open_ended.proven
        assert (
            await chat(port, [*history, {"role": "user", "content": "go on"}]) >= ended.tokens - 1
        )
        assert await chat(port, request) >= open_ended.tokens - 1


# As Gemma's, Mistral's and Llama 2's.
ALTERNATING = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)


@pytest.mark.parametrize("clock", ["", "{{ strftime_now('%Y') }}"], ids=["no date", "date"])
@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma3"])
async def test_an_entry_that_ends_with_a_users_message_is_warmed_where_roles_must_alternate(
    kind, clock, tiny, real_llama_server
) -> None:
    flags = ("-np", "2", "--jinja", "--chat-template", clock + ALTERNATING)
    request = [{"role": "user", "content": SYSTEM}]
    answered = [*request, {"role": "assistant", "content": "I will."}]
    async with server(real_llama_server, tiny(kind), *flags) as port:
        both = parse(msgspec.json.encode([request, answered]), "prompts.json")
        warmer = PromptWarmer(asker(port), both)
        await warmer.warm()
        assert [s.why for s in warmer.standings] == ["", ""]
        asked, closed = warmer.standings
        assert await chat(port, request) >= asked.tokens - 5
        more = [*answered, {"role": "user", "content": "go on"}]
        assert await chat(port, more) >= closed.tokens - 1


async def test_the_counts_go_on_over_a_new_warm_up(tiny, real_llama_server) -> None:
    async with server(real_llama_server, tiny("llama"), "-np", "1") as port:
        warmer = PromptWarmer(asker(port), entries(SYSTEM))
        await warmer.warm()
        warmer.used(0, await chat(port, ask("hi")))
        await warmer.warm()
        (standing,) = warmer.standings
        assert (standing.hits, standing.tokens_saved) == (1, standing.tokens)
