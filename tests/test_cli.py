from __future__ import annotations

import os
import shlex
import signal
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from llama_process import until

from onebit_serve import __version__
from onebit_serve.cli import COMMANDS, NOT_YET, main
from onebit_serve.cli.flags import FLAGS
from onebit_serve.core.config import Config
from onebit_serve.core.errors import BackendError, PortTakenError, UsageError
from onebit_serve.core.presets import PRESETS
from onebit_serve.live import listener, spawn

LLAMA_SERVER = """#!/bin/sh
case "$1" in
  --version) echo 'version: 7 (abcdef0)' ;;
  --list-devices) printf 'Available devices:\\n  Vulkan0: Card (2048 MiB, 1024 MiB free)\\n' ;;
  --help) cat <<'END'
-ngl,  --gpu-layers, --n-gpu-layers N   layers
-fa,   --flash-attn [on|off|auto]       flash attention
-s,    --seed SEED                      seed
--temp, --temperature N                 temperature
--jinja, --no-jinja                     template
--ui,  --webui, --no-ui, --no-webui     page
--api-key KEY                           key
--warmup, --no-warmup                   its own
--reverse-prompt PROMPT                 stop
END
  ;;
esac
"""


def gguf(path: Path) -> Path:
    """Write the header of a model that has nothing but an architecture."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pair = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    length = text("llama.context_length") + struct.pack("<II", 4, 2048)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pair + length)
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a model and a llama-server."""
    gguf(tmp_path / "m.gguf")
    program = tmp_path / "llama-server"
    program.write_text(LLAMA_SERVER)
    program.chmod(0o755)
    monkeypatch.setenv("ONEBIT_LLAMA_SERVER", str(program))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Record what would be bound and run, in order."""
    done: list[object] = []

    def bind(host: str, port: int) -> SimpleNamespace:
        done.append((host, port))
        return SimpleNamespace(close=lambda: done.append("closed"))

    def run(
        plan: object, _access: object, _listener: object, _replan: object, _early: object
    ) -> int:
        done.append(plan)
        return 0

    monkeypatch.setattr(listener, "bind", bind)
    monkeypatch.setattr(spawn, "spawn_eager", lambda _plan: {})
    monkeypatch.setitem(sys.modules, "onebit_serve.serve", SimpleNamespace(run=run))
    return done


def dry_run(capsys: pytest.CaptureFixture[str], line: str) -> str:
    code = main(["serve", "--dry-run", *shlex.split(line)])
    said = capsys.readouterr()
    assert (code, said.err) == (0, "")
    return said.out


def command(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """Return the child's arguments after the alias."""
    text = dry_run(capsys, line).splitlines()[1]
    return text.partition(" --alias ")[2].partition(" ")[2]


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("-m m.gguf", "--device Vulkan0 -ngl 99 --jinja"),
        ("--model m.gguf --device none", "--device none"),
        ("-m m.gguf -dev cpu -c 512 -np 2", "--device none -c 512 -np 2"),
        ("--model=m.gguf --ctx-size=512 --device=cpu", "--device none -c 512"),
        (
            "-m m.gguf --ctx-size 4096 --port 8001 --jinja --no-webui -ngl 99 --host 127.0.0.1",
            "--device Vulkan0 -c 4096 --jinja --no-webui -ngl 99",
        ),
        (
            "-m m.gguf -fa on --temp=0.3 -s -1",
            "--device Vulkan0 -ngl 99 --jinja -fa on --temp 0.3 -s -1",
        ),
        ("-m m.gguf --device cpu --no-warmup", "--device none"),
        ("-m m.gguf --device cpu -- --no-warmup -x", "--device none --no-warmup -x"),
        ("-m m.gguf --device cpu --embeddings", "--device none --embedding -b 2048 -ub 2048"),
        ("-m m.gguf --device cpu --reranking", "--device none --reranking -b 2048 -ub 2048"),
        ("--device cpu --reverse-prompt -p -p 1 -m m.gguf", "--device none --reverse-prompt -p"),
    ],
)
@pytest.mark.usefixtures("place")
def test_a_command_line_for_llama_server_just_works(capsys, line, arguments):
    assert command(capsys, line) == arguments


