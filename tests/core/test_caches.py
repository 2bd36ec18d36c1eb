from __future__ import annotations

import pytest

from onebit_serve.core.caches import CACHES, CachePlan, describe, plan_caches

ROOT = "/cache/onebit"
HOME = {"HOME": "/home/u"}


def test_vulkan_gets_private_folders_for_mesa_and_nvidia():
    plan = plan_caches("Vulkan0", HOME, root=ROOT)
    assert plan.set_env == {
        "MESA_SHADER_CACHE_DIR": "/cache/onebit/mesa",
        "__GL_SHADER_DISK_CACHE_PATH": "/cache/onebit/nvidia",
        "__GL_SHADER_DISK_CACHE_SKIP_CLEANUP": "1",
    }
    assert plan.folders == ("/cache/onebit/mesa", "/cache/onebit/nvidia")
    assert plan.look[0] == ("mesa", "/cache/onebit/mesa", "mesa_shader_cache*")


def test_hrx_keeps_its_compiled_kernels():
    plan = plan_caches("hrx", HOME, root=ROOT)
    assert plan.set_env["GGML_HRX_JIT_CACHE_DIR"] == "/cache/onebit/hrx-jit"


@pytest.mark.parametrize(
    ("device", "variable"),
    [
        ("HRX0", "GGML_HRX_JIT_CACHE_DIR"),
        ("ROCm1", "AMD_COMGR_CACHE_DIR"),
        ("CUDA0", "CUDA_CACHE_PATH"),
        ("zinc", "MESA_SHADER_CACHE_DIR"),
    ],
)
def test_listed_names_have_the_caches_of_their_device(device, variable):
    assert variable in plan_caches(device, HOME, root=ROOT).set_env


@pytest.mark.parametrize("device", ["cpu", "mlx", "MTL0", "unheard"])
def test_devices_without_a_known_cache_get_nothing(device):
    assert plan_caches(device, HOME, root=ROOT).set_env == {}


def test_a_folder_the_user_set_wins_and_is_looked_into():
    env = {**HOME, "MESA_SHADER_CACHE_DIR": "/mine"}
    plan = plan_caches("vulkan", env, root=ROOT)
    assert "MESA_SHADER_CACHE_DIR" not in plan.set_env
    assert "/cache/onebit/mesa" not in plan.folders
    assert plan.look[0] == ("mesa", "/mine", "mesa_shader_cache*")


@pytest.mark.parametrize(
    ("device", "variable", "value", "name"),
    [
        ("vulkan", "MESA_SHADER_CACHE_DISABLE", "true", "mesa"),
        ("vulkan", "MESA_SHADER_CACHE_DISABLE", "1", "mesa"),
        ("vulkan", "__GL_SHADER_DISK_CACHE", "0", "nvidia"),
        ("hrx", "GGML_HRX_JIT_CACHE", "OFF", "hrx-jit"),
        ("hrx", "GGML_HRX_LOOM_SANITIZER", "address", "hrx-jit"),
        ("rocm", "AMD_COMGR_CACHE", "0", "comgr"),
        ("rocm", "AMD_COMGR_CACHE_DIR", "", "comgr"),
        ("cuda", "CUDA_CACHE_DISABLE", "1", "cuda"),
    ],
)
def test_a_cache_the_user_turned_off_stays_off(device, variable, value, name):
    plan = plan_caches(device, {**HOME, variable: value}, root=ROOT)
    assert plan.off == (name,)
    assert all(look[0] != name for look in plan.look)
    assert not any(folder.endswith(name) for folder in plan.folders)


def test_a_variable_that_says_on_turns_nothing_off():
    env = {**HOME, "MESA_SHADER_CACHE_DISABLE": "false", "GGML_HRX_JIT_CACHE": "1"}
    assert plan_caches("vulkan", env, root=ROOT).off == ()
    assert plan_caches("hrx", env, root=ROOT).off == ()


def test_an_extra_the_user_set_is_left_alone():
    env = {**HOME, "__GL_SHADER_DISK_CACHE_SKIP_CLEANUP": "0"}
    assert (
        "__GL_SHADER_DISK_CACHE_SKIP_CLEANUP" not in plan_caches("vulkan", env, root="/r").set_env
    )


def test_without_a_place_of_ours_the_drivers_own_is_looked_into():
    plan = plan_caches("rocm", {**HOME, "XDG_CACHE_HOME": "/xdg"}, root="")
    assert (plan.set_env, plan.folders) == ({}, ())
    assert plan.look == (("comgr", "/xdg/comgr", "*"),)
    assert plan_caches("hrx", HOME, root="").look[0][1] == "/home/u/.cache/1bit/hrx-jit"


def test_without_a_home_there_is_nowhere_to_look():
    assert plan_caches("rocm", {}, root="").look == ()


def test_folders_are_told_apart_by_name():
    caches = [cache for device in CACHES.values() for cache in device]
    assert len({c.name for c in caches}) == len({c.variable for c in caches})


def test_several_devices_have_the_caches_of_all():
    plan = plan_caches("vulkan,hrx", HOME, root=ROOT)
    assert [name for name, _, _ in plan.look] == ["mesa", "nvidia", "hrx-jit", "comgr"]


def test_a_start_says_how_it_finds_its_caches():
    plan = plan_caches("zinc", HOME, root=ROOT)
    assert describe(plan, ("mesa",)) == "driver cache found: mesa"
    assert "kept in /cache/onebit/mesa" in describe(plan, ())
    off = plan_caches("zinc", {**HOME, "MESA_SHADER_CACHE_DISABLE": "1"}, root=ROOT)
    assert describe(off, ()) == "the driver cache is off (mesa)"
    assert describe(CachePlan(), ()) == ""


def test_a_start_does_not_say_that_something_is_kept_where_nothing_can_be():
    plan = plan_caches("zinc", HOME, root=ROOT)
    said = describe(plan, (), ("/cache/onebit/mesa",))
    assert "is not kept: check /cache/onebit/mesa" in said
    assert describe(plan, ("mesa",), ("/cache/onebit/mesa",)) == "driver cache found: mesa"
