"""Ask a running `1bit serve`: where it is, which key it wants, what it answers.

No proxy of the environment is used: the server is on this machine or named by its address.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click
import msgspec

from onebit_serve.core.config import Config, with_environment
from onebit_serve.core.errors import OnebitError, UsageError
from onebit_serve.live.doorkeeper import read_keys

__all__ = ["Asked", "Door", "UnreachableError", "find", "named", "server_options"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_CONNECT_LIMIT_S = 10.0
_WORK_LIMIT_S = 600.0  # a first prompt on software Vulkan takes a minute and a half
_DEFAULT_PORTS = {"http": 80, "https": 443}
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - not bound here
_UNAUTHORIZED = 401


class UnreachableError(OnebitError):
    """Nobody answers there, or somebody who is no `1bit serve`."""


def server_options(function: _Function) -> _Function:
    """Add the options that say which server is meant, and how to be let in."""
    for option in (
        click.option(
            "--api-key-file", metavar="FILE", help="File with its API key; else $ONEBIT_API_KEY."
        ),
        click.option("--config", metavar="FILE", help="Its settings: host and port are read."),
        click.option("--url", metavar="URL", help="Where it is; else $ONEBIT_URL, else --config."),
    ):
        function = option(function)
    return function


class Asked(msgspec.Struct, frozen=True):
    """A whole answer.

    Args:
        status: HTTP status.
        body: The body.
    """

    status: int
    body: bytes

    def data(self) -> Any:
        """Return the body's JSON.

        Raises:
            UnreachableError: It is none: somebody else listens there.
        """
        try:
            return json.loads(self.body)
        except ValueError:
            raise UnreachableError(
                "what answers there is no 1bit serve: it sent no JSON", hint="check --url"
            ) from None

    def complaint(self) -> str:
        """Return the message of an error in OpenAI's envelope, else the status."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(self.body)["error"]["message"])
        return f"it answered {self.status}"


class Door(msgspec.Struct, frozen=True):
    """A running server as its command line sees it.

    Args:
        url: Its address, without a path.
        key: An API key of it, or empty.
    """

    url: str
    key: str = ""

    def get(self, path: str) -> Asked:
        """Ask for a page.

        Raises:
            OnebitError: Nobody answers, or it wants a key.
        """
        with self._asking(path) as (response, _):
            return Asked(response.status, response.read())

    def status(self) -> dict[str, Any]:
        """Return what `/v1/status` says.

        Raises:
            OnebitError: Nobody answers, it wants a key, or is no `1bit serve`.
        """
        answer = self.get("/v1/status")
        said = answer.data()
        if not isinstance(said, dict) or "backends" not in said:
            raise UnreachableError(f"{self.url}: {answer.complaint()}", hint="check --url")
        return said

    def post(self, path: str, body: object = None) -> Asked:
        """Send JSON, and wait for as long as real work takes.

        Raises:
            OnebitError: Nobody answers, or it wants a key.
        """
        data = b"" if body is None else msgspec.json.encode(body)
        with self._asking(path, "POST", data, _WORK_LIMIT_S) as (response, _):
            return Asked(response.status, response.read())

    def lines(self, path: str) -> Iterator[bytes]:
        """Give the lines of a page as they come, until it ends.

        Raises:
            OnebitError: Nobody answers, it wants a key, or says no.
        """
        with self._asking(path) as (response, connection):
            if response.status != http.client.OK:
                raise OnebitError(Asked(response.status, response.read()).complaint())
            if connection.sock is not None:
                connection.sock.settimeout(None)  # a quiet backend is no fault
            yield from iter(response.readline, b"")

    @contextlib.contextmanager
    def _asking(
        self,
        path: str,
        method: str = "GET",
        data: bytes | None = None,
        limit_s: float = _CONNECT_LIMIT_S,
    ) -> Iterator[tuple[http.client.HTTPResponse, http.client.HTTPConnection]]:
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port or _DEFAULT_PORTS[parts.scheme]
        connection = (
            http.client.HTTPSConnection(
                host, port, timeout=limit_s, context=ssl.create_default_context()
            )
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=limit_s)
        )
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            connection.request(method, path, body=data, headers=headers)
            response = connection.getresponse()
            if response.status == _UNAUTHORIZED:
                raise OnebitError(
                    f"{self.url} wants an API key: {Asked(401, response.read()).complaint()}",
                    hint="name the file with --api-key-file, or set ONEBIT_API_KEY",
                )
            yield response, connection
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise UnreachableError(
                f"no 1bit serve answers at {self.url}: {reason}",
                hint="start it, or say where it is with --url",
            ) from None
        finally:
            connection.close()


def named(backends: list[dict[str, Any]], name: str | None) -> list[dict[str, Any]]:
    """Return the backend of a name, or all of them without one.

    Args:
        backends: Of a status.
        name: Which one is meant.

    Raises:
        UsageError: There is none of that name.
    """
    found = [one for one in backends if name in (None, one.get("name"))]
    if name is not None and not found:
        known = ", ".join(str(one.get("name")) for one in backends) or "none"
        raise UsageError(f"there is no backend {name}", hint=f"the backends are {known}")
    return found


def find(
    url: str | None, config: str | None, api_key_file: str | None, environment: Mapping[str, str]
) -> Door:
    """Find the server: `--url`, `$ONEBIT_URL`, the configuration, else 127.0.0.1:8000.

    Args:
        url: What `--url` says.
        config: What `--config` says; the variables of its keys count too.
        api_key_file: What `--api-key-file` says.
        environment: The environment.

    Raises:
        UsageError: A file cannot be read, or the URL is none.
    """
    settings = Config()
    if config is not None:
        from onebit_serve.cli.prepare import read_config

        settings = read_config(config)
    server = with_environment(settings, environment).server
    named = url or environment.get("ONEBIT_URL")
    keys, _ = read_keys(api_key_file or server.api_key_file, environment)
    key = keys[0] if keys else ""
    if named:
        return Door(_checked(named), key)
    host = _ANYWHERE.get(server.host.strip("[]"), server.host.strip("[]"))
    if not server.port:
        raise UsageError(
            "the port is 0, so the configuration does not tell where the server is",
            hint="name the address of its ready line with --url",
        )
    return Door(f"http://{f'[{host}]' if ':' in host else host}:{server.port}", key)


def _checked(url: str) -> str:
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        readable = url.isprintable() and " " not in url
        known = parts.scheme in _DEFAULT_PORTS and bool(parts.hostname)
        # `http:/x` is a scheme that lost a slash, and no host named http.
        fine = readable and known and parts.port != 0 and not parts.netloc.endswith(":")
    except ValueError:
        fine = False
    if not fine:
        raise UsageError(
            f"{url} is no URL of a server", hint="a URL looks like http://127.0.0.1:8000"
        )
    return f"{parts.scheme}://{parts.netloc}"
