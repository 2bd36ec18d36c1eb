"""Who may talk to the front door: known hosts, origins that may write, API keys.

A program on this machine may talk to loopback, and so may every page in a browser on it. Three
checks tell them apart, in this order:

    Host     A page of a stranger whose name was made to point at 127.0.0.1 (DNS rebinding) says its
             own name here. Only names that are ours are answered; an address cannot be rebound.
    Origin   A browser says which page sends a request that writes. Only our own pages and those
             of `allowed_origins` may; programs that are no browsers send none.
    key      Where there are API keys, all but the health routes need one.

A preflight (`OPTIONS`) carries no key by the Fetch standard, so it is answered before the key is
looked at. Replies carry CORS headers for allowed origins alone: what a llama-server says there is
taken out, since it echoes any origin (b10068, measured).
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from onebit_serve.core.errors import UsageError
from onebit_serve.core.plan import is_loopback
from onebit_serve.core.wire import Refusal

if TYPE_CHECKING:  # llhttp is not needed before the backends are spawned
    from onebit_serve.core.http import Headers, RequestHead

__all__ = [
    "CHILD_KEY_VARIABLE",
    "KEYS_VARIABLE",
    "Access",
    "admit",
    "check_listening",
    "cors",
    "key_file_warning",
    "make",
    "parse_keys",
    "preflight",
]

# llama-server reads its key there (its `--help`); an argument would show in the process list.
CHILD_KEY_VARIABLE = "LLAMA_API_KEY"
# API keys of ours with commas between them, for those who have no file.
KEYS_VARIABLE = "ONEBIT_API_KEY"

_ALWAYS_KNOWN = ("localhost", "host.docker.internal")
_OPEN = frozenset({"/health", "/v1/health", "/livez", "/readyz"})
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_METHODS = b"GET, HEAD, POST, PUT, DELETE, OPTIONS"
_USUAL_HEADERS = b"authorization, content-type, x-api-key, x-request-id"
_EXPOSED = b"x-1bit-route, x-request-id, retry-after"
_PREFLIGHT_KEPT_S = b"600"  # Chromium keeps one for two hours at most, others less
_ANY = "*"
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_KEY = re.compile(r"[!-~]+")
_OTHERS_READ_OR_WRITE = 0o027  # a group that may read (0640) is how services share a key


class Access(msgspec.Struct, frozen=True):
    """The rules of one front door.

    Args:
        names: Values of `Host` that are answered, besides addresses: lower case, without port.
            `*` answers all.
        origins: Values of `Origin` that may write, besides our own: lower case. `*` allows all.
        keys: The API keys; empty where none is needed.
    """

    names: frozenset[str] = frozenset(_ALWAYS_KNOWN)
    origins: frozenset[str] = frozenset()
    keys: tuple[bytes, ...] = ()


def make(
    *,
    machine_names: Iterable[str] = (),
    allowed_hosts: Iterable[str] = (),
    allowed_origins: Iterable[str] = (),
    keys: Iterable[str] = (),
) -> Access:
    """Make the rules.

    Args:
        machine_names: What this machine is called: its host name, with and without domain.
        allowed_hosts: More values of `Host`, with or without port; `*` is all.
        allowed_origins: More values of `Origin`, as browsers write them; `*` is all, `null` is
            pages without an origin (files, sandboxed frames).
        keys: The API keys.

    Raises:
        UsageError: An allowed host or origin can never match.
    """
    names = {*_ALWAYS_KNOWN, *(name.lower().rstrip(".") for name in machine_names if name)}
    for host in allowed_hosts:
        name = _ANY if host == _ANY else _name_of(host.encode("latin-1", "replace"))
        if name is None:
            raise UsageError(
                f"[server] allowed_hosts names {host!r}, which is no host",
                hint='write it as the Host header has it: "gpu.lan"; "*" is all',
            )
        names.add(name)
    origins = set()
    for origin in allowed_origins:
        plain = origin.lower().rstrip("/")
        if plain not in (_ANY, "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", plain):
            raise UsageError(
                f"[server] allowed_origins names {origin!r}, which is no origin",
                hint='write it as browsers do: "https://app.example" or "http://localhost:3000"',
            )
        origins.add(plain if plain in (_ANY, "null") else _plain_origin(plain))
    encoded = tuple(dict.fromkeys(key.encode("ascii") for key in keys))
    return Access(frozenset(names), frozenset(origins), encoded)


def admit(access: Access, head: RequestHead) -> Refusal | None:
    """Say why a request is not answered, or `None` when it is.

    Args:
        access: The rules.
        head: The request. A preflight passes with the same rules for `Host`, and without a key.
    """
    host = head.get(b"host")
    if host is not None and not _is_known(access, host):
        return Refusal(
            403,
            f"the host {_shown(host)} is not answered here; if it is meant to be, add it to "
            "[server] allowed_hosts",
            "unknown_host",
        )
    if head.method == "OPTIONS":
        return None
    if head.method not in _READING:
        origin = head.get(b"origin")
        if origin is not None and not _may_write(access, origin, host):
            return Refusal(
                403,
                f"pages of {_shown(origin)} may not write here; if they are meant to, add it to "
                "[server] allowed_origins",
                "foreign_origin",
            )
    if access.keys and head.path not in _OPEN and not _has_key(access, head):
        given = head.get(b"authorization") is not None or head.get(b"x-api-key") is not None
        message = "this API key is not known here" if given else "an API key is needed"
        return Refusal(401, message, "invalid_api_key")
    return None


def preflight(access: Access, head: RequestHead) -> Headers:
    """Return the headers of the 204 that answers an `OPTIONS` request.

    A page of a foreign origin gets no permission, which is how a browser is told no.
    """
    allowed = cors(access, head)
    if not allowed:
        return ((b"allow", _METHODS),)
    asked = head.get(b"access-control-request-headers") or _USUAL_HEADERS
    lines = [
        *allowed,
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", asked),
        (b"access-control-max-age", _PREFLIGHT_KEPT_S),
        (b"allow", _METHODS),
    ]
    if head.get(b"access-control-request-private-network") == b"true":
        # A public page that asks for a private address (Chromium's Private Network Access).
        lines.append((b"access-control-allow-private-network", b"true"))
    return tuple(lines)


def cors(access: Access, head: RequestHead) -> Headers:
    """Return the CORS headers of any reply: none without an origin, or for a foreign one."""
    origin = head.get(b"origin")
    if origin is None or not _may_write(access, origin, head.get(b"host")):
        return ()
    return (
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _EXPOSED),
        (b"vary", b"origin"),
    )


def check_listening(host: str, *, has_keys: bool, allow_remote: bool) -> None:
    """Refuse to listen where strangers could talk to us, unless that was asked for.

    Raises:
        UsageError: The host is not loopback, there is no key, and `--allow-remote` was not given.
    """
    if not is_loopback(host) and not has_keys and not allow_remote:
        raise UsageError(
            f"--host {host} can be reached from other machines, and there is no API key",
            hint="name a file with keys by --api-key-file, or say --allow-remote to let everybody "
            "in",
        )


def parse_keys(text: str, where: str) -> tuple[str, ...]:
    """Read API keys, one a line; empty lines and those that begin with `#` are left out.

    Args:
        text: The file's text, or the variable's with its commas made line ends.
        where: The file or variable, for messages; a key is never part of one.

    Raises:
        UsageError: There is no key, or one has characters that no header can carry.
    """
    keys = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not _KEY.fullmatch(key):
            raise UsageError(
                f"{where}, line {number}: a key has spaces or characters that are not ASCII",
                hint="make one with: openssl rand -hex 32",
            )
        keys.append(key)
    if not keys:
        raise UsageError(f"{where} has no API key", hint="make one with: openssl rand -hex 32")
    return tuple(dict.fromkeys(keys))


def key_file_warning(path: str, mode: int) -> str:
    """Return what is wrong with the permissions of a key file, empty where nothing is.

    Args:
        path: The file.
        mode: Its mode (`st_mode`).
    """
    if not mode & _OTHERS_READ_OR_WRITE:
        return ""
    return (
        f"others may read or change the API keys in {path} (mode {mode & 0o777:04o}): "
        f"chmod 600 {path}"
    )


# --------------------------------------------------------------------------------- the checks


@lru_cache(maxsize=256)
def _name_of(host: bytes) -> str | None:
    """Return the host of a `Host` header in lower case without port, `None` where there is none."""
    match = re.fullmatch(rb"(\[[0-9a-f:.%\w]+\]|[^\s:/@\[\]]+)(?::\d{0,5})?", host.lower())
    return match[1].decode("latin-1").strip("[]").rstrip(".") or None if match else None


@lru_cache(maxsize=256)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_known(access: Access, host: bytes) -> bool:
    name = _name_of(host)
    if name is None:
        return False
    return name in access.names or _is_address(name) or _ANY in access.names


@lru_cache(maxsize=256)
def _plain_origin(origin: str) -> str:
    """Return an origin in lower case without a port that its scheme implies."""
    scheme, _, authority = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    return f"{scheme}://{authority.removesuffix(f':{port}')}" if port else origin.lower()


def _may_write(access: Access, origin: bytes, host: bytes | None) -> bool:
    said = origin.decode("latin-1").lower()
    if _ANY in access.origins:
        return True
    if said == "null":
        return "null" in access.origins
    plain = _plain_origin(said)
    if plain in access.origins:
        return True
    # Our own page, also behind a proxy that speaks TLS for us: its address is the one it asks.
    scheme, _, _ = plain.partition("://")
    if host is None or scheme not in _DEFAULT_PORTS:
        return False
    return plain == _plain_origin(f"{scheme}://{host.decode('latin-1')}")


def _has_key(access: Access, head: RequestHead) -> bool:
    given = []
    for name, value in head.headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            given.append(value[7:].strip())
        elif name == b"x-api-key":
            given.append(value.strip())
    found = False
    for said in given:
        for key in access.keys:  # all of them: how long it takes tells nothing
            found |= hmac.compare_digest(said, key)
    return found


def _shown(value: bytes) -> str:
    text = value[:200].decode("latin-1")
    return repr(text) if not text.isprintable() or " " in text else text
