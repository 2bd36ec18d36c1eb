from __future__ import annotations

import socket

import pytest

from onebit_serve.core.config import Server
from onebit_serve.core.errors import UsageError
from onebit_serve.live.doorkeeper import machine_names, read_keys, rules


def test_by_default_there_is_no_key_and_nothing_to_warn_about():
    made, warning = rules(Server(), {})
    assert made.keys == ()
    assert warning == ""
    assert "localhost" in made.names


def test_keys_come_from_the_file_and_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# a comment\none\n")
    file.chmod(0o600)
    made, warning = rules(Server(api_key_file=str(file)), {"ONEBIT_API_KEY": "two,three"})
    assert made.keys == (b"one", b"two", b"three")
    assert warning == ""


def test_a_file_that_others_can_read_is_warned_about_without_its_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("secret\n")
    file.chmod(0o644)
    _, warning = rules(Server(api_key_file=str(file)), {})
    assert f"chmod 600 {file}" in warning
    assert "secret" not in warning


@pytest.mark.parametrize("content", [None, b"", b"# none\n", b"\xff\xfe"])
def test_a_file_without_keys_is_refused(content, tmp_path):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match="keys") as caught:
        read_keys(str(file), {})
    assert caught.value.exit_code == 2


def test_a_folder_as_a_key_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="Is a directory"):
        read_keys(str(tmp_path), {})


def test_an_open_host_needs_a_key_or_the_flag():
    with pytest.raises(UsageError, match="other machines"):
        rules(Server(host="0.0.0.0"), {})
    assert rules(Server(host="0.0.0.0", allow_remote=True), {})
    assert rules(Server(host="0.0.0.0"), {"ONEBIT_API_KEY": "k"})


def test_this_machines_names_are_its_own(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.example.com.")
    assert machine_names() == ("Box.example.com", "Box", "Box.local")
    made, _ = rules(Server(), {})
    assert {"box.example.com", "box", "box.local"} <= made.names
    monkeypatch.setattr(socket, "gethostname", lambda: "")
    assert machine_names() == ()


def test_the_name_it_listens_on_is_one_of_its_names():
    made, _ = rules(Server(host="serve.lan", allow_remote=True), {})
    assert "serve.lan" in made.names
