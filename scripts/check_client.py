#!/usr/bin/env python3
"""Check the benchmark's client: what it costs, and whether others measure the same.

    python scripts/check_client.py [--aiperf PATH/TO/aiperf] [--rounds 3]

Three checks, each on a stand-in for llama-server:

* 64 streams of 100 tokens a second for ten seconds: the client's share of a core (under half);
* time to first token against the stand-in's own record of when it sent the first event;
* the same against aiperf (`pip install aiperf`, in an environment of its own), in turns, so that a
  busy machine is busy for both. aiperf wants a tokenizer; it gets one of two words, in a file, and
  no hub is asked.

Exits 1 where a check fails. The first one needs a C compiler and is left out without.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onebit_serve.core import results, score

ROOT = Path(__file__).parent.parent
BENCH = [sys.executable, "-m", "onebit_serve.cli", "bench-serve"]
FIRST_S = 0.2
TOKENS = 16
AT_ONCE = (1, 4)
MOST_CORES = 0.5
MOST_APART = 0.05
WORD_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1}, "unk_token": "<unk>"},
}


@contextmanager
def server(command: list[str], environment: dict[str, str]) -> Iterator[str]:
    """Run a server on a free port until the body is done, and give its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline_s = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def bench(folder: Path, *words: str) -> results.Results:
    """Run `1bit bench-serve` and return what it measured."""
    out = folder / "out.json"
    subprocess.run([*BENCH, *words, "--output", str(out)], check=True, stdout=subprocess.DEVNULL)
    return results.read(out.read_text(encoding="utf-8"), name=str(out))


def client_cores(folder: Path) -> float:
    """Return the client's share of a core at 64 streams of 100 tokens a second."""
    upstream, prompts = folder / "upstream", folder / "prompts.json"
    source = ROOT / "scripts" / "bench_relay" / "upstream.c"
    subprocess.run(["cc", "-O2", "-o", str(upstream), str(source)], check=True)
    prompts.write_text('["chunks=1000 interval_us=10000 "]', encoding="utf-8")
    with server([str(upstream)], {}) as url:
        words = ["--url", url, "--model", "x", "--prompts", str(prompts), "--concurrency", "64"]
        found = bench(folder, *words, "--repeats", "1", "--skip-preflight-token-count")
    usage = next(use for use in found.runs[0].usage if use.role == "client")
    return usage.cpu_s / usage.wall_s


def aiperf_ttft_ms(aiperf: str, folder: Path, url: str, at_once: int, count: int) -> float:
    """Return aiperf's median TTFT in milliseconds."""
    tokenizer, prompts = folder / "tokenizer", folder / "prompts.jsonl"
    tokenizer.mkdir(exist_ok=True)
    (tokenizer / "tokenizer.json").write_text(json.dumps(WORD_TOKENIZER), encoding="utf-8")
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")
    (tokenizer / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    prompts.write_text('{"text": "Why does the sea look blue?"}\n', encoding="utf-8")
    folder_out = folder / "aiperf"
    words = f"profile -m m --endpoint-type chat --streaming -u {url} --tokenizer {tokenizer}"
    words += f" --input-file {prompts} --custom-dataset-type single_turn --request-count {count}"
    words += f" --concurrency {at_once} --extra-inputs max_tokens:{TOKENS} --ui none"
    words += f" --use-server-token-count --artifact-dir {folder_out} --no-gpu-telemetry"
    subprocess.run(
        [aiperf, *words.split(), "--no-server-metrics"], check=True, stdout=subprocess.DEVNULL
    )
    text = (folder_out / "profile_export_aiperf.json").read_text(encoding="utf-8")
    return float(json.loads(text)["time_to_first_token"]["p50"])


def recorded_ms(record: Path, path: str = "/v1/chat/completions") -> list[float]:
    """Return the stand-in's own milliseconds from each request to its first event."""
    arrived: dict[int, float] = {}
    found = []
    for line in record.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["event"] == "request" and event.get("path") == path:
            arrived[event["work"]] = event["time"]
        elif event["event"] == "reply" and event.get("work") in arrived:
            found.append((event["first_event"] - arrived[event["work"]]) * 1000)
    return found


def agreement(aiperf: str | None, folder: Path, at_once: int, rounds: int) -> dict[str, float]:
    """Return the median TTFT in milliseconds by who measured it."""
    record = folder / f"record-{at_once}.jsonl"
    knobs = f"first_byte={FIRST_S} tps=100 rec={record}"
    model = folder / "m.gguf"
    model.write_bytes(b"GGUF")
    command = [sys.executable, "-m", "onebit_serve.fake_llama", "-m", str(model), "-np", "8"]
    ours: list[float] = []
    theirs: list[float] = []
    with server(command, {"FAKE_LLAMA": knobs}) as url:
        for _ in range(rounds):
            words = ["--url", url, "--prompts", "short", "--max-tokens", str(TOKENS)]
            found = bench(folder, *words, "--concurrency", str(at_once), "--repeats", "10")
            ours += [r.ttft_ms for r in found.requests if r.ttft_ms is not None]
            if not theirs:
                record_ms = recorded_ms(record)
            if aiperf:
                theirs.append(aiperf_ttft_ms(aiperf, folder, url, at_once, 10 * at_once))
    said = {"the server's record": score.median(record_ms), "bench-serve": score.median(ours)}
    return said | ({"aiperf": score.median(theirs)} if theirs else {})


def main() -> int:
    """Run the checks and print one line for each."""
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__)[0])
    parser.add_argument("--aiperf", default=shutil.which("aiperf"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory(prefix="onebit-client-") as name:
        folder = Path(name)
        if shutil.which("cc"):
            cores = client_cores(folder)
            good = cores < MOST_CORES
            print(f"64 streams x 100 tokens/s: {cores:.2f} cores, under {MOST_CORES} asked for")
        for at_once in AT_ONCE:
            said = agreement(options.aiperf, folder, at_once, options.rounds)
            ours = said.pop("bench-serve")
            print(f"TTFT at {at_once} at once: bench-serve {ours:.1f} ms")
            for who, value in said.items():
                apart = ours / value - 1
                good = good and abs(apart) < MOST_APART
                print(f"  {who}: {value:.1f} ms, bench-serve is {apart:+.1%} from it")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
