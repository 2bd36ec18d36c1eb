"""Where files of ours lie: one folder for what must last, one for what can be made again."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["cache_folder", "state_folder"]


def state_folder(env: Mapping[str, str]) -> str:
    """Return `$XDG_STATE_HOME/onebit` or its default, or nothing where there is no place.

    Args:
        env: `XDG_STATE_HOME` and `HOME` are read; a relative one counts as unset, as the XDG base
            directory specification says.
    """
    return _own(env, "XDG_STATE_HOME", ".local/state")


def cache_folder(env: Mapping[str, str]) -> str:
    """Return `$XDG_CACHE_HOME/onebit` or its default, or nothing where there is no place.

    Args:
        env: `XDG_CACHE_HOME` and `HOME` are read, as above.
    """
    return _own(env, "XDG_CACHE_HOME", ".cache")


def _own(env: Mapping[str, str], variable: str, below_home: str) -> str:
    base, home = env.get(variable, ""), env.get("HOME", "")
    if not base.startswith("/"):
        base = f"{home}/{below_home}" if home.startswith("/") else ""
    return f"{base}/onebit" if base else ""
