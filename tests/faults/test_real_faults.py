"""The same faults on a real llama-server with a tiny model."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from served import Served, wait_for

Begin = Callable[..., Served]


@pytest.fixture
def begin(real_llama_server: str, tmp_path: Path) -> Iterator[Begin]:
    """Start a server whose one backend is a real llama-server on the CPU, warmed up."""
    started: list[Served] = []

    def start(model: str, **keys: float) -> Served:
        settings = "".join(f"{key} = {value}\n" for key, value in keys.items())
        (tmp_path / "serve.toml").write_text(
            f'[server]\nstop_s = 3\n[warmup]\ndevices = ["cpu"]\n[backend]\nname = "a"\n'
            f'alias = "a"\nmodel = "{model}"\ndevice = "cpu"\nctx_size = 8192\nparallel = 2\n'
            f'llama_server = "{real_llama_server}"\n{settings}'
        )
        started.append(Served(tmp_path, "--config", str(tmp_path / "serve.toml")))
        return started[-1].ready()

    yield start
    for served in started:
        served.stop()


def test_a_real_backend_that_is_killed_while_it_streams_comes_back(begin, model, row) -> None:
    served = begin(model)
    for n, number in enumerate((signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)):
        stream = served.stream("a", max_tokens=8000, ignore_eos=True).begun()
        pid = served.kill("a", number)
        began_s = time.monotonic()
        assert stream.end() in ("error event", "cut")
        after = served.wait_state("a", "ready", restarts=n + 1)
        ready_s = time.monotonic() - began_s
        assert after["pid"] != pid
        assert after["ended"] == f"crashed (signal {number.name})"
        assert served.ask("a").status == 200
        row(f"{number.name} (real)", "ready, streaming", "error event", "restarted", ready_s)


def test_a_real_backend_that_is_stopped_and_continued_goes_on(begin, model, row) -> None:
    served = begin(model)
    stream = served.stream("a", max_tokens=300, ignore_eos=True).begun()
    pid = served.kill("a", signal.SIGSTOP)
    os.kill(pid, signal.SIGCONT)
    assert stream.end() == "answered"
    assert served.view("a")["pid"] == pid
    row("stopped and continued (real)", "ready, streaming", "answered", "goes on")


def test_a_real_backend_that_stands_still_is_replaced(begin, model, row) -> None:
    served = begin(model, hang_s=2)
    stream = served.stream("a", max_tokens=8000, ignore_eos=True).begun()
    served.kill("a", signal.SIGSTOP)
    began_s = time.monotonic()
    assert stream.end() in ("error event", "cut")
    served.wait_state("a", "ready", restarts=1)
    ready_s = time.monotonic() - began_s
    assert served.ask("a").status == 200
    row("stopped for good (real)", "ready, streaming", "error event", "restarted", ready_s)


@pytest.mark.parametrize("what", ["deleted", "cut off"])
def test_a_model_file_that_breaks_is_named_and_a_repaired_one_is_taken(
    begin, model, tmp_path, row, what
) -> None:
    path = Path(shutil.copy(model, tmp_path / "mine.gguf"))
    served = begin(str(path))
    if what == "deleted":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 2)
    served.kill("a")
    seen = served.wait_view("a", lambda v: "while loading" in v.get("cause", ""))
    assert "mine.gguf" in seen["cause"], seen
    shutil.copy(model, path)
    wait_for(lambda: served.view("a")["state"] == "ready", "the repaired model")
    assert served.ask("a").status == 200
    row(
        f"model file {what} (real)",
        "ready, idle",
        "waits, then answered",
        "restarted when repaired",
    )


@pytest.mark.slow
def test_a_prefill_longer_than_hang_s_is_no_hang_on_a_real_backend(begin, smollm2, row) -> None:
    served = begin(smollm2, hang_s=0.5)
    answer = served.ask("a", "one two three four five six seven eight " * 60)
    assert answer.status == 200
    assert answer.took_s > 0.5, "too fast to show anything"
    assert served.view("a")["restarts"] == 0
    row("a prefill longer than hang_s (real)", "ready, no byte yet", "answered", "goes on")
