from __future__ import annotations

import pytest

from onebit_serve.core.folders import cache_folder, state_folder


@pytest.mark.parametrize(
    ("env", "cache", "state"),
    [
        ({"XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "/s", "HOME": "/h"}, "/c/onebit", "/s/onebit"),
        ({"XDG_CACHE_HOME": "c", "HOME": "/h"}, "/h/.cache/onebit", "/h/.local/state/onebit"),
        ({"HOME": "h"}, "", ""),
        ({}, "", ""),
    ],
)
def test_our_folders_lie_where_the_xdg_specification_says(env, cache, state):
    assert (cache_folder(env), state_folder(env)) == (cache, state)
