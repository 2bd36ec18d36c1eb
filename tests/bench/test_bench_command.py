from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import msgspec
import psutil
import pytest
import trio
import trio.testing
from tiny_server import TinyServer

from onebit_serve.cli.bench import command
from onebit_serve.cli.bench_output import Progress, measured
from onebit_serve.core import results
from onebit_serve.core.errors import NotRunError, OnebitError, UsageError
from onebit_serve.core.results import Request, Results
from onebit_serve.live.device_lock import device_lock
from onebit_serve.live.files import write_whole

TINY = str(Path(__file__).parent / "tiny_server.py")
SERVER = f"{sys.executable} {TINY}"
ALONE = (
    "import sys; from onebit_serve.cli.bench import command;"
    "sys.exit(command.main(args=sys.argv[1:], standalone_mode=False))"
)


def bench(*words):
    """Run the command here and return what it returns; errors of ours are raised."""
    return command.main(args=list(words), prog_name="bench-serve", standalone_mode=False)


def write(path, tag, typical, loads=5, **more):
    fields = {"model": "m", "prompts": "p", "concurrency": 1} | more
    requests = tuple(
        Request(run=f"{tag}{n}", tag=tag, load=n, ttft_ms=typical + n, **fields)
        for n in range(1, loads + 1)
    )
    path.write_text(results.write_csv(Results(requests=requests)), newline="")
    return str(path)


def test_a_table_is_printed_and_every_request_is_written(tmp_path, capsys):
    out = tmp_path / "a.csv"
    with TinyServer() as server:
        words = ["--url", server.url, "--prompts", "short", "--concurrency", "1,2", "--tag", "x"]
        assert bench(*words, "--repeats", "2", "--output", str(out)) == 0
    shown = capsys.readouterr().out
    assert "TTFT ms" in shown
    assert "settings: prompts short" in shown
    found = results.read(out.read_bytes().decode(), name="a")
    assert len(found.requests) == 6
    assert {r.tag for r in found.requests} == {"x"}
    assert found.runs[0].settings["max_tokens"] == 128


@pytest.mark.parametrize("form", ["csv", "json", "md", "table"])
def test_every_form_can_be_printed(form, capsys):
    with TinyServer() as server:
        bench("--url", server.url, "--prompts", "short", "--repeats", "1", "--format", form)
    text = capsys.readouterr().out
    if form in ("csv", "json"):
        assert len(results.read(text, name="a").requests) == 1
    else:
        assert text.startswith("### times" if form == "md" else "times:")


def test_a_system_prompt_is_sent_and_no_count_warms_the_cache(tmp_path):
    file = tmp_path / "s.txt"
    file.write_text("  Be brief.\n")
    with TinyServer() as server:
        words = ["--url", server.url, "--prompts", "short", "--repeats", "1"]
        bench(*words, "--system-prompt-file", str(file))
        assert [h.split(" ")[0] for h in server.heads].count("POST") == 1
        bench(*words, "--skip-preflight-token-count")
        assert [h.split(" ")[0] for h in server.heads].count("POST") == 2
        bench(*words)
        assert [h.split(" ")[0] for h in server.heads].count("POST") == 4
    assert server.bodies[0]["messages"][0] == {"role": "system", "content": "  Be brief.\n"}


def test_prompts_come_from_a_file_too(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('["hello"]')
    with TinyServer() as server:
        words = ["--url", server.url, "--no-unique-prefix", "--repeats", "1"]
        bench(*words, "--prompts", str(file))
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]


