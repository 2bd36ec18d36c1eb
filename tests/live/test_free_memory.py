from __future__ import annotations

import psutil
import pytest

from onebit_serve.live.free_memory import machine_memory

MIB = 1 << 20


@pytest.fixture
def group(tmp_path):
    """Return a function that writes a cgroup's files, and the arguments that find it."""
    own = tmp_path / "own"
    own.write_text("12:cpu:/other\n0::/a/b\n")
    (tmp_path / "cgroup" / "a" / "b").mkdir(parents=True)

    def write(path, **files):
        for name, text in files.items():
            (tmp_path / "cgroup" / path / name.replace("_", ".")).write_text(text)

    write.places = (tmp_path / "cgroup", own)
    return write


def test_without_a_limit_it_is_the_machines(group, tmp_path):
    total = psutil.virtual_memory().total
    group("a/b", memory_max="max\n", memory_current="5\n")
    assert machine_memory(*group.places)[0] == total
    assert machine_memory(tmp_path / "none", tmp_path / "none")[0] == total
    seen_total, free = machine_memory()
    assert 0 < free <= seen_total <= total


def test_a_container_has_what_it_may_have(group):
    stat = f"anon 1\ninactive_file {2 * MIB}\n"
    group("a/b", memory_max=f"{10 * MIB}", memory_current=f"{7 * MIB}", memory_stat=stat)
    assert machine_memory(*group.places) == (10 * MIB, 5 * MIB)


def test_a_limit_of_a_group_above_counts(group):
    group("a/b", memory_max=f"{10 * MIB}", memory_current="0")
    group("a", memory_max=f"{4 * MIB}", memory_current=f"{9 * MIB}")
    assert machine_memory(*group.places) == (4 * MIB, 0)
