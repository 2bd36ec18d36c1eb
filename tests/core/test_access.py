from __future__ import annotations

import pytest

from onebit_serve.core import access
from onebit_serve.core.access import admit, cors, preflight
from onebit_serve.core.errors import UsageError
from onebit_serve.core.http import parse_head

PLAIN = access.make(machine_names=["Box.lan."])
CHAT = "/v1/chat/completions"


def request(method="GET", target="/", host="127.0.0.1:8000", **headers):
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return parse_head("\r\n".join([*lines, "", ""]).encode("latin-1"))


def status(rules, *args, **kwargs):
    refusal = admit(rules, request(*args, **kwargs))
    return refusal.status if refusal else 200


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000",
        "127.0.0.1",
        "192.168.1.7:8000",
        "[::1]:8000",
        "[::1]",
        "[fe80::1%eth0]:80",
        "localhost",
        "LOCALHOST:8000",
        "localhost.:8000",
        "box.lan:1",
        "BOX.LAN.",
        "host.docker.internal:8000",
        "gpu.example:443",
    ],
)
def test_a_known_host_is_answered(host):
    rules = access.make(machine_names=["box.lan"], allowed_hosts=["GPU.example:8000"])
    assert status(rules, host=host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.nip.io:8000",
        "evil.example:8000",
        "user@localhost",
        "localhost/x",
        "local host",
        "[::1",
        "[evil]",
        ":8000",
        ".",
        "",
        "localhost:80:80",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
def test_a_strangers_host_is_refused_whatever_it_asks(method, host):
    assert status(PLAIN, method, host=host) == 403


def test_a_host_refusal_names_the_host_and_the_setting():
    refusal = admit(PLAIN, request(host="evil.example"))
    assert "evil.example" in refusal.message
    assert "allowed_hosts" in refusal.message
    assert refusal.code == "unknown_host"


def test_a_star_answers_every_host():
    assert status(access.make(allowed_hosts=["*"]), host="evil.example") == 200


def test_an_http_1_0_request_without_a_host_is_answered():
    assert admit(PLAIN, parse_head(b"GET /health HTTP/1.0\r\n\r\n")) is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://127.0.0.1:3000",
        "http://localhost:8000",
        "https://127.0.0.1",
        "ftp://127.0.0.1:8000",
        "127.0.0.1:8000",
        "",
    ],
)
def test_a_write_from_a_foreign_page_is_refused(method, origin):
    assert status(PLAIN, method, CHAT, Origin=origin) == 403


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),
        ("Localhost", "HTTP://LOCALHOST:80"),
        ("box.lan", "https://box.lan"),
        ("box.lan", "https://box.lan:443"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_our_own_page_may_write(host, origin):
    assert status(PLAIN, "POST", CHAT, host=host, Origin=origin) == 200


def test_a_program_that_is_no_browser_may_write():
    assert status(PLAIN, "POST", CHAT) == 200


def test_a_foreign_page_may_read_but_gets_no_leave_to_see_it():
    head = request(Origin="http://evil.example")
    assert admit(PLAIN, head) is None
    assert cors(PLAIN, head) == ()


def test_an_allowed_origin_may_write_and_sees_the_reply():
    rules = access.make(allowed_origins=["https://App.example:443/", "vscode-webview://abc"])
    for origin in ("https://app.example", "vscode-webview://abc"):
        head = request("POST", CHAT, Origin=origin)
        assert admit(rules, head) is None
        lines = dict(cors(rules, head))
        assert lines[b"access-control-allow-origin"] == origin.encode()
        assert lines[b"vary"] == b"origin"
    assert status(rules, "POST", CHAT, Origin="http://app.example") == 403


def test_null_and_any_origin_can_be_allowed_by_name():
    assert status(access.make(allowed_origins=["null"]), "POST", CHAT, Origin="null") == 200
    every = access.make(allowed_origins=["*"])
    assert status(every, "POST", CHAT, Origin="http://evil.example") == 200
    assert status(every, "POST", CHAT, Origin="null") == 200


@pytest.mark.parametrize("origin", ["app.example", "https://", "https://a b", "", "https://a/b"])
def test_an_allowed_origin_that_can_never_match_is_refused(origin):
    with pytest.raises(UsageError, match="allowed_origins"):
        access.make(allowed_origins=[origin])


@pytest.mark.parametrize("host", ["http://a.example", "a/b", "a b"])
def test_an_allowed_host_that_can_never_match_is_refused(host):
    with pytest.raises(UsageError, match="allowed_hosts"):
        access.make(allowed_hosts=[host])


# ------------------------------------------------------------------------------------ preflights


@pytest.mark.parametrize("target", ["/", "/health", CHAT, "/v1/models", "/slots/0", "/v1/reload"])
def test_a_preflight_of_an_allowed_origin_is_answered_without_a_key(target):
    rules = access.make(allowed_origins=["https://app.example"], keys=["k"])
    head = request(
        "OPTIONS",
        target,
        Origin="https://app.example",
        Access_Control_Request_Method="POST",
        Access_Control_Request_Headers="authorization,x-stainless-os",
    )
    assert admit(rules, head) is None
    lines = dict(preflight(rules, head))
    assert lines[b"access-control-allow-origin"] == b"https://app.example"
    assert lines[b"access-control-allow-headers"] == b"authorization,x-stainless-os"
    assert b"DELETE" in lines[b"access-control-allow-methods"]


def test_a_preflight_of_a_foreign_origin_gets_no_leave():
    head = request("OPTIONS", CHAT, Origin="http://evil.example")
    assert admit(PLAIN, head) is None
    assert not any(name.startswith(b"access-control") for name, _ in preflight(PLAIN, head))


def test_a_plain_options_request_learns_the_methods():
    assert dict(preflight(PLAIN, request("OPTIONS")))[b"allow"].startswith(b"GET")


def test_a_public_page_that_is_allowed_may_ask_a_private_address():
    rules = access.make(allowed_origins=["https://app.example"])
    asks = {"Access_Control_Request_Private_Network": "true"}
    head = request("OPTIONS", CHAT, Origin="https://app.example", **asks)
    assert (b"access-control-allow-private-network", b"true") in preflight(rules, head)


# ------------------------------------------------------------------------------------ keys

KEYED = access.make(keys=["first-key", "second-key"])


@pytest.mark.parametrize(
    "given",
    [
        {"Authorization": "Bearer first-key"},
        {"Authorization": "bearer second-key"},
        {"X-Api-Key": "second-key"},
        {"Authorization": "Bearer wrong", "X-Api-Key": "first-key"},
    ],
)
def test_any_of_the_keys_is_taken_in_either_header(given):
    assert status(KEYED, "POST", CHAT, **given) == 200


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer first-ke"},
        {"Authorization": "Bearer first-keyy"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic first-key"},
        {"Authorization": "first-key"},
        {"X-Api-Key": ""},
        {"X-Api-Key": "FIRST-KEY"},
        {"X-Api-Key": "\xfc"},
    ],
)
def test_no_key_or_a_wrong_one_is_401(given):
    refusal = admit(KEYED, request("POST", CHAT, **given))
    assert refusal.status == 401
    assert refusal.code == "invalid_api_key"
    assert "first-key" not in refusal.message


