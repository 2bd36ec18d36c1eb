"""The rules of the front door: the key file is read, this machine's names are found."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from onebit_serve.core import access
from onebit_serve.core.access import Access
from onebit_serve.core.config import Server
from onebit_serve.core.errors import UsageError
from onebit_serve.live.files import check_regular, expanded

__all__ = ["machine_names", "read_keys", "rules"]


def rules(
    server: Server, environment: Mapping[str, str], *, again: bool = False
) -> tuple[Access, str]:
    """Return who may talk, and a warning to log, which is empty where there is none.

    Args:
        server: The settings.
        environment: Where `ONEBIT_API_KEY` is read.
        again: It is a reload.

    Raises:
        UsageError: A key file, host or origin cannot be used, or the host is open to others and
            there is no key.
    """
    keys, warning = read_keys(server.api_key_file, environment, again=again)
    access.check_listening(server.host, has_keys=bool(keys), allow_remote=server.allow_remote)
    made = access.make(
        machine_names=(*machine_names(), server.host),
        allowed_hosts=server.allowed_hosts,
        allowed_origins=server.allowed_origins,
        keys=keys,
    )
    return made, warning


def read_keys(
    path: str | None, environment: Mapping[str, str], *, again: bool = False
) -> tuple[tuple[str, ...], str]:
    """Return the API keys of the file and of the environment, and a warning about the file.

    Args:
        path: The file, or `None`.
        environment: Where `ONEBIT_API_KEY` is read.
        again: It was read before, so that a pipe would have nothing more to say.

    Raises:
        UsageError: One of them cannot be read, has no key, or one that no header can carry.
    """
    keys: tuple[str, ...] = ()
    warning = ""
    if path is not None:
        try:
            place = expanded(path)
            if again:
                check_regular(place)
            with place.open(encoding="utf-8") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise UsageError(
                f"cannot read the API keys in {path}: {reason}", hint="check the path and its mode"
            ) from None
        keys = access.parse_keys(text, path)
        warning = access.key_file_warning(path, mode)
    said = environment.get(access.KEYS_VARIABLE)
    if said:
        keys += access.parse_keys(said.replace(",", "\n"), access.KEYS_VARIABLE)
    return keys, warning


def machine_names() -> tuple[str, ...]:
    """Return what this machine is called: its host name, short and as mDNS announces it.

    No name service is asked: that could take seconds, and answer with a stranger's name.
    """
    name = socket.gethostname().rstrip(".")
    short = name.partition(".")[0]
    return tuple(dict.fromkeys(n for n in (name, short, f"{short}.local") if n and short))
