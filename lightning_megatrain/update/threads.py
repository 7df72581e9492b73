"""How many threads the host update uses, and where they may run.

The update is bound by memory, so a second hardware thread on a core adds nothing, and it shares the machine with
the thread that launches GPU work, which must never wait for a core. ``"auto"`` therefore counts physical cores this
process may really use (its affinity mask and its cgroup's CPU quota) and leaves a few free where there are enough.

On a host with several NUMA nodes the chosen cores alternate between the nodes, so that every memory controller is
in use whatever the count, and threads are bound to them; on one node the scheduler does better unbound.
"""

import math
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

Threads = int | Literal["auto"]


@dataclass(frozen=True)
class Topology:
    """What this process may run on: each physical core's hardware threads, and its NUMA node, in the same order."""

    cores: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]
    quota: float | None  # CPU seconds per second that the cgroup grants; None: no limit

    @property
    def usable_cores(self) -> int:
        """Physical cores, or the quota where that is less."""
        cores = len(self.cores)
        return cores if self.quota is None else max(1, min(cores, math.floor(self.quota)))


@dataclass(frozen=True)
class ThreadPlan:
    """The choice made. ``cpus``, one hardware thread for each of ours, is what they are bound to if ``bound``."""

    count: int
    bound: bool
    cpus: tuple[int, ...]
    topology: Topology

    def describe(self) -> str:
        """One line for the start-up summary."""
        t = self.topology
        nodes = len(set(t.nodes))
        quota = "" if t.quota is None else f", quota {t.quota:g} CPUs"
        placed = "bound to cores" if self.bound else "not bound"
        return (
            f"{self.count} update threads ({placed}) on {len(t.cores)} physical cores "
            f"({sum(map(len, t.cores))} hardware threads, {nodes} NUMA node{'s' * (nodes != 1)}{quota})"
        )


def plan_threads(
    threads: Threads = "auto", *, bind: bool | None = None, topology: Topology | None = None
) -> ThreadPlan:
    """Choose the threads of the host update.

    Args:
        threads: a count, or ``"auto"``: all usable physical cores up to 4, one less up to 7, two less from 8.
        bind: bind each thread to its core; by default only where there is more than one NUMA node and a core for
            each thread.
        topology: the machine to plan for; this one by default.

    Raises:
        ValueError: ``threads`` is neither ``"auto"`` nor a positive integer, or ``bind`` asks for more threads than
            there are cores.
    """
    topology = topology or read_topology()
    if threads == "auto":
        usable = topology.usable_cores
        count = usable - (0 if usable < 5 else 1 if usable < 8 else 2)
    elif isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1:
        count = threads
    else:
        raise ValueError(f'threads={threads!r} must be "auto" or a positive integer.')

    cpus = _alternate(topology)[:count]
    if bind and len(cpus) < count:
        raise ValueError(
            f"bind=True needs a physical core for each of {count} threads, this process may use {len(topology.cores)}; "
            f"set threads to at most {len(topology.cores)}, or bind=False."
        )
    bound = len(set(topology.nodes)) > 1 and len(cpus) == count if bind is None else bind
    return ThreadPlan(count, bound, cpus, topology)


@lru_cache(maxsize=1)
def default_threads() -> ThreadPlan:
    """``plan_threads("auto")`` for this process, worked out once."""
    return plan_threads()


def read_topology(root: Path = Path("/"), affinity: frozenset[int] | None = None) -> Topology:
    """Read what this process may use from sysfs and its cgroup.

    Args:
        root: where ``sys`` and ``proc`` are found; a test's own tree.
        affinity: the CPUs allowed; this process's mask by default.

    What cannot be read counts as absent: every CPU is then its own core, on node 0, without a quota.
    """
    if affinity is None:
        affinity = (
            frozenset(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else frozenset(range(os.cpu_count() or 1))
        )
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(affinity):
        siblings = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(_parse_cpu_list(siblings) or (cpu,), []).append(cpu)

    node_of: dict[int, int] = {}
    for directory in (root / "sys/devices/system/node").glob("node[0-9]*"):
        for cpu in _parse_cpu_list(_read(directory / "cpulist")):
            node_of[cpu] = int(directory.name.removeprefix("node"))
    threads = tuple(tuple(core) for core in cores.values())
    return Topology(threads, tuple(node_of.get(core[0], 0) for core in threads), _read_quota(root))


def _alternate(topology: Topology) -> tuple[int, ...]:
    """The first hardware thread of every core, taking the nodes in turn."""
    by_node: dict[int, list[int]] = {}
    for core, node in zip(topology.cores, topology.nodes, strict=True):
        by_node.setdefault(node, []).append(core[0])
    ranked = [(rank, node, cpu) for node, cpus in by_node.items() for rank, cpu in enumerate(cpus)]
    return tuple(cpu for _, _, cpu in sorted(ranked))


def _read_quota(root: Path) -> float | None:
    """The tightest CPU quota of this process's cgroup and its parents (v2 ``cpu.max``, v1 ``cpu.cfs_*``)."""
    limits: list[float] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = root / "sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
        else:
            continue
        # Inside a container the path may name a place that is not mounted here; the mount's root is then ours.
        group = mount / path.strip("/")
        for directory in [group, *group.parents]:
            limits += _quota_of(directory)
            if directory == mount:
                break
    return min(limits, default=None)


def _quota_of(directory: Path) -> list[float]:
    text = _read(directory / "cpu.max") or " ".join(
        _read(directory / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    )
    match text.split():
        case [quota, period] if quota.isdigit() and period.isdigit() and int(period) > 0:
            return [int(quota) / int(period)]
    return []


def _parse_cpu_list(text: str) -> tuple[int, ...]:
    """``"0-3,8"`` as ``(0, 1, 2, 3, 8)``."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
