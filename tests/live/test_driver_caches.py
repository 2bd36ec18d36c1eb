from __future__ import annotations

from onebit_serve.core.caches import CachePlan, plan_caches
from onebit_serve.live.driver_caches import found, make_folders


def test_a_fresh_folder_is_not_a_found_cache(tmp_path):
    plan = plan_caches("vulkan", {}, root=str(tmp_path / "onebit"))
    assert found(plan) == ()
    assert make_folders(plan) == ()
    assert found(plan) == ()
    assert (tmp_path / "onebit" / "mesa").stat().st_mode & 0o777 == 0o700


def test_a_cache_with_entries_is_found_and_one_with_an_index_only_is_not(tmp_path):
    plan = plan_caches("vulkan", {}, root=str(tmp_path))
    folder = tmp_path / "mesa" / "mesa_shader_cache"
    folder.mkdir(parents=True)
    (folder / "index").write_bytes(b"\0" * 1024)
    assert found(plan) == ()
    (folder / "ab").mkdir()
    (folder / "ab" / "cdef").write_bytes(b"shader")
    assert found(plan) == ("mesa",)


def test_other_things_in_a_cache_home_are_not_mesas(tmp_path):
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "wheel").write_text("x")
    assert found(plan_caches("vulkan", {"MESA_SHADER_CACHE_DIR": str(tmp_path)}, root="/r")) == ()


def test_a_cache_that_is_one_file_is_found(tmp_path):
    (tmp_path / "hrx-jit").mkdir()
    (tmp_path / "hrx-jit" / "0123.bin").write_bytes(b"kernel")
    assert found(plan_caches("hrx", {}, root=str(tmp_path))) == ("hrx-jit",)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file")
    folder = str(tmp_path / "taken" / "mesa")
    assert make_folders(CachePlan(folders=(folder,))) == (folder,)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda _path, _mode: False)
    assert make_folders(CachePlan(folders=(str(tmp_path),))) == (str(tmp_path),)
