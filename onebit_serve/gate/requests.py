"""Checks over HTTP: known answers, distributions, needles, reuse and the first request."""

from __future__ import annotations

from typing import Any

from onebit_serve.core.gate import kld, needle, reuse, tokens, warm
from onebit_serve.core.gate.config import Model
from onebit_serve.core.gate.kld import Distribution, Position
from onebit_serve.core.gate.reference import Floor, Reference
from onebit_serve.core.gate.tokens import Answer, Token
from onebit_serve.core.gate.verdict import Finding, failed, not_run
from onebit_serve.gate.serving import Client, ServerError, problem

__all__ = [
    "check_kat",
    "check_kld",
    "check_needle",
    "check_reuse",
    "noise_floor",
    "record_answers",
    "record_positions",
    "timed_load",
]

_OK = 200
_LETTERS = "The ferry was late because of the wind from the west, and the baker closed his shop. "
_DIGITS = 5
_SAMPLE_SENTENCES = 40


def _names_missing(wanted: list[str], stored: set[str]) -> str:
    missing = [name for name in wanted if name not in stored]
    return f"the reference lacks {', '.join(missing)}; record it anew" if missing else ""


async def record_answers(client: Client, model: Model) -> tuple[Answer, ...]:
    """Ask the known questions and return the answers whole.

    Raises:
        ServerError: A question was refused.
    """
    answers: list[Answer] = []
    for question in model.kat.questions:
        messages = [{"role": "user", "content": question.user}]
        prompt = await client.prompt(messages, model.template)
        said = await client.complete(
            prompt, model.kat.tokens, cache=False, probabilities=2, grammar=model.kat.grammar
        )
        if isinstance(said, str):
            raise ServerError(f"{question.name}: {said}")
        answers.append(Answer(question.name, prompt, said.steps))
    return tuple(answers)


async def check_kat(client: Client, model: Model, reference: Reference) -> tuple[Finding, object]:
    """Ask the stored prompts and compare token by token.

    Returns:
        The finding, and what was said, as evidence.
    """
    stored = {answer.name for answer in reference.answers}
    if lack := _names_missing([q.name for q in model.kat.questions], stored):
        return not_run(lack), None
    got: dict[str, tuple[Token, ...] | str] = {}
    for answer in reference.answers:
        said = await client.complete(
            answer.prompt,
            len(answer.steps),
            cache=False,
            probabilities=2,
            grammar=model.kat.grammar,
        )
        got[answer.name] = said if isinstance(said, str) else said.tokens
    return tokens.judge(list(reference.answers), got), got


async def _distribution(
    client: Client, prompt: tuple[int, ...], ask: int, *, cache: bool
) -> Distribution:
    said = await client.complete(prompt, 1, cache=cache, probabilities=ask)
    if isinstance(said, str):
        raise ServerError(f"after {len(prompt)} tokens {said}")
    if not said.distributions or not said.distributions[0].ids:
        raise ServerError("the server reports no token probabilities (n_probs)")
    return said.distributions[0]


async def _positions(
    client: Client, texts: dict[str, tuple[int, ...]], wanted: list[tuple[str, int, str]], ask: int
) -> tuple[Position, ...]:
    """Take distributions: a request a position.

    Teacher forcing by a grammar of token ids gives the same distributions to the last digit in one
    request, but ten times slower (b10068, 55 positions: 9.2 s against 0.9 s), since the grammar
    is held against the whole vocabulary at every token.
    """
    taken: list[Position] = []
    for text, count, path in wanted:
        cache = path == "decode"
        found = await _distribution(client, texts[text][:count], ask, cache=cache)
        taken.append(Position(text, count, path, found))
    return tuple(taken)