@pytest.mark.usefixtures("place")
def test_the_served_id_and_the_address_stand_in_the_plan(capsys):
    said = dry_run(capsys, "-m m.gguf -a 'my id' -p 0 --host ::1")
    assert "--alias 'my id'" in said
    assert "http://[::1]:a free port" in said
    assert "vulkan: my id on vulkan (llama-server), chat" in said
    assert "465 prompt tokens, 8 decode steps, at most 300 s; further shapes for 3 s and" in said


@pytest.mark.parametrize("line", ["--no-warmup", "--device cpu"])
@pytest.mark.usefixtures("place")
def test_a_warm_up_that_is_skipped_says_why(capsys, line):
    reason = "off" if line == "--no-warmup" else "cpu"
    assert f"skipped ({reason})" in dry_run(capsys, f"-m m.gguf {line}")


@pytest.mark.usefixtures("place")
def test_the_variable_turns_the_warm_up_off(capsys, monkeypatch):
    monkeypatch.setenv("ONEBIT_NO_WARMUP", "1")
    assert "skipped (off)" in dry_run(capsys, "-m m.gguf")


@pytest.mark.usefixtures("place")
def test_the_environment_that_matters_is_shown_without_secrets(capsys, monkeypatch):
    monkeypatch.setenv("LLAMA_API_KEY", "sesame")
    monkeypatch.setenv("LLAMA_ARG_PORT", "1")
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("GPU_TOKEN", "sesame")
    said = dry_run(capsys, "-m m.gguf")
    assert "without LLAMA_API_KEY" in said
    assert "without LLAMA_ARG_PORT" in said
    assert "GGML_VK_VISIBLE_DEVICES=0 (yours)" in said
    assert "sesame" not in said


def test_flags_win_over_variables_and_those_over_the_file(place, capsys, monkeypatch):
    (place / "s.toml").write_text(
        "[server]\nport = 1\n[backend]\nmodel = 'm.gguf'\nctx_size = 1\nparallel = 1\n"
        "device = 'cpu'\nargs = ['-x']\n"
    )
    monkeypatch.setenv("ONEBIT_BACKEND_CTX_SIZE", "2")
    monkeypatch.setenv("ONEBIT_BACKEND_PARALLEL", "2")
    said = dry_run(capsys, "--config s.toml -np 3 -- -y")
    assert "--device none -c 2 -np 3 -x -y" in said
    assert "http://127.0.0.1:1" in said


@pytest.mark.usefixtures("place")
def test_the_door_is_bound_before_anything_runs(served):
    assert main(["serve", "-m", "m.gguf", "-p", "7", "--host", "localhost"]) == 0
    assert served[0] == ("localhost", 7)
    assert [b.served_id for b in served[1].backends] == ["m"]
    assert len(served) == 2


@pytest.mark.usefixtures("place")
def test_a_dry_run_binds_and_runs_nothing(served, capsys):
    dry_run(capsys, "-m m.gguf")
    assert served == []


def test_check_says_what_was_found_and_gives_the_port_back(place, served, capsys):
    assert main(["check", "-m", "m.gguf"]) == 0
    said = capsys.readouterr().out
    for piece in (
        f"{place}/llama-server",
        "version: 7 (abcdef0)",
        "Vulkan0: Card, 2048 MiB",
        "architecture llama, trained for 2048 tokens",
        "--device Vulkan0 -ngl 99",
    ):
        assert piece in said
    assert served == [("127.0.0.1", 8000), "closed"]