@pytest.mark.parametrize("target", ["/health", "/v1/health", "/livez", "/readyz", "/health?x=1"])
def test_the_health_routes_are_open(target):
    assert status(KEYED, target=target) == 200


@pytest.mark.parametrize("target", ["/", "/v1/models", "/metrics", "/v1/status", "/slots", "/x"])
def test_everything_else_needs_a_key(target):
    assert status(KEYED, target=target) == 401


def test_a_foreign_page_is_refused_even_with_a_key():
    given = {"Authorization": "Bearer first-key", "Origin": "http://evil.example"}
    assert status(KEYED, "POST", CHAT, **given) == 403


def test_every_key_is_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(a, b):
        compared.append(b)
        return a == b

    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    assert status(KEYED, Authorization="Bearer first-key") == 200
    assert compared == [b"first-key", b"second-key"]


def test_a_key_file_has_one_key_a_line_and_comments():
    text = "\ufeff# ours\n\n  one \r\ntwo\none\n#three\n"
    assert access.parse_keys(text, "keys") == ("one", "two")


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_a_key_file_without_a_key_is_refused(text):
    with pytest.raises(UsageError, match="keys has no API key") as caught:
        access.parse_keys(text, "keys")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["one\nse cret\n", "one\nsecr\xe9t\n"])
def test_a_key_that_no_header_carries_is_refused_without_being_shown(text):
    with pytest.raises(UsageError, match="line 2") as caught:
        access.parse_keys(text, "keys")
    assert "cret" not in str(caught.value) + caught.value.hint


@pytest.mark.parametrize(
    ("mode", "warns"),
    [(0o100600, False), (0o100640, False), (0o100644, True), (0o100660, True), (0o100400, False)],
)
def test_a_key_file_that_others_may_read_or_change_is_warned_about(mode, warns):
    assert bool(access.key_file_warning("/etc/keys", mode)) is warns


@pytest.mark.parametrize(
    ("host", "keys", "remote", "fine"),
    [
        ("127.0.0.1", False, False, True),
        ("::1", False, False, True),
        ("localhost", False, False, True),
        ("0.0.0.0", False, False, False),
        ("::", False, False, False),
        ("box.lan", False, False, False),
        ("0.0.0.0", True, False, True),
        ("0.0.0.0", False, True, True),
    ],
)
def test_a_host_that_others_can_reach_needs_a_key_or_the_flag(host, keys, remote, fine):
    if fine:
        access.check_listening(host, has_keys=keys, allow_remote=remote)
    else:
        with pytest.raises(UsageError, match="reached from other machines"):
            access.check_listening(host, has_keys=keys, allow_remote=remote)