def test_the_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text("secret\n")
    words = ["--prompts", "short", "--repeats", "1"]
    with TinyServer() as server:
        bench("--url", server.url, *words, "--api-key-file", str(file))
        assert "Authorization: Bearer secret" in server.heads[-1]
        monkeypatch.setenv("ONEBIT_API_KEY", "other")
        bench("--url", server.url, *words)
        assert "Authorization: Bearer other" in server.heads[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--url is missing"),
        (["--url", "http://127.0.0.1:1", "--concurrency", "0"], "--concurrency 0"),
        (["--url", "http://127.0.0.1:1", "--concurrency", "1,x"], "not a list of numbers"),
        (["--url", "http://127.0.0.1:1", "--prompts", "none.json"], "No such file"),
        (["--url", "http://127.0.0.1:1", "--system-prompt-file", "none"], "No such file"),
        (["--url", "http://127.0.0.1:1", "--output", "/none/a.csv"], "no file can be written"),
        (["--url", "http://127.0.0.1:1", "--output", "a.xls"], "names no form"),
        (["--url", "https://127.0.0.1:1"], "only http"),
        (["ab", "--arm", "a=", "--arm", "a="], "two arms of one name"),
        (["ab"], "no --arm"),
        (["--output", "a.csv", "ab", "--arm", "a="], "--output before ab"),
        (["--repeats", "3", "compare", "a.csv"], "--repeats before compare"),
        (["ab", "--arm", "a=", "--model", "x/m.gguf", "--model", "y/m.gguf"], "files of one name"),
        (["compare"], "nothing to compare"),
        (["compare", "none.csv"], "No such file"),
    ],
)
def test_bad_input_is_a_usage_error(words, said):
    with pytest.raises(UsageError, match=said):
        bench(*words)


def test_a_wrong_value_of_an_option_is_clicks_usage_error():
    with pytest.raises(click.UsageError):
        bench("--url", "http://127.0.0.1:1", "--repeats", "0")


def test_an_unreachable_server_is_exit_1():
    server = TinyServer()
    server.close()
    with pytest.raises(OnebitError, match="cannot connect") as caught:
        bench("--url", server.url, "--prompts", "short")
    assert caught.value.exit_code == 1


def test_what_was_measured_before_the_server_died_is_written(tmp_path):
    out = tmp_path / "a.json"
    with TinyServer(die_after=2) as server, pytest.raises(OnebitError, match="went away"):
        bench("--url", server.url, "--prompts", "short", "--repeats", "9", "--output", str(out))
    found = results.read(out.read_text(), name="a")
    assert [r.error for r in found.requests] == ["", "", "refused"]
    assert not found.runs[0].complete


def test_no_success_at_all_is_exit_1_and_the_errors_are_written(tmp_path):
    out = tmp_path / "a.csv"
    with TinyServer(fault="cut") as server, pytest.raises(OnebitError, match="no request succ"):
        bench("--url", server.url, "--prompts", "short", "--output", str(out))
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["error"] for row in rows] == ["", "cut", "cut", "cut"]


def interrupted(words, until):
    """Start the command as a process, interrupt it at the line that `until` accepts."""
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_ctrl_c_writes_what_there_is_and_exits_0(tmp_path):
    out = tmp_path / "a.csv"
    with TinyServer(first_s=0.01) as server:

        def third_request():
            deadline_s = time.monotonic() + 30
            while len(server.bodies) < 3 and time.monotonic() < deadline_s:
                time.sleep(0.005)

        words = ["--url", server.url, "--prompts", "short", "--repeats", "100000"]
        code, _, err = interrupted([*words, "--output", str(out)], third_request)
    assert code == 0
    assert "requests were measured" in err
    found = results.read(out.read_bytes().decode(), name="a")
    assert len(found.requests) >= 2
    assert found.runs[0].note == "interrupted"


def test_a_second_ctrl_c_kills_at_once_what_does_not_stop():
    words = ["ab", "--arm", "a=--deaf", "--prompts", "short", "--repeats", "100000", "--no-noise"]
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE, *words, "--server", SERVER],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        deadline_s = time.monotonic() + 30
        started = []
        while not started and time.monotonic() < deadline_s:
            time.sleep(0.01)
            started = [
                child
                for child in psutil.Process(process.pid).children()
                if child.net_connections("tcp")
            ]
        process.send_signal(signal.SIGINT)
        said = (process.stderr.readline() for _ in range(2))
        assert any("once more kills" in line for line in said)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    _, alive = psutil.wait_procs(started, timeout=10)
    assert started
    assert not alive


def test_a_second_ctrl_c_writes_what_there_is_before_it_exits(tmp_path, monkeypatch):
    out = tmp_path / "a.csv"
    there = Results(requests=(Request(run="r", tag="a", model="m", prompts="p", concurrency=1),))
    exits = []
    monkeypatch.setattr(os, "_exit", lambda code: exits.append((code, out.read_bytes().decode())))

    async def stubborn():
        with trio.CancelScope(shield=True):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                await trio.testing.wait_all_tasks_blocked(0.05)

    measured(stubborn, lambda: there, out, "csv", Progress(1), lambda: exits.append("killed"))
    assert exits == ["killed", (130, results.write_csv(there))]