@pytest.mark.usefixtures("served")
def test_check_asks_the_program_now_and_a_start_takes_what_it_said(place, capsys, monkeypatch):
    (place / "bin").mkdir()
    (place / "card").write_text("Vulkan0")
    program = place / "bin" / "llama-server"
    program.write_text(
        LLAMA_SERVER.replace("n  Vulkan0: Card (", "n  %s: Card (").replace(
            "free)\\n' ;;", f"free)\\n' $(cat {place}/card) ;;"
        )
    )
    program.chmod(0o755)
    monkeypatch.setenv("ONEBIT_LLAMA_SERVER", str(program))
    assert main(["check", "-m", "m.gguf"]) == 0
    (place / "card").write_text("ROCm0")
    capsys.readouterr()
    assert "--device Vulkan0" in dry_run(capsys, "-m m.gguf")
    assert main(["check", "-m", "m.gguf"]) == 0
    assert "--device ROCm0" in capsys.readouterr().out
    assert "--device ROCm0" in dry_run(capsys, "-m m.gguf")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("serve", ("no model is named", "-m MODEL.gguf")),
        ("serve -m none.gguf", ("none.gguf", "")),
        ("serve -m .", ("directory", "")),
        ("serve -m text.gguf", ("text.gguf", "")),
        ("serve -m cut.gguf", ("cut.gguf", "")),
        ("serve -m m.gguf --mtp none.gguf", ("none.gguf", "")),
        ("serve -m m.gguf --prot 1", ("no option --prot", "did you mean --port?")),
        ("serve -m m.gguf --temprature 1", ("no option --temprature", "--temperature?")),
        ("serve m.gguf", ("'m.gguf' belongs to no option", "-m")),
        ("serve -m", ("-m needs a value", "1bit serve --help")),
        ("serve -m m.gguf -ngl", ("-ngl needs a value", "llama-server --help")),
        ("serve -m m.gguf -p x", ("-p is 'x', wanted a port", "")),
        ("serve -m m.gguf -p 70000", ("-p is 70000, wanted a port", "")),
        ("serve -m m.gguf --port=-1", ("--port is -1, wanted a port", "")),
        ("serve -m m.gguf -c 4k", ("-c is '4k', wanted a whole number", "")),
        ("serve -m m.gguf --mtp-p-min 2", ("--mtp-p-min is 2", "")),
        ("serve -m m.gguf --alias=", ("--alias is '', wanted a text", "")),
        ("serve -m m.gguf --log-format x", ("--log-format is 'x', wanted plain or json", "")),
        ("serve -m m.gguf --host 0.0.0.0", ("there is no API key", "--allow-remote")),
        ("serve -m m.gguf --lean", ("--lean is not yet supported", "")),
        ("serve -m m.gguf --laya --device cpu", ("nothing to choose from", "--device auto")),
        ("serve -m m.gguf --api-key k", ("--api-key cannot be used", "")),
        ("serve -m m.gguf -- --port 1", ("--port cannot be given", "before `--`")),
        ("serve -m m.gguf -- --alias=x", ("--alias cannot be given", "before `--`")),
        ("serve -m m.gguf --device hrx", ("lists no device hrx; it lists Vulkan0", "")),
        ("serve -m m.gguf --embedding --reranking", ("contradict each other", "choose one")),
        ("serve -m m.gguf --hrx-libhsa /none", ("--hrx-libhsa /none", "")),
        ("serve -m m.gguf --llama-server /none", ("/none", "")),
        ("serve -m m.gguf --device zinc", ("zinc is not on PATH", "--zinc PATH")),
        ("serve -m a/b --device mlx", ("lemon-mlx-server is not on PATH", "--mlx-server PATH")),
        ("serve -m a/b --device mlx --mlx-server /none", ("no program there", "--mlx-server PATH")),
        ("serve --config none.toml", ("there is no such file", "sample")),
        ("serve --config .", ("is a directory", "")),
        ("serve --config latin.toml", ("is not UTF-8 text (byte 11)", "UTF-8")),
        ("serve --config bad.toml", ("bad.toml: [server] has no key prot", "did you mean port?")),
        ("serve --config", ("--config needs a value", "")),
        ("check -m none.gguf", ("none.gguf", "")),
        ("srve", ("there is no command srve", "did you mean serve?")),
        ("--bogus", ("--bogus", "1bit --help")),
        *((f"{name} x", (f"1bit {name} is not yet there", "--help")) for name in NOT_YET),
    ],
)
def test_what_cannot_work_is_two_lines_and_exit_code_2(place, served, capsys, line, says):
    error, hint = says
    (place / "text.gguf").write_text("not a model")
    (place / "cut.gguf").write_bytes((place / "m.gguf").read_bytes()[:50])
    (place / "latin.toml").write_bytes("# Schluss: ü".encode("latin-1"))
    (place / "bad.toml").write_text("[server]\nprot = 1")
    code = main(line.split())
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert (code, said.out, served) == (2, "", [])
    assert lines[0].startswith("error: ")
    assert error in lines[0]
    assert len(lines) <= 2
    if hint:
        assert lines[1].startswith("hint: ")
        assert hint in lines[1]


