"""Run `1bit serve`, and once it is ready ask it a first question.

    python scripts/first_answer.py 1bit serve --embedded -p 8000

The server stays in the foreground, its exit code is this program's, and a signal that reaches this
program is passed on once, so Ctrl-C stops the server as if it had been started by hand.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import urllib.request
from types import FrameType

__all__ = ["main"]

QUESTION = "Name three colors."
NEXT_QUESTION = "Name three animals."
ANSWER_LIMIT_S = 120.0
READY = re.compile(r"ready on (http://\S+)")


def body(question: str) -> str:
    return json.dumps(
        {"messages": [{"role": "user", "content": question}], "max_tokens": 64, "temperature": 0}
    )


def ask(url: str, question: str) -> str:
    """Return the server's answer, or why there is none."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=body(question).encode(),
        headers={"Content-Type": "application/json"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=ANSWER_LIMIT_S) as reply:
            answer: str = json.load(reply)["choices"][0]["message"]["content"]
    except (OSError, ValueError, LookupError) as error:
        return f"(no answer: {error})"
    return answer.strip()


def curl(url: str, question: str) -> str:
    return (
        f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{body(question)}'"
    )


def main(command: list[str]) -> int:
    """Run the command until it ends; return its exit code."""
    setpriv = shutil.which("setpriv")
    tied = [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []
    # A session of its own: a terminal's Ctrl-C must reach it once, through us, and not twice.
    child = subprocess.Popen(
        [*tied, *command], stderr=subprocess.PIPE, text=True, start_new_session=True
    )

    def pass_on(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    for line in child.stderr or ():
        sys.stderr.write(line)
        sys.stderr.flush()
        ready = READY.search(line)
        if ready:
            url = ready[1]
            answer = textwrap.indent(ask(url, QUESTION), "    ")
            print(f"\n  {QUESTION}\n\n{answer}\n\nAsk the next question:\n")
            print(f"  {curl(url, NEXT_QUESTION)}\n", flush=True)
    code = child.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