def test_cold_against_warm_is_compared(tmp_path, capsys):
    cold = write(tmp_path / "cold.csv", "", 300)
    warm = write(tmp_path / "warm.csv", "", 100)
    assert bench("compare", cold, warm) == 0
    shown = capsys.readouterr().out
    assert "against cold" in shown
    assert "faster" in shown


def test_files_of_one_name_are_arms_of_their_paths(tmp_path, capsys):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old = write(tmp_path / "old" / "ttft.csv", "", 300)
    new = write(tmp_path / "new" / "ttft.csv", "", 100)
    assert bench("compare", old, new, "--format", "json") == 0
    (gain,) = json.loads(capsys.readouterr().out)["gains"]
    assert (gain["base"], gain["tag"]) == (old, new)


@pytest.mark.parametrize(("least", "code"), [("1.2", 0), ("2.9", 0), ("3.5", 1)])
def test_fail_under_is_exit_1(tmp_path, capsys, least, code):
    cold = write(tmp_path / "cold.csv", "", 300)
    warm = write(tmp_path / "warm.csv", "", 100)
    assert bench("compare", cold, warm, "--fail-under", least) == code
    assert ("fail: warm m p x1: 2.94x" in capsys.readouterr().err) == bool(code)


def test_what_was_not_measured_does_not_pass(tmp_path, capsys):
    cold = write(tmp_path / "cold.csv", "", 300)
    warm = write(tmp_path / "warm.csv", "", 100, concurrency=8)
    assert bench("compare", cold, warm, "--fail-under", "0.1") == 1
    assert "not measured: warm" in capsys.readouterr().err


@pytest.mark.parametrize(("bad", "code"), [(1, 0), (9, 1)])
def test_an_arm_that_fails_more_does_not_pass(tmp_path, capsys, bad, code):
    cold = write(tmp_path / "cold.csv", "", 300, loads=50)
    warm = tmp_path / "warm.csv"
    write(warm, "", 100, loads=50)
    found = results.read(warm.read_bytes().decode(), name="warm")
    failed = [msgspec.structs.replace(r, error="cut") for r in found.requests[:bad]]
    every = Results(requests=(*failed, *found.requests[bad:]))
    warm.write_text(results.write_csv(every), newline="")
    assert bench("compare", cold, str(warm), "--fail-under", "1.5") == code
    shown, said = capsys.readouterr()
    assert f"{50 - bad} of 50" in shown
    line = "fail: warm m p x1: 9 of 50 requests failed, and 0 of 50 of cold\n"
    assert said == (line if code else "")


def test_the_arm_against_itself_is_not_held_to_a_limit(tmp_path):
    every = [write(tmp_path / f"{n}.csv", tag, 300 / (1 + n % 2)) for n, tag in enumerate("ab")]
    again = write(tmp_path / "again.csv", "a again", 300)
    assert bench("compare", *every, again, "--fail-under", "1.5") == 0


@pytest.mark.parametrize("form", ["json", "md"])
def test_comparisons_can_be_had_in_other_forms(tmp_path, capsys, form):
    cold = write(tmp_path / "cold.csv", "", 300)
    warm = write(tmp_path / "warm.csv", "", 100)
    bench("compare", cold, warm, "--format", form)
    text = capsys.readouterr().out
    if form == "json":
        assert json.loads(text)["gains"][0]["comparison"]["verdict"] == "faster"
    else:
        assert text.startswith("### TTFT ms, against cold\n\n| model |")


def test_two_files_of_one_tag_are_one_arm_unless_told_otherwise(tmp_path, capsys):
    one = write(tmp_path / "one.csv", "same", 300)
    two = write(tmp_path / "two.csv", "same", 100)
    with pytest.raises(UsageError, match="only one arm") as caught:
        bench("compare", one, two)
    assert "--by-file" in caught.value.hint
    assert bench("compare", one, two, "--by-file") == 0
    assert "against one" in capsys.readouterr().out


def test_a_file_of_another_version_is_exit_2_with_its_name(tmp_path):
    cold = write(tmp_path / "cold.csv", "", 300)
    text = Path(cold).read_text().replace("onebit-bench/1", "onebit-bench/2")
    Path(cold).write_text(text)
    with pytest.raises(UsageError, match=r"cold\.csv: written as onebit-bench/2"):
        bench("compare", cold, cold)


