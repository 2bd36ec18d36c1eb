"""A gate over tiny or small models, with a llama-server that may have a fault."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
import trio

from onebit_serve.core.gate.config import parse, select
from onebit_serve.gate.evidence import Evidence
from onebit_serve.gate.run import Order, run

FAULTY = Path(__file__).parent / "faulty_llama.py"

TINY = """
[profiles.tiny]
quick = ["kat", "kld", "reuse"]
full = ["ring", "ops", "placement", "kat", "kld", "needle", "reuse", "warm"]
[limits]
ready_s = 60
request_s = 60
stop_s = 10
[kat]
tokens = 16
min_lead = 0.001
questions = [{ name = "one", user = "Say something." }, { name = "two", user = "And then?" }]
[kld]
positions = 12
top_k = 64
limits = { mean = 0.002, p99 = 0.02, largest = 0.05, top1 = 1.0 }
texts = [{ name = "prose", text = "The ferry was late because of the wind from the west." }]
[reuse]
prefix_tokens = 200
[warm]
loads = 1
prompt_tokens = 64
decode_tokens = 8
limits = { prefill = 0.9, decode = 0.9 }
[needle]
tokens = 200
depths = [0.1, 0.5, 0.9]
reply_tokens = 16
[[needle.facts]]
text = "The code of the safe is 7394."
question = "What is the code of the safe?"
answer = "7394"
[[models]]
name = "tiny"
profile = "tiny"
model = "MODEL"
device = "cpu"
ctx_size = 2048
args = ["-np", "1", "-t", "1"]
"""


@dataclasses.dataclass
class Told:
    """What one gate run came to."""

    code: int
    lines: list[str]
    folder: Path

    @property
    def statuses(self) -> dict[str, str]:
        report = json.loads((self.folder / "report.json").read_bytes())
        return {each["check"]: each["finding"]["status"] for each in report["results"]}

    def reason(self, check: str) -> str:
        report = json.loads((self.folder / "report.json").read_bytes())
        return next(r["finding"]["reason"] for r in report["results"] if r["check"] == check)


class Gate:
    """Runs gates in one folder."""

    def __init__(self, folder: Path, real: str, model: str) -> None:
        self.folder = folder
        self.real = real
        self.text = TINY.replace("MODEL", model)
        self.model = model
        self.env = dict(os.environ)
        self._runs = 0

    def use_model(self, path: object) -> None:
        self.text = self.text.replace(self.model, str(path))
        self.model = str(path)

    def binary(self, fault: str = "none") -> str:
        path = self.folder / f"llama-server-{fault.replace(':', '-').replace('/', '_')}"
        path.write_text(
            "#!/bin/sh\n"
            'case " $* " in\n'
            f'*" --port "*) exec "{sys.executable}" "{FAULTY}" "{fault}" "{self.real}" "$@" ;;\n'
            f'*) exec "{self.real}" "$@" ;;\n'
            "esac\n"
        )
        path.chmod(0o755)
        return str(path)

    async def run(self, *checks: str, binary: str = "", record: bool = False) -> Told:
        self._runs += 1
        folder = self.folder / f"report-{self._runs}"
        gate = parse(self.text, "gate.toml", self.env)
        chosen = select(gate, "quick", "tiny", (), checks)
        lines: list[str] = []
        order = Order(
            "quick", chosen, self.folder / "references", binary or self.real, record=record
        )
        evidence = Evidence(folder)
        code = await run(order, evidence, self.env, tell=lines.append, progress=lambda _: None)
        return Told(code, lines, folder)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory, real_llama_server, tiny_models):
    """Record the tiny model's reference once."""
    gate = Gate(
        tmp_path_factory.mktemp("reference"),
        real_llama_server,
        str(tiny_models / "tiny-llama.gguf"),
    )
    gate.env |= {"XDG_STATE_HOME": str(gate.folder), "XDG_CACHE_HOME": str(gate.folder)}

    async def record() -> Told:
        return await gate.run("kat", "kld", record=True)

    told = trio.run(record)
    assert told.code == 0, told.lines
    return (gate.folder / "references" / "tiny.json").read_bytes()


@pytest.fixture
def gate(tmp_path, real_llama_server, tiny_models, recorded):
    """Return a gate over the tiny model with its reference."""
    gate = Gate(tmp_path, real_llama_server, str(tiny_models / "tiny-llama.gguf"))
    (tmp_path / "references").mkdir()
    (tmp_path / "references" / "tiny.json").write_bytes(recorded)
    return gate
