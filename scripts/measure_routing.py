"""Measure routing on this machine: mixed requests on two real backends, what a decision costs.

    python scripts/measure_routing.py [--requests 200] [--rounds 1000] [--only PART]

1. Two real llama-servers: SmolLM2 on the CPU is the default, a tiny model on software Vulkan is
   lazy and warmed with a prompt about as long as its requests. A scripted scorer, which speaks
   laya-serve's protocol and goes by keywords, sorts mixed requests. Every reply must say its route
   and come from the device that the policy names.
2. The cost of a decision, on a fake backend that answers at once: unrouted requests, first turns
   and later turns of conversations take turns.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import _bench
from _bench import Claim

from onebit_serve.core import laya, score
from onebit_serve.core.report import Table
from onebit_serve.live import machine

SCRIPTED = _bench.ROOT / "tests" / "scripted_laya.py"
NAME = "routing"
READY_S = 900.0
OK = 200
TOKENS = 2  # a reply's length shows nothing here
GRAMMAR = "root ::= [a-z]*"  # random weights write bytes that are no text otherwise
TEXTS = {
    "code": "mend this code number {n}",
    "prose": "write an essay about number {n}",
    "short": "say how old number {n} is",
    "default": "good morning, number {n}",
    "long_doc": "number {n} " + "hello " * 175,
}
DEVICES = {"code": "vulkan"}  # the rest goes to the default, the cpu
CONVERSATION = 32 * 1024  # bytes of a long one


@contextlib.contextmanager
def serving(
    place: Path, log_name: str, *words: str, **variables: str
) -> Iterator[tuple[int, Path]]:
    """Run `1bit serve` until it is ready; give its port and its log."""
    port, log = _bench.free_port(), place / f"{log_name}.log"
    command = [_bench.program("1bit"), "serve", "-p", str(port), *words]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=_bench.environment(place, **variables)
        )
    try:
        end_s = time.monotonic() + READY_S
        while "ready on" not in log.read_text():
            if process.poll() is not None or time.monotonic() > end_s:
                sys.exit(f"1bit serve did not become ready:\n{log.read_text()}")
            time.sleep(0.05)
        yield port, log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def ask(
    connection: http.client.HTTPConnection, body: dict[str, Any], path: str = "/v1/chat/completions"
) -> tuple[int, str, dict[str, Any], float]:
    """Return status, route, body and milliseconds of one request."""
    data = json.dumps(body)
    began_s = time.perf_counter()
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    text = reply.read()
    took_ms = (time.perf_counter() - began_s) * 1000
    return reply.status, reply.headers.get("X-1bit-Route", ""), json.loads(text), took_ms


def chat(text: str, **more: Any) -> dict[str, Any]:
    """Return the body of a chat request."""
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def scorer(place: Path) -> dict[str, str]:
    """Return the settings of the scripted scorer and of the policy."""
    classes = {kind: {"device": device, "why": "to show it"} for kind, device in DEVICES.items()}
    policy = place / "policy.json"
    policy.write_text(json.dumps({"default": "cpu", "classes": classes}))
    command = [sys.executable, str(SCRIPTED), "--port", "{port}"]
    return {
        "ONEBIT_LAYA_SCORER": "http",
        "ONEBIT_LAYA_COMMAND": shlex.join(command),
        "ONEBIT_LAYA_POLICY": str(policy),
    }


# ------------------------------------------------------------------------------- real backends


def configuration(place: Path) -> tuple[Path, dict[str, str]]:
    """Write the configuration of two real backends; return it and device to model id."""
    program, model = machine.embedded()
    tiny = _bench.tiny_model(place)
    file = place / "serve.toml"
    file.write_text(
        f"""
