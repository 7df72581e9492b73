"""`megatrain bench link`: what it measures, and what it says where there is no link."""

import dataclasses
import json

import pytest
import torch

from lightning_megatrain.cli import bench_link
from lightning_megatrain.cli.app import UserError
from lightning_megatrain.cli.main import main
from lightning_megatrain.stream import bench
from lightning_megatrain.stream.bench import LinkRates
from lightning_megatrain.stream.streams import HostStreams


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_without_a_gpu_one_sentence_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "link"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "a CUDA device is needed" in captured.err


def test_each_rate_counts_the_bytes_of_its_own_copies(monkeypatch):
    copied = []

    class Streams(HostStreams):
        def copy(self, lane, target, source, after=()):
            copied.append((lane, target.numel(), source.data_ptr(), target.data_ptr()))
            return super().copy(lane, target, source, after)

    monkeypatch.setattr(bench.Streams, "on", staticmethod(Streams))
    monkeypatch.setattr(bench, "_seconds", lambda run, device, times: run() or 2.0**-30)
    rates = bench.bench_link(torch.device("cpu"), [1 << 10, 1 << 12])
    per_copy = [(1 << 40) / 1e9, (1 << 42) / 1e9]  # of one copy in 2**-30 seconds
    assert rates == [LinkRates(n, r, r, 2 * r, r, r) for n, r in zip((1 << 10, 1 << 12), per_copy, strict=True)]
    assert [lane for lane, *_ in copied[:6]] == ["fetch", "push", "fetch", "push", "fetch", "push"]
    fetch, push, fetch_too, push_too, pageable_in, pageable_out = copied[:6]
    assert (fetch, push) == (fetch_too, push_too)
    assert pageable_in[2] not in (fetch[2], push[2])
    assert pageable_out[3] not in (fetch[3], push[3])


@pytest.fixture
def measured(monkeypatch):
    """As on a machine with a GPU, whose rates are known."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_link, "bench_link", lambda device, sizes: [LinkRates(n, 1, 2, 3, 4, 5) for n in sizes])
    monkeypatch.setattr(bench_link, "circumstances", lambda command, device: {"command": command})


def test_the_table_and_the_json_have_every_size(capsys, measured):
    assert main(["bench", "link", "smallest=1MiB", "largest=8MiB"]) == 0
    out = capsys.readouterr().out
    assert all(size in out for size in ("1.0 MiB", "4.0 MiB", "8.0 MiB", "both at once"))
    assert main(["bench", "link", "smallest=1KiB", "largest=1KiB", "output=json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rates"] == [dataclasses.asdict(LinkRates(1024, 1, 2, 3, 4, 5))]


def test_sizes_that_are_no_range_are_refused(capsys, measured):
    with pytest.raises(UserError, match="smallest=2MiB and largest=1MiB are no range"):
        bench_link.sizes_between("2MiB", "1MiB")
    with pytest.raises(SystemExit):
        main(["bench", "link", "largest=wide"])
    assert "'wide' is not a size" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_registered_memory_is_faster_and_both_ways_are_faster_than_one(capsys):
    assert main(["bench", "link", "smallest=64MiB", "largest=64MiB", "output=json"]) == 0
    [rate] = json.loads(capsys.readouterr().out)["rates"]
    assert rate["to_device_gb_s"] > rate["pageable_to_device_gb_s"]
    assert rate["both_gb_s"] > max(rate["to_device_gb_s"], rate["to_host_gb_s"])
