"""`1bit route`: explain where a request would go, and why; starts nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from onebit_serve.cli.numbers import Finite
from onebit_serve.core import laya, presets
from onebit_serve.core.errors import UsageError
from onebit_serve.core.laya import Choice
from onebit_serve.core.policy import CLASSES, Policy, Routes, parse_policy, resolve
from onebit_serve.core.routing import in_words

__all__ = ["command", "known_devices"]

_ASKED = ("code", "prose", "short")


@click.command("route")
@click.option(
    "--state", metavar="TEXT", required=True, help="The first user message; - reads it from stdin."
)
@click.option("--policy", metavar="FILE", help="The route policy; without one all goes to auto.")
@click.option(
    "--devices",
    metavar="A,B",
    help="Devices that can run the model, in the order of auto [all that the policy names].",
)
@click.option(
    "--scorer", metavar="URL", help="Ask the Laya at http://127.0.0.1:PORT what the text is."
)
@click.option(
    "--deadline",
    metavar="S",
    type=Finite(min=0),
    default=2.0,
    show_default=True,
    help="Seconds it has; 0 is no limit.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    state: str,
    policy: str | None,
    devices: str | None,
    scorer: str | None,
    deadline: float,
    as_json: bool,  # noqa: FBT001
) -> None:
    """Explain where a request would be routed, without a server.

    A text of 1,024 characters or more is a long document. A shorter one is for Laya to judge: with
    --scorer it is asked, without, what would follow from each answer is shown.
    """
    text = sys.stdin.read() if state == "-" else state
    routes = _routes(policy, devices)
    explained = _explain(text, routes, scorer, deadline)
    if as_json:
        print(msgspec.json.encode(explained).decode())
    else:
        print("\n".join(_lines(explained)))


def known_devices(policy_text: bytes = b"") -> frozenset[str]:
    """Return the words that can name a device where no llama-server is asked.

    Args:
        policy_text: A policy; names in it that look as llama-server prints them (`CUDA0`) count.
    """
    listed = re.findall(rb'"([A-Za-z]+[0-9]+)"', policy_text)
    return frozenset(presets.PRESETS) | {name.decode() for name in listed}


def _routes(policy_file: str | None, devices: str | None) -> Routes:
    usable = [word.strip() for word in (devices or "").split(",") if word.strip()]
    if policy_file is None:
        wished = Policy(usable[0] if usable else "auto")
        return resolve(wished, usable or ["auto"], {})
    try:
        text = Path(policy_file).read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read the route policy {policy_file}: {error.strerror}",
            hint="configs/route-policy.json is an example",
        ) from error
    wished = in_words(parse_policy(text, policy_file, known_devices(text)))
    named = [wished.default, *(route.device for route in wished.classes.values())]
    return resolve(wished, usable or list(dict.fromkeys(named)), {})


def _explain(text: str, routes: Routes, scorer: str | None, deadline_s: float) -> dict[str, Any]:
    choice = laya.by_size(text)
    if choice is None and scorer is not None:
        choice = _ask(text, scorer, deadline_s)
    explained: dict[str, Any] = {"characters": len(text), "notes": routes.notes}
    if choice is None:
        explained["if"] = {
            kind: {"device": routes.devices[kind], "why": routes.whys.get(kind, "")}
            for kind in CLASSES
            if kind in _ASKED
        }
        explained["otherwise"] = routes.default
        explained["min_confidence"] = routes.min_confidence
        return explained
    decision = laya.decide(choice, routes)
    was_asked = choice.confidence is not None
    asked = {"choice": choice.kind, "confidence": choice.confidence} if was_asked else {}
    return explained | {
        "class": decision.kind,
        "confidence": decision.confidence,
        "device": decision.device,
        "why": decision.why,
        "header": decision.header,
        **asked,
    }


def _ask(text: str, url: str, deadline_s: float) -> Choice:
    import trio

    from onebit_serve.core.http import Reply
    from onebit_serve.live.scorer import HttpScorer, NoAnswerError
    from onebit_serve.live.upstream import open_stream

    port = laya.scorer_port(url)

    async def request(method: str, path: str, body: bytes) -> Reply:
        async with open_stream(port, method, path, body) as stream:
            return Reply(stream.status, await stream.read())

    async def ask() -> Choice:
        try:
            with trio.fail_after(deadline_s or float("inf")):
                return await HttpScorer(request).ask(text)
        except NoAnswerError as error:
            return Choice("", why=f"Laya is {error.word}: {error}")
        except trio.TooSlowError:
            return Choice("", why=f"Laya is slow: no answer in {deadline_s:g} s")

    return trio.run(ask)


def _lines(explained: dict[str, Any]) -> list[str]:
    size = explained["characters"]
    limit = laya.LONG_CHARACTERS
    lines = [f"text     {size} characters, {'less than ' if size < limit else ''}{limit}"]
    if size >= limit:
        lines[0] += " or more"
    lines += [f"note     {note}" for note in explained["notes"]]
    if "header" in explained:
        return [
            *lines,
            f"class    {explained['class']}",
            f"device   {explained['device']}",
            f"why      {explained['why']}",
            f"header   X-1bit-Route: {explained['header']}",
        ]
    lines.append("class    for Laya to say (--scorer asks one):")
    for kind, route in explained["if"].items():
        why = f"  ({route['why']})" if route["why"] else ""
        lines.append(f"         {kind:<6} -> {route['device']}{why}")
    lines.append(
        f"         else   -> {explained['otherwise']}"
        f"  (confidence below {explained['min_confidence']:g}, or no answer)"
    )
    return lines
