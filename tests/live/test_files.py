"""Files that are none, or that would hold up a reload for ever."""

from __future__ import annotations

import os

import pytest

from onebit_serve.cli.prepare import prepare, read_config
from onebit_serve.core.errors import UsageError
from onebit_serve.live.doorkeeper import read_keys
from onebit_serve.live.files import read_regular

NO_FILE = "it is a pipe, a socket or a device, not a regular file"


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return str(tmp_path / "pipe")


def test_a_regular_file_is_read_also_below_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    for name in (str(tmp_path / "file"), "~/file", "~/link"):
        assert read_regular(name) == b"content"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("/none", "No such file or directory"),
        ("/", "Is a directory"),
        ("/dev/zero", NO_FILE),
        ("~nosuchuser/x", "~nosuchuser is nobody's home here"),
        ("a\0b", "its name has a zero byte"),
    ],
)
def test_what_is_no_readable_file_is_told(name, why):
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the text is looked at below
        read_regular(name)
    assert caught.value.strerror == why


def test_a_pipe_is_not_waited_for(pipe):
    with pytest.raises(OSError, match=NO_FILE):
        read_regular(pipe)


@pytest.mark.parametrize("flag", ["--warm-prompts", "--route-policy"])
@pytest.mark.parametrize(
    ("name", "why"), [("PIPE", NO_FILE), ("~nosuchuser/x", "nobody's home"), ("a\0b", "zero byte")]
)
def test_such_a_file_is_refused_on_the_command_line(flag, name, why, pipe, tiny_models, fake_llama):
    model = str(tiny_models / "tiny-llama.gguf")
    words = ("-m", model, "--llama-server", fake_llama, flag, name.replace("PIPE", pipe))
    with pytest.raises(UsageError, match=f"cannot be read: .*{why}") as caught:
        prepare(words, os.environ)
    assert caught.value.exit_code == 2


def test_a_reload_does_not_wait_for_a_pipe_that_the_start_has_read(pipe):
    with pytest.raises(UsageError, match=NO_FILE):
        read_config(pipe, again=True)
    with pytest.raises(UsageError, match=NO_FILE):
        read_keys(pipe, {}, again=True)


def test_the_first_time_configuration_and_keys_may_come_through_a_pipe():
    for text, read in ((b"[server]\nport = 7\n", read_config), (b"key\n", read_keys_of)):
        reader, writer = os.pipe()
        os.write(writer, text)
        os.close(writer)
        try:
            assert read(f"/dev/fd/{reader}")
        finally:
            os.close(reader)


def test_a_configuration_from_a_pipe_holds_also_beside_options_of_the_backend(
    tiny_models, fake_llama
):
    reader, writer = os.pipe()
    os.write(writer, b"[server]\nport = 7\n")
    os.close(writer)
    model = str(tiny_models / "tiny-llama.gguf")
    words = ["-m", model, "--device", "cpu", "--llama-server", fake_llama, "--mlock"]
    try:
        made = prepare([*words, "--config", f"/dev/fd/{reader}"], os.environ)
    finally:
        os.close(reader)
    assert made.plan.server.port == 7


def read_keys_of(path):
    return read_keys(path, {})[0] == ("key",)