def _wanted(model: Model, texts: dict[str, tuple[int, ...]]) -> list[tuple[str, int, str]]:
    wanted: list[tuple[str, int, str]] = []
    for name, ids in texts.items():
        last = len(ids)
        first = max(model.kld.context_tokens, last - model.kld.positions + 1)
        # The first is computed anew so that nothing of an earlier request is in it.
        wanted += [(name, n, "prefill" if n == first else "decode") for n in range(first, last + 1)]
        step = max(1, (last - first) // max(1, model.kld.prefill_positions))
        anew = list(range(last, first, -step))[: model.kld.prefill_positions]
        wanted += [(name, n, "prefill") for n in anew]
    return wanted


def _rounded(found: Distribution, top: int) -> Distribution:
    return Distribution(
        found.ids[:top], tuple(round(value, _DIGITS) for value in found.logprobs[:top])
    )


async def record_positions(
    client: Client, model: Model
) -> tuple[dict[str, tuple[int, ...]], tuple[Position, ...]]:
    """Take all distributions and return them with the texts' tokens.

    Raises:
        ServerError: A text is too short, or no distribution came.
    """
    texts = {text.name: await client.tokenize(text.text) for text in model.kld.texts}
    for name, ids in texts.items():
        if len(ids) <= model.kld.context_tokens:
            raise ServerError(f"the text {name} is only {len(ids)} tokens long")
    taken = await _positions(client, texts, _wanted(model, texts), model.kld.ask)
    return texts, tuple(
        Position(p.text, p.tokens, p.path, _rounded(p.distribution, model.kld.top_k)) for p in taken
    )


def noise_floor(first: tuple[Position, ...], second: tuple[Position, ...]) -> Floor:
    """Return the noise between two recordings, and between prefill and decode in one of them."""
    loads = [
        kld.divergence(a.distribution, b.distribution) for a, b in zip(first, second, strict=True)
    ]
    decoded = {(p.text, p.tokens): p.distribution for p in first if p.path == "decode"}
    paths = [
        kld.divergence(decoded[p.text, p.tokens], p.distribution)
        for p in first
        if p.path == "prefill" and (p.text, p.tokens) in decoded
    ]
    return Floor(
        loads=max(loads, default=0.0),
        paths=max(paths, default=0.0),
        mean=sum(paths) / len(paths) if paths else 0.0,
    )


async def check_kld(client: Client, model: Model, reference: Reference) -> tuple[Finding, object]:
    """Take the stored positions again and compare distributions."""
    stored = set(reference.texts)
    if lack := _names_missing([text.name for text in model.kld.texts], stored):
        return not_run(lack), None
    wanted = [(p.text, p.tokens, p.path) for p in reference.positions]
    taken = await _positions(client, dict(reference.texts), wanted, model.kld.ask)
    finding = kld.judge(reference.positions, taken, model.kld.limits, min_lead=model.kld.min_lead)
    return finding, taken


async def _chat(client: Client, model: Model, content: str) -> tuple[str, int, str]:
    """Return text, prompt tokens and what was wrong."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": model.needle.reply_tokens,
        "temperature": 0,
        "cache_prompt": False,
    }
    if model.template:
        body["chat_template_kwargs"] = model.template
    status, answer = await client.post("/v1/chat/completions", body)
    if status != _OK:
        return "", 0, f"the server answered {status}: {problem(answer)}"
    try:
        message = answer["choices"][0]["message"]
        # A model that thinks aloud has found the fact when it thinks of it.
        text = str(message.get("reasoning_content") or "") + str(message.get("content") or "")
        return text, int(answer["usage"]["prompt_tokens"]), ""
    except (KeyError, IndexError, TypeError) as error:
        return "", 0, f"the reply has no usable {error}"


async def check_needle(client: Client, model: Model) -> tuple[Finding, object]:
    """Hide each fact at each depth and ask for it."""
    want = model.needle.tokens
    if not model.needle.facts or not model.needle.depths:
        return not_run("the configuration names no facts or no depths"), None
    replies: list[needle.Reply] = []
    for fact in model.needle.facts:
        lengths = [
            len(
                await client.prompt(
                    [{"role": "user", "content": needle.user_text(fact, count, 0.5)}],
                    model.template,
                )
            )
            for count in (0, _SAMPLE_SENTENCES)
        ]
        each = (lengths[1] - lengths[0]) / _SAMPLE_SENTENCES
        sentences = int((want - lengths[0]) / each)
        if sentences < 1:
            return not_run(f"{want} tokens are too few for a text with a fact"), None
        for depth in model.needle.depths:
            content = needle.user_text(fact, sentences, depth)
            text, count, wrong = await _chat(client, model, content)
            replies.append(needle.Reply(depth, fact, count, text, wrong))
    finding = needle.judge(replies, want_tokens=want, max_missed=model.needle.max_missed)
    return finding, replies


async def check_reuse(client: Client, model: Model) -> tuple[Finding, object]:
    """Warm a system prompt with one question, ask another, and ask that one anew.

    The reused state must be counted as cached and give the distributions that evaluating the whole
    prompt gives, within what another batch cut changes.
    """
    system = "You answer in one short sentence. Use these notes. "
    sample = len(await client.tokenize(_LETTERS))
    system += _LETTERS * max(1, round(model.reuse.prefix_tokens / sample))
    template = model.template

    async def tokens_of(user: str) -> tuple[int, ...]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return await client.prompt(messages, template)

    first, second = (
        await tokens_of("Who closed a shop?"),
        await tokens_of("Why was the ferry late?"),
    )
    shared = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
    if shared < model.reuse.prefix_tokens // 2:
        return not_run(
            f"two chats share only {shared} tokens; does the template have a date?"
        ), None
    count, ask = model.reuse.reply_tokens, model.kld.ask
    grammar = model.kat.grammar
    warmed = await client.complete(first, 1, cache=True, grammar=grammar)
    reused = await client.complete(second, count, cache=True, probabilities=ask, grammar=grammar)
    anew = await client.complete(second, count, cache=False, probabilities=ask, grammar=grammar)
    for name, said in (("warming", warmed), ("the warmed prefix", reused), ("evaluating", anew)):
        if isinstance(said, str):
            return failed(f"{name}: {said}"), None
    if isinstance(reused, str) or isinstance(anew, str):  # told above; mypy cannot see it
        return failed("no answer"), None
    with_prefix, without = (
        reuse.Said(said.text, said.steps, said.distributions, said.cached)
        for said in (reused, anew)
    )
    finding = reuse.judge(
        with_prefix,
        without,
        shared=shared,
        slack=model.reuse.slack_tokens,
        limits=model.reuse.limits,
        min_lead=model.kat.min_lead,
    )
    return finding, {"shared": shared, "reused": reused, "anew": anew}


async def timed_load(client: Client, model: Model) -> warm.Load:
    """Send the first requests after a start: texts of one length that share no prefix.

    Raises:
        ServerError: One was refused.
    """
    timings: list[warm.Timing] = []
    filler = await client.tokenize(_LETTERS * (1 + model.warm.prompt_tokens // 8))
    longest = model.warm.prompt_tokens + 3 * (model.warm.requests - 1)
    if len(filler) < longest:
        raise ServerError(f"the prompt text is {len(filler)} tokens long, {longest} are needed")
    for number in range(model.warm.requests):
        # Another start for each, so that no cached prefix helps; the same length, so that each
        # is of the same shape.
        prompt = filler[number * 3 : number * 3 + model.warm.prompt_tokens]
        said = await client.complete(
            prompt,
            model.warm.decode_tokens,
            cache=False,
            grammar=model.warm.grammar,
            ignore_eos=True,
        )
        if isinstance(said, str):
            raise ServerError(f"request {number + 1}: {said}")
        timings.append(said.timing)
    return warm.Load(tuple(timings))