[backend]
llama_server = {json.dumps(program)}
ctx_size = 2048
parallel = 1
args = ["--threads", "1"]
[warmup]
prompt_tokens = 64
[[backends]]
device = "cpu"
alias = "smollm2"
model = {json.dumps(model)}
[[backends]]
device = "vulkan"
alias = "tiny"
model = {json.dumps(str(tiny))}
lazy = true
env = {{ GGML_VK_VISIBLE_DEVICES = "0" }}
"""
    )
    return file, {"cpu": "smollm2", "vulkan": "tiny"}


def mixed(place: Path, count: int) -> tuple[list[Table], list[Claim], dict[str, Any]]:
    """Send mixed requests to two real backends, three equal ones of the lazy device first."""
    file, ids = configuration(place)
    with serving(place, "mixed", "--config", str(file), **scorer(place)) as (port, log):

        def one(number: int, kind: str) -> dict[str, Any]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_S)
            body = chat(TEXTS[kind].format(n=number), max_tokens=TOKENS)
            if kind in DEVICES:
                body |= {"grammar": GRAMMAR, "cache_prompt": False}  # shapes alike
            status, route, reply, took_ms = ask(connection, body)
            connection.close()
            device = DEVICES.get(kind, "cpu")
            words = route.split()
            right = (
                len(words) == 3  # noqa: PLR2004 - class, confidence, device
                and (words[0], words[2]) == (kind, device)
                and reply.get("model") == ids[device]
            )
            timings = reply.get("timings", {})
            return {
                "kind": kind,
                "ok": status == OK,
                "right": right,
                "took_ms": took_ms,
                "own_ms": timings.get("prompt_ms", 0) + timings.get("predicted_ms", 0),
            }

        kinds = [kind for _, kind in zip(range(count), list(TEXTS) * count, strict=False)]
        first = [one(10 + number, "code") for number in range(3)]
        with ThreadPoolExecutor(4) as pool:
            rest = list(pool.map(one, range(100, 100 + count - 3), kinds[3:]))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_S)
        connection.request("GET", "/v1/status")
        status = json.loads(connection.getresponse().read())
    text = log.read_text()
    found = [*first, *rest]
    starts = [len(re.findall(rf"{name} on \S+ \(", text)) for name in ids.values()]
    picked = text.find("picked by laya")
    warmed = text.find("warm-up request on port", picked)
    rows = []
    for kind in TEXTS:
        of_kind = [one for one in found if one["kind"] == kind]
        rows.append(
            (
                kind,
                DEVICES.get(kind, "cpu"),
                str(len(of_kind)),
                str(sum(one["right"] for one in of_kind)),
                _bench.median_and_range([one["took_ms"] for one in of_kind], 0),
            )
        )
    own = [one["own_ms"] for one in first]
    claims = [
        Claim("requests that failed", sum(not one["ok"] for one in found), 0),
        Claim("replies without the right route or device", sum(not r["right"] for r in found), 0),
        Claim("most starts of a backend", max(starts), 1),
        Claim("lazy starts without a warm-up before the first reply", float(warmed < picked), 0),
        Claim("request 1 on the lazy device / the better of 2-3", own[0] / min(own[1:]), 1.25),
    ]
    columns = ("class", "device", "requests", "right", "ms, median (range)")
    notes = (
        "request 1, 2, 3 of the lazy device by its own timings: "
        + ", ".join(f"{ms:.0f} ms" for ms in own),
    )
    table = Table(f"{len(found)} mixed requests, four at once", columns, tuple(rows), notes)
    return [table], claims, {"mixed": found, "status": status["laya"]}


# ------------------------------------------------------------------------------- the decision


def later_turn(first: str, size_bytes: int = 0) -> dict[str, Any]:
    """Return a body whose conversation began with a text, at least so long."""
    body = chat(first, max_tokens=1)
    turns = [
        {"role": "assistant", "content": "I see. " * 20},
        {"role": "user", "content": "Please go on. " * 10},
    ]
    body["messages"] += turns * max(1, size_bytes // len(json.dumps(turns)))
    return body


def costs(place: Path, rounds: int) -> tuple[list[Table], dict[str, Any]]:
    """Time requests in turns; return the table and all times."""
    fake = _bench.program("1bit-fake-llama")
    model = str(_bench.tiny_model(place))
    devices = "ctx_train=131072 devices='HRX0: one (1024 MiB, 1024 MiB free)'"
    common = ("-m", model, "--llama-server", fake)
    wish = scorer(place)
    policy = Path(wish["ONEBIT_LAYA_POLICY"])
    policy.write_text(json.dumps({"default": "hrx"}))  # one backend: only the decision differs
    times: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        fake_env = {"FAKE_LLAMA": devices}
        plain, _ = stack.enter_context(
            serving(place, "plain", *common, "--device", "hrx", **fake_env)
        )
        routed, _ = stack.enter_context(
            serving(place, "routed", *common, "--device", "auto", **fake_env, **wish)
        )
        doors = {
            name: http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            for name, port in (("plain", plain), ("routed", routed))
        }
        doors["routed"].request("GET", "/v1/status")
        told = json.loads(doors["routed"].getresponse().read())
        own = http.client.HTTPConnection("127.0.0.1", told["laya"]["scorer"]["port"], timeout=60)

        def timed(name: str, door: http.client.HTTPConnection, body: dict[str, Any]) -> None:
            status, _, _, took_ms = ask(door, body)
            if status != OK:
                sys.exit(f"a request was answered {status}")
            times.setdefault(name, []).append(took_ms)

        for number in range(-20, rounds):
            first = f"mend this code number {number}"
            short, long = later_turn(first), later_turn(first, CONVERSATION)
            timed("unrouted", doors["plain"], chat(first, max_tokens=1))
            timed("first turn", doors["routed"], chat(first, max_tokens=1))
            timed("unrouted later turn", doors["plain"], short)
            timed("later turn", doors["routed"], short)
            timed("unrouted 32 KiB", doors["plain"], long)
            timed("later turn, 32 KiB", doors["routed"], long)
            began_s = time.perf_counter()
            own.request("POST", "/v1/systemone", json.dumps(laya.question(first)))
            own.getresponse().read()
            own.close()
            times.setdefault("scorer", []).append((time.perf_counter() - began_s) * 1000)
            if number == -1:
                times.clear()  # what was first paid for is not what is measured
    pairs = (
        ("first turn of a conversation", "first turn", "unrouted"),
        ("later turn", "later turn", "unrouted later turn"),
        ("later turn of a conversation of 32 KiB", "later turn, 32 KiB", "unrouted 32 KiB"),
    )
    rows = []
    for label, arm, against in pairs:
        added = [one - other for one, other in zip(times[arm], times[against], strict=True)]
        rows.append((label, *(_two(times[name]) for name in (against, arm)), _two(added)))
    rows.append(("the scripted scorer alone, asked directly", "-", _two(times["scorer"]), "-"))
    columns = ("request", "unrouted ms", "routed ms", "added ms")
    notes = (
        f"median / p99 of {rounds} rounds in turns; added is routed less unrouted of one round",
        "the scorer is a Python script that knows keywords: a real one takes its own time",
    )
    return [Table("What a decision adds", columns, tuple(rows), notes)], {"times_ms": times}


def _two(values: list[float]) -> str:
    found = score.spread(values)
    return f"{found.median:.2f} / {found.p99:.2f}" if found else "-"


def main() -> None:
    """Measure, and write the report."""
    parser = _bench.options(__doc__)
    parser.add_argument("--requests", type=int, default=200, help="mixed requests (200)")
    parser.add_argument("--rounds", type=int, default=1000, help="rounds of the timing (1000)")
    parser.add_argument("--only", choices=("devices", "cost"), help="one of the two parts")
    asked = parser.parse_args()
    with _bench.alone(NAME) as place:
        load = os.getloadavg()[0]
        tables: list[Table] = []
        claims: list[Claim] = []
        result: dict[str, Any] = {}
        if asked.only != "cost":
            print("measure_routing: real backends ...", file=sys.stderr)
            shown, claims, result = mixed(place, asked.requests)
            tables += [*shown, _bench.claim_table(claims)]
        if asked.only != "devices":
            print("measure_routing: what a decision costs ...", file=sys.stderr)
            shown, numbers = costs(place, asked.rounds)
            tables += shown
            result |= numbers
        result["claims"] = _bench.outcomes(claims)
        _bench.write(NAME, tables, _bench.about(load), result)
    if asked.check and any(claim.outcome != "pass" for claim in claims):
        sys.exit(1)


if __name__ == "__main__":
    main()
