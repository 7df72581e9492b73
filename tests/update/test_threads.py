"""The thread count follows physical cores, the affinity mask and the cgroup's quota."""

import os
from pathlib import Path

import pytest

from lightning_megatrain.update.threads import Topology, plan_threads, read_topology


def _machine(cores: int, *, smt: int = 1, nodes: int = 1, quota: float | None = None) -> Topology:
    """Cores numbered as Linux does: first threads of all cores, then second threads; nodes in contiguous halves."""
    threads = tuple(tuple(core + cores * t for t in range(smt)) for core in range(cores))
    return Topology(threads, tuple(core * nodes // cores for core in range(cores)), quota)


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 2), (4, 4), (5, 4), (7, 6), (8, 6), (16, 14), (64, 62)])
def test_auto_leaves_cores_for_the_launch_thread(cores: int, count: int) -> None:
    assert plan_threads(topology=_machine(cores)).count == count


def test_second_hardware_threads_do_not_count() -> None:
    plan = plan_threads(topology=_machine(8, smt=2))
    assert plan.count == 6
    assert plan.cpus == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(("quota", "count"), [(0.5, 1), (3.9, 3), (8.0, 6), (100.0, 14)])
def test_quota_caps_the_cores(quota: float, count: int) -> None:
    assert plan_threads(topology=_machine(16, quota=quota)).count == count


def test_nodes_take_turns_and_threads_are_bound() -> None:
    plan = plan_threads(4, topology=_machine(8, nodes=2))
    assert plan.cpus == (0, 4, 1, 5)
    assert plan.bound
    assert "4 update threads (bound to cores) on 8 physical cores" in plan.describe()
    assert "2 NUMA nodes" in plan.describe()


def test_one_node_is_not_bound_unless_asked() -> None:
    assert not plan_threads(2, topology=_machine(4)).bound
    assert plan_threads(2, bind=True, topology=_machine(4)).bound


def test_more_threads_than_cores_are_allowed_but_cannot_be_bound() -> None:
    machine = _machine(2, nodes=2)
    assert not plan_threads(3, topology=machine).bound
    with pytest.raises(ValueError, match="set threads to at most 2"):
        plan_threads(3, bind=True, topology=machine)


@pytest.mark.parametrize("threads", [0, -1, True, 1.5, "all"])
def test_nonsense_is_refused(threads: object) -> None:
    with pytest.raises(ValueError, match="positive integer"):
        plan_threads(threads)  # type: ignore[arg-type]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _sysfs(root: Path) -> None:
    """Four cores of two threads on two nodes."""
    for cpu in range(8):
        core = cpu % 4
        _write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{core},{core + 4}\n")
    _write(root / "sys/devices/system/node/node0/cpulist", "0-1,4-5\n")
    _write(root / "sys/devices/system/node/node1/cpulist", "2-3,6-7\n")


def test_topology_is_read_from_sysfs(tmp_path: Path) -> None:
    _sysfs(tmp_path)
    topology = read_topology(tmp_path, frozenset(range(8)))
    assert topology.cores == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert topology.nodes == (0, 0, 1, 1)
    assert topology.quota is None


def test_affinity_hides_cores(tmp_path: Path) -> None:
    _sysfs(tmp_path)
    topology = read_topology(tmp_path, frozenset({1, 5, 6}))
    assert topology.cores == ((1, 5), (6,))
    assert topology.nodes == (0, 1)


def test_nothing_to_read_means_one_core_per_cpu(tmp_path: Path) -> None:
    topology = read_topology(tmp_path, frozenset({0, 3}))
    assert topology == Topology(((0,), (3,)), (0, 0), None)


def test_cgroup_v2_takes_the_tightest_parent(tmp_path: Path) -> None:
    _write(tmp_path / "proc/self/cgroup", "0::/pod/container\n")
    _write(tmp_path / "sys/fs/cgroup/pod/container/cpu.max", "max 100000\n")
    _write(tmp_path / "sys/fs/cgroup/pod/cpu.max", "350000 100000\n")
    _write(tmp_path / "sys/fs/cgroup/cpu.max", "800000 100000\n")
    assert read_topology(tmp_path, frozenset({0})).quota == 3.5


def test_cgroup_path_that_is_not_mounted_falls_back_to_the_root(tmp_path: Path) -> None:
    _write(tmp_path / "proc/self/cgroup", "0::/somewhere/on/the/host\n")
    _write(tmp_path / "sys/fs/cgroup/cpu.max", "200000 100000\n")
    assert read_topology(tmp_path, frozenset({0})).quota == 2.0


def test_cgroup_v1(tmp_path: Path) -> None:
    _write(tmp_path / "proc/self/cgroup", "5:memory:/a\n4:cpu,cpuacct:/a\n")
    _write(tmp_path / "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "150000\n")
    _write(tmp_path / "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n")
    assert read_topology(tmp_path, frozenset({0})).quota == 1.5
    _write(tmp_path / "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "-1\n")
    assert read_topology(tmp_path, frozenset({0})).quota is None


def test_this_machine() -> None:
    plan = plan_threads()
    assert 1 <= plan.count <= (os.cpu_count() or 1)