def test_no_llama_server_says_every_place_that_was_tried(place, capsys, monkeypatch):
    monkeypatch.delenv("ONEBIT_LLAMA_SERVER")
    monkeypatch.setenv("PATH", str(place / "nothing"))
    monkeypatch.setattr("onebit_serve.live.machine._shipped_llama_server", lambda: None)
    assert main(["serve", "-m", "m.gguf"]) == 2
    said = capsys.readouterr().err
    for piece in ("--llama-server", "$ONEBIT_LLAMA_SERVER", "configuration", "PATH", "pip install"):
        assert piece in said


def test_a_configuration_may_begin_with_a_byte_order_mark(place, capsys):
    (place / "s.toml").write_bytes(b"\xef\xbb\xbf[server]\nport = 9\n")
    assert "127.0.0.1:9\n" in dry_run(capsys, "-m m.gguf --config s.toml")


@pytest.mark.parametrize(("error", "code"), [(PortTakenError, 3), (BackendError, 1)])
@pytest.mark.usefixtures("place")
def test_every_error_has_its_exit_code(capsys, monkeypatch, served, error, code):
    def bind(_host: str, _port: int) -> None:
        raise error("it is so", hint="do this")

    monkeypatch.setattr(listener, "bind", bind)
    assert main(["serve", "-m", "m.gguf"]) == code
    assert capsys.readouterr().err == "error: it is so\nhint: do this\n"
    assert served == []


@pytest.mark.usefixtures("place", "served")
def test_the_exit_code_of_the_run_is_that_of_the_command(monkeypatch):
    module = SimpleNamespace(run=lambda *_: 130)
    monkeypatch.setitem(sys.modules, "onebit_serve.serve", module)
    assert main(["serve", "-m", "m.gguf"]) == 130


