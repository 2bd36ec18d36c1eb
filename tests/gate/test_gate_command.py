"""`1bit gate` as a user meets it: exit codes, messages, interrupts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from onebit_serve.live.device_lock import device_lock

COMMAND = (
    sys.executable,
    "-c",
    "import sys; from onebit_serve.cli import main; sys.exit(main())",
    "gate",
)
DEADLINE_S = 60


@pytest.fixture
def command(gate, tmp_path, monkeypatch):
    """Return a function that starts the command on the tiny model."""
    monkeypatch.setenv("ONEBIT_LOCK_DIR", str(tmp_path))
    config = tmp_path / "gate.toml"
    config.write_text(gate.text)
    report = tmp_path / "report"
    started = []

    def start(*arguments, binary=""):
        process = subprocess.Popen(
            [
                *COMMAND,
                *("--config", str(config), "--profile", "tiny", "--report", str(report)),
                *("--binary", binary or gate.real, *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:  # where the test ended before they did
        process.kill()
        process.communicate()


def end(process):
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def test_a_run_prints_a_line_a_check_a_summary_and_where_the_report_is(command, tmp_path):
    code, out, err = end(command("quick", "--check", "kat"))
    assert code == 0, out + err
    lines = out.splitlines()
    assert lines[0].startswith("PASS    tiny kat ")
    assert lines[1] == "gate: 1 passed, 0 failed, 0 not run; all 1 checks passed"
    assert lines[2] == f"gate: report in {tmp_path / 'report'}"
    assert "gate: tiny kat (1 of 1, 0:0" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--model", "nobody"], "nobody"),
        (["--check", "cat"], "cat"),
        (["--config", "/no/such.toml"], "/no/such.toml"),
        (["--binary", "/no/such/program"], "/no/such/program"),
        (["--report", "/proc/report"], "/proc/report"),
    ],
)
def test_usage_errors_are_exit_2_with_a_message_and_no_traceback(command, arguments, word):
    code, out, err = end(command("quick", *arguments))
    assert code == 2, out + err
    assert word in err
    assert "Traceback" not in err


def test_a_folder_with_other_files_is_not_taken_for_a_report(command, tmp_path):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "thesis.txt").write_text("years of work")
    code, _, err = end(command("quick"))
    assert code == 2
    assert "holds other files" in err


def test_a_device_in_use_is_exit_4_and_names_its_user(command, tmp_path):
    with device_lock("cpu", "1bit bench-serve", str(tmp_path)):
        code, _, err = end(command("quick"))
    assert code == 4
    assert "1bit bench-serve" in err


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def processes_of(word):
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        said = process.info["cmdline"] or []
        if any(word in argument for argument in said) and process.info["status"] != "zombie":
            found.append(process)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_gate_leaves_a_readable_report_and_no_process(
    command, gate, tmp_path, number
):
    binary = gate.binary("none")
    process = command(
        "quick", "--check", "kat", "--check", "warm", "--check", "reuse", binary=binary
    )
    first = process.stdout.readline()
    assert "tiny kat" in first
    process.send_signal(number)
    code, out, err = end(process)
    report = json.loads((tmp_path / "report" / "report.json").read_bytes())
    assert code == 4, out + err
    assert report["interrupted"]
    assert {r["check"] for r in report["results"]} == {"kat", "reuse", "warm"}
    assert report["results"][-1]["finding"]["reason"] == "interrupted"
    assert "Interrupted before its end" in (tmp_path / "report" / "report.md").read_text()
    assert "Traceback" not in err
    assert processes_of(binary) == []


def test_a_killed_gate_leaves_its_results_so_far_and_no_process(command, gate, tmp_path):
    binary = gate.binary("none")
    process = command("quick", "--check", "kat", "--check", "warm", binary=binary)
    assert "tiny kat" in process.stdout.readline()
    process.kill()
    end(process)
    line = (tmp_path / "report" / "results.jsonl").read_text().splitlines()[0]
    assert json.loads(line)["check"] == "kat"
    wait_for(lambda: processes_of(binary) == [])


def test_a_second_interrupt_ends_it_at_once_also_when_a_server_does_not_stop(
    command, fake_llama, tmp_path, monkeypatch
):
    monkeypatch.setenv("FAKE_LLAMA", "term=ignore first=60")
    link = tmp_path / "llama-server-that-stays"
    link.symlink_to(fake_llama)
    process = command("quick", "--check", "warm", binary=str(link))
    log = tmp_path / "report" / "tiny" / "warm-serve.log"
    wait_for(lambda: log.exists() and "ready on" in log.read_text())
    process.send_signal(signal.SIGINT)
    wait_for(lambda: "stopping" in log.read_text())
    process.send_signal(signal.SIGINT)
    code, _, err = end(process)
    assert code == 130, err
    wait_for(lambda: processes_of(str(link)) == [])
