from pathlib import Path

import pytest

from lightning_megatrain.memory import host


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("20GiB", 20 * 2**30),
        ("64 GB", 64 * 10**9),
        ("1.5tib", int(1.5 * 2**40)),
        ("123", 123),
        (4096, 4096),
        ("7k", 7000),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert host.parse_bytes(text) == count


def test_fraction_of_a_known_total() -> None:
    assert host.parse_bytes(0.5, total=100) == 50
    with pytest.raises(ValueError, match="fraction"):
        host.parse_bytes(0.5)


def test_sizes_for_people() -> None:
    assert host.format_bytes(100) == "100 bytes"
    assert host.format_bytes(3 * 2**30) == "3.0 GiB"
    assert host.format_bytes(1.5 * 2**40) == "1.50 TiB"


@pytest.mark.parametrize(
    ("a", "b", "texts"),
    [
        (2**30, 3 * 2**30, ("1.0 GiB", "3.0 GiB")),
        (2**30, 2**30, ("1.0 GiB", "1.0 GiB")),
        (16 * 2**30, 16 * 2**30 - 2**20, ("16.000 GiB", "15.999 GiB")),
        (2**41, 2**41 - 2**10, ("2.000000000 TiB", "1.999999999 TiB")),
        (100, 99, ("100 bytes", "99 bytes")),
    ],
)
def test_sizes_that_differ_print_apart(a: int, b: int, texts: tuple[str, str]) -> None:
    assert host.format_apart(a, b) == texts


def test_a_container_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\n")
    assert host._cgroup_left(tmp_path, "memory.max", "memory.current") == 400000
    (tmp_path / "memory.max").write_text("max\n")
    assert host._cgroup_left(tmp_path, "memory.max", "memory.current") is None
    assert host._cgroup_left(tmp_path / "none", "memory.max", "memory.current") is None


def test_this_machine_has_memory() -> None:
    assert 2**26 < host.available_host_bytes() < 2**50
