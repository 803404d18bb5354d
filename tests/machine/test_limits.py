"""Memory and cores that the process may use, under control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from specgen.machine import cgroup
from specgen.machine.devices import allowed_cores
from specgen.machine.memory import free_memory

UNLIMITED = 9223372036854771712  # what version 1 writes where there is no limit


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "root")
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    return tmp_path


def write(groups: Path, own: str, **files: object) -> None:
    """own: lines of /proc/self/cgroup; files: by path, with __ for / and _DOT_ for a dot in its name."""
    (groups / "own").write_text(own)
    for name, content in files.items():
        path = groups / "root" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def test_without_groups_the_machine_alone_limits(groups: Path) -> None:
    assert cgroup.memory_left() is None
    assert cgroup.cores() is None
    write(groups, "0::/\n", memory_DOT_max="max", memory_DOT_current=5, cpu_DOT_max="max 100000")
    assert cgroup.memory_left() is None
    assert cgroup.cores() is None
    assert 0 < free_memory() <= psutil.virtual_memory().total
    assert allowed_cores() >= 1


def test_version_2_limits_memory_and_cores(groups: Path) -> None:
    write(
        groups,
        "0::/\n",
        memory_DOT_max=1000,
        memory_DOT_current=700,
        memory_DOT_stat="anon 500\nfile 200\ninactive_file 150\nactive_file 50",
        cpu_DOT_max="50000 100000",
    )
    assert free_memory() == free_memory(torch.device("cpu")) == 1000 - (700 - 150)
    assert allowed_cores() == 0.5


def test_version_1_limits_memory_and_cores(groups: Path) -> None:
    write(
        groups,
        "4:memory:/\n2:cpu,cpuacct:/\n0::/\n",
        memory__memory_DOT_limit_in_bytes=1000,
        memory__memory_DOT_usage_in_bytes=700,
        memory__memory_DOT_stat="inactive_file 1\ntotal_inactive_file 100",
        cpu__cpu_DOT_cfs_quota_us=25000,
        cpu__cpu_DOT_cfs_period_us=100000,
    )
    assert free_memory() == 400
    assert allowed_cores() == 0.25


def test_version_1_without_limits(groups: Path) -> None:
    write(
        groups,
        "4:memory:/\n2:cpu:/\n",
        memory__memory_DOT_limit_in_bytes=UNLIMITED,
        memory__memory_DOT_usage_in_bytes=700,
        cpu__cpu_DOT_cfs_quota_us=-1,
        cpu__cpu_DOT_cfs_period_us=100000,
    )
    assert free_memory() <= psutil.virtual_memory().total
    assert cgroup.cores() is None


@pytest.mark.parametrize("tight", ["", "a__", "a__b__"], ids=["root", "parent", "own"])
def test_the_tightest_of_a_group_and_its_parents_counts(groups: Path, tight: str) -> None:
    loose = {f"{at}memory_DOT_max": 5000 for at in ("", "a__", "a__b__")}
    used = {f"{at}memory_DOT_current": 100 for at in ("", "a__", "a__b__")}
    quotas = {f"{at}cpu_DOT_max": "90000 100000" for at in ("", "a__", "a__b__")}
    limits = {f"{tight}memory_DOT_max": 300, f"{tight}cpu_DOT_max": "10000 100000"}
    write(groups, "0::/a/b\n", **{**loose, **used, **quotas, **limits})
    assert free_memory() == 200
    assert allowed_cores() == pytest.approx(0.1)


def test_a_group_outside_the_container_leaves_the_limits_of_the_root(groups: Path) -> None:
    write(groups, "0::/../../docker/xyz\n", memory_DOT_max=300, memory_DOT_current=100)
    for name in ("memory.max", "memory.current"):  # above the root: no group at all
        (groups / name).write_text("10")
    assert free_memory() == 200
    write(groups, "0::/\n", memory_DOT_current=400)
    assert free_memory() == 0  # over its limit


def test_what_cannot_be_read_limits_nothing(groups: Path) -> None:
    write(groups, "damaged", memory_DOT_max=300, memory_DOT_current=100)
    assert cgroup.memory_left() is None
    write(groups, "0::/\n", memory_DOT_max=300, memory_DOT_current="?", cpu_DOT_max="1")
    assert cgroup.memory_left() is None
    assert cgroup.cores() is None