@pytest.mark.usefixtures("place")
def test_an_interrupt_before_anything_runs_shows_no_traceback(capsys, monkeypatch, served):
    def bind(_host: str, _port: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(listener, "bind", bind)
    assert main(["serve", "-m", "m.gguf"]) == 0
    assert served == []
    assert "Traceback" not in capsys.readouterr().err


def test_zinc_and_mlx_need_no_llama_server(place, capsys, monkeypatch):
    (place / "zinc").write_text("#!/bin/sh\n")
    (place / "zinc").chmod(0o755)
    monkeypatch.setenv("ONEBIT_LLAMA_SERVER", "/none")
    monkeypatch.setenv("PATH", str(place))
    said = dry_run(capsys, "-m m.gguf --device zinc -c 9 -- -x")
    assert f"{place}/zinc -m m.gguf -p PORT -c 9 -x" in said
    assert "RADV_PERFTEST=coop_matrix" in said
    said = dry_run(capsys, "-m org/Name --device mlx --mlx-server ./zinc")
    assert f"{place}/zinc org/Name --port PORT" in said


def test_embedded_runs_on_the_cpu_with_its_warm_up(place, capsys, monkeypatch):
    found = (str(place / "llama-server"), str(place / "m.gguf"))
    monkeypatch.setattr("onebit_serve.live.machine.embedded", lambda: found)
    monkeypatch.setenv("ONEBIT_LLAMA_SERVER", "/none")
    said = dry_run(capsys, "--embedded")
    assert "--device none" in said
    assert "465 prompt tokens" in said
    assert "skipped (off)" in dry_run(capsys, "--embedded --no-warmup")
    assert "on vulkan" in dry_run(capsys, "--embedded --device vulkan")


def test_the_command_alone_shows_its_help(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("Usage: 1bit")


def test_output_that_cannot_be_written_is_said_in_one_line():
    line = [sys.executable, "-m", "onebit_serve.cli", "--help"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_no_trouble(closed, tmp_path):
    code = (
        "import socket, sys; from onebit_serve.cli import main; assert main(['--version']) == 0; "
        "print('err', file=sys.stderr); number = socket.socket().fileno(); "
        f"open({str(tmp_path / 'said')!r}, 'w').write(str(number))"
    )
    line = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {closed}"
    assert subprocess.run(["sh", "-c", line], check=False).returncode == 0
    assert int((tmp_path / "said").read_text()) > 2


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_programs_are_asked_ends_them_too(tmp_path, number):
    program = tmp_path / "slow-llama-server"
    program.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/asked\nsleep 600 &\nwait\n")
    program.chmod(0o755)
    line = [sys.executable, "-m", "onebit_serve.cli", "serve", "-m", "m.gguf", "-p", "0"]
    done = subprocess.Popen([*line, "--llama-server", str(program)], env=os.environ)
    until((tmp_path / "asked").exists, "the program to be asked")
    done.send_signal(signal.SIGHUP)
    done.send_signal(number)
    assert done.wait(20) == 0
    for pid in (tmp_path / "asked").read_text().split():
        until(lambda pid=pid: not group_runs(int(pid)), "the end of what was asked")


def group_runs(group: int) -> bool:
    """Tell whether any process of a group runs."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.usefixtures("place")
def test_a_stop_before_anything_runs_is_a_stop(monkeypatch, served):
    def bind(_host: str, _port: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(listener, "bind", bind)
    try:
        assert main(["serve", "-m", "m.gguf"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert served == []


def test_the_version_is_said(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"1bit {__version__}\n"


def test_the_help_names_every_command_and_every_flag(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in COMMANDS)
    for name in ("serve", "check"):
        assert main([name, "-m", "x", "--help"]) == 0
        said = capsys.readouterr().out
        assert all(spelling in said for flag in FLAGS for spelling in flag.opts)


def test_every_flag_of_a_setting_names_a_key():
    for flag in FLAGS:
        if "." in flag.key:
            table, key = flag.key.split(".")
            assert hasattr(getattr(Config(), table), key)


@pytest.mark.usefixtures("place")
def test_help_after_the_two_dashes_is_not_ours(capsys):
    assert main(["serve", "-m", "m.gguf", "--", "--help"]) == 2
    assert "--help cannot be given" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
def test_nothing_slow_is_imported_before_the_run():
    code = (
        "import sys; from onebit_serve.cli import main; "
        "assert main(['serve', '-m', 'm.gguf', '--dry-run']) == 0; "
        "print(sorted({'trio', 'httpx', 'rich', 'tomli', 'difflib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_module_runs_as_the_script_does():
    line = [sys.executable, "-m", "onebit_serve.cli", "--version"]
    assert subprocess.check_output(line, text=True) == f"1bit {__version__}\n"


def test_the_page_about_the_command_line_gives_every_device_and_exit_code():
    page = (Path(__file__).parents[1] / "docs" / "cli.md").read_text()
    assert all(f"`{word}`" in page for word in (*PRESETS, "auto"))
    codes = {error.exit_code for error in (UsageError, PortTakenError, BackendError)}
    assert all(f"| {code} |" in page for code in codes | {0, 130})