def test_a_plot_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(UsageError, match="--plot"):
        bench("compare", "none.csv", "--plot", str(tmp_path / "a.gif"))


def test_arms_are_compared_with_their_noise(tmp_path, capsys):
    out = tmp_path / "ab.csv"
    words = ["--prompts", "short", "--repeats", "2", "--loads", "1", "--output", str(out)]
    code = bench(
        *("ab", "--arm", "cold=--first 0.05", "--arm", "warm="),
        *(*words, "--server", SERVER, "--", "-m", "M.gguf"),
    )
    assert code == 0
    shown, progress = capsys.readouterr()
    assert progress.splitlines()[0] == "arm cold, load 1 of 1: 1 at once"
    assert "request 1 against the best later request" in shown
    assert "machine noise: cold against itself" in shown
    assert "too few for a verdict" in shown
    found = results.read(out.read_bytes().decode(), name="ab")
    assert {run.tag for run in found.runs} == {"cold", "warm", "cold again"}
    assert found.runs[0].flags == ("--first", "0.05", "-m", "M.gguf")
    assert bench("compare", str(out)) == 0


def test_a_device_that_is_being_measured_is_left_alone():
    words = ("ab", "--arm", "a=", "--server", SERVER, "--", "--device", "cpu")
    with device_lock("cpu", "1bit gate full"), pytest.raises(NotRunError, match="1bit gate full"):
        bench(*words)


def test_a_file_that_cannot_be_replaced_is_printed_instead(tmp_path, capsys, monkeypatch):
    def full(*_args, **_more):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    with TinyServer() as server, pytest.raises(UsageError, match="No space left"):
        bench(
            *("--url", server.url, "--prompts", "short", "--repeats", "1"),
            *("--output", str(tmp_path / "a.csv")),
        )
    assert len(results.read(capsys.readouterr().out, name="a").requests) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_was_measured_is_written_before_tables_and_whatever_ends_it(tmp_path, monkeypatch):
    def broken(*_args, **_more):
        raise ZeroDivisionError

    out = tmp_path / "a.csv"
    with TinyServer() as server:
        words = ["--url", server.url, "--prompts", "short", "--output", str(out)]
        with monkeypatch.context() as patched:
            patched.setattr("onebit_serve.core.report.bench_tables", broken)
            with pytest.raises(ZeroDivisionError):
                bench(*words, "--repeats", "2")
        assert len(results.read(out.read_bytes().decode(), name="a").requests) == 2
        monkeypatch.setattr("onebit_serve.bench.surroundings.files_of", broken)
        with pytest.raises(Exception, match="Trio nursery"):
            bench(*words, "--repeats", "3")
    assert len(results.read(out.read_bytes().decode(), name="a").requests) == 3


def test_a_new_file_gets_the_umasks_mode_and_an_old_one_keeps_its_own(tmp_path):
    new, old, link = (tmp_path / name for name in ("new", "old", "link"))
    old.write_text("before")
    old.chmod(0o604)
    link.symlink_to(old)
    before = os.umask(0o027)
    try:
        write_whole(new, b"now")
        write_whole(link, b"now")
    finally:
        os.umask(before)
    assert (new.stat().st_mode & 0o777, old.stat().st_mode & 0o777) == (0o640, 0o604)
    assert link.is_symlink()
    assert (new.read_text(), old.read_text()) == ("now", "now")


def test_what_is_no_regular_file_is_written_into(tmp_path):
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"now")
        assert os.read(reader, 10) == b"now"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_file_that_is_the_standard_output_gets_no_tables(tmp_path):
    with TinyServer() as server, (tmp_path / "out").open("w+") as out:
        words = ["--url", server.url, "--prompts", "short", "--repeats", "1"]
        command = [sys.executable, "-c", ALONE, *words, "--output", "/dev/stdout"]
        subprocess.run([*command, "--format", "csv"], stdout=out, check=True, timeout=60)
        out.seek(0)
        assert len(results.read(out.read(), name="a").requests) == 1


@pytest.mark.parametrize("asked", [command, command.commands["compare"], command.commands["ab"]])
def test_every_option_stands_in_the_manual(asked):
    manual = (Path(__file__).parents[2] / "docs" / "bench-serve.md").read_text()
    flags = [flag for option in asked.params for flag in (*option.opts, *option.secondary_opts)]
    assert [f for f in flags if f.startswith("--") and f not in manual] == []
