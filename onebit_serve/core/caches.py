"""Driver and runtime caches: where each device keeps what it compiled, and a lasting place for it.

Compiled pipelines and kernels outlive a process in a cache of the driver's. With it the second
load is cheap (software Vulkan, llama-server's load and built-in warm-up: 14.5 s without, 0.35 s
with). By default it lies wherever the driver puts it, shared with games and browsers that push it
out; in a container it is often thrown away. So each device gets a folder of its own under
`$XDG_CACHE_HOME/onebit/`. A value that the user set wins, as does a variable that turns a cache
off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

__all__ = ["CACHES", "Cache", "CachePlan", "describe", "plan_caches"]


class Cache(msgspec.Struct, frozen=True):
    """One cache and the variables that rule it.

    Args:
        name: What status and log call it; also its folder.
        variable: What names its folder.
        default: Where it lies when the variable is not set; `~` is the home and `$CACHE` the cache
            home.
        inside: What in that folder is the cache, as a pattern of file names.
        off: Variables that turn it off, with the values that do (lower case; `*` is any).
        extra: Further variables to set, each left alone where the user set it.
    """

    name: str
    variable: str
    default: str
    inside: str = "*"
    off: dict[str, tuple[str, ...]] = {}
    extra: dict[str, str] = {}


class CachePlan(msgspec.Struct, frozen=True):
    """What one backend's caches come to.

    Args:
        set_env: Variables to add to the child's environment.
        folders: Folders to make before the start (mode 0700): only ours, never the user's.
        look: Every cache that is on: its name, the folder and the pattern of what to look for.
        off: Caches that the user's environment turns off.
    """

    set_env: dict[str, str] = {}
    folders: tuple[str, ...] = ()
    look: tuple[tuple[str, str, str], ...] = ()
    off: tuple[str, ...] = ()


def describe(plan: CachePlan, found: Sequence[str], lacking: Sequence[str] = ()) -> str:
    """Say in one line how a start finds its caches; nothing where its device has none.

    Args:
        plan: The caches.
        found: Names of those that hold something.
        lacking: Folders of ours that cannot be made or written to.
    """
    if found:
        return f"driver cache found: {', '.join(found)}"
    if lacking:
        places = ", ".join(lacking)
        return f"no driver cache found, and what is compiled now is not kept: check {places}"
    if plan.look:
        places = ", ".join(folder for _, folder, _ in plan.look)
        others = f" ({', '.join(plan.off)} is off)" if plan.off else ""
        return f"no driver cache found; what is compiled now is kept in {places}{others}"
    return f"the driver cache is off ({', '.join(plan.off)})" if plan.off else ""


# docs.mesa3d.org/envvars: the folder, and true or 1 to disable. Covers RADV, ANV and lavapipe.
# Mesa makes `mesa_shader_cache` in it, newer ones `mesa_shader_cache_db` or `_sf`.
MESA = Cache(
    "mesa",
    "MESA_SHADER_CACHE_DIR",
    "$CACHE",
    inside="mesa_shader_cache*",
    off={"MESA_SHADER_CACHE_DISABLE": ("true", "1", "yes", "y", "t")},
)
# NVIDIA's driver README, on OpenGL environment variables; Vulkan pipelines go there as well. The
# driver trims the cache unless told not to.
NVIDIA_GL = Cache(
    "nvidia",
    "__GL_SHADER_DISK_CACHE_PATH",
    "~/.nv/GLCache",
    off={"__GL_SHADER_DISK_CACHE": ("0",)},
    extra={"__GL_SHADER_DISK_CACHE_SKIP_CLEANUP": "1"},
)
# CUDA C++ programming guide, environment variables: kernels that were compiled from PTX.
CUDA = Cache(
    "cuda",
    "CUDA_CACHE_PATH",
    "~/.nv/ComputeCache",
    off={"CUDA_CACHE_DISABLE": ("1",)},
)
# amd/comgr's README: AMD_COMGR_CACHE=0 is off. An empty folder was off in older ones and is the
# default place in newer ones: it is left alone and not looked into.
COMGR = Cache(
    "comgr",
    "AMD_COMGR_CACHE_DIR",
    "$CACHE/comgr",
    off={"AMD_COMGR_CACHE": ("0",), "AMD_COMGR_CACHE_DIR": ("",)},
)
# ggml's HRX backend keeps what its Loom compiler makes for each token count; deleting is safe, and
# entries of another build of it are never used (its documentation).
HRX = Cache(
    "hrx-jit",
    "GGML_HRX_JIT_CACHE_DIR",
    "~/.cache/1bit/hrx-jit",
    off={"GGML_HRX_JIT_CACHE": ("0", "off"), "GGML_HRX_LOOM_SANITIZER": ("*",)},
)

CACHES: dict[str, tuple[Cache, ...]] = {
    "hrx": (HRX, COMGR),
    "vulkan": (MESA, NVIDIA_GL),
    "zinc": (MESA,),
    "rocm": (COMGR,),
    "cuda": (CUDA,),
}


def plan_caches(device: str, env: Mapping[str, str], *, root: str) -> CachePlan:
    """Decide which variables a backend gets and where to look for its caches.

    Args:
        device: The device word, or a listed name (`Vulkan0`, `CUDA0`); several with commas.
        env: The user's environment (with what the configuration adds to it).
        root: Where our folders go, `$XDG_CACHE_HOME/onebit` or its default; empty for none, which
            leaves every cache where the driver puts it.
    """
    set_env: dict[str, str] = {}
    folders: list[str] = []
    look: list[tuple[str, str, str]] = []
    off: list[str] = []
    for cache in _caches_of(device):
        if _is_off(cache, env):
            off.append(cache.name)
            continue
        if env.get(cache.variable) or not root:
            folder = env.get(cache.variable) or _default(cache, env)
        else:
            folder = f"{root}/{cache.name}"
            set_env[cache.variable] = folder
            set_env.update({k: v for k, v in cache.extra.items() if k not in env})
            folders.append(folder)
        if folder:
            look.append((cache.name, folder, cache.inside))
    return CachePlan(set_env, tuple(folders), tuple(look), tuple(off))


def _caches_of(device: str) -> tuple[Cache, ...]:
    """Return the caches of a device; Metal and the CPU have none that a variable moves."""
    kinds = [one.rstrip("0123456789") for one in device.lower().split(",")]
    return tuple({cache.name: cache for kind in kinds for cache in CACHES.get(kind, ())}.values())


def _is_off(cache: Cache, env: Mapping[str, str]) -> bool:
    return any(
        env[variable].lower() in values or ("*" in values and env[variable])
        for variable, values in cache.off.items()
        if variable in env
    )


def _default(cache: Cache, env: Mapping[str, str]) -> str:
    home = env.get("HOME", "")
    cache_home = env.get("XDG_CACHE_HOME", "")
    if not cache_home.startswith("/"):
        cache_home = f"{home}/.cache" if home else ""
    if not home or not cache_home:
        return ""
    return cache.default.replace("~", home, 1).replace("$CACHE", cache_home, 1)
