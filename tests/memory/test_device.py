"""What torch's allocator is told."""

import platform
from collections.abc import Iterator

import pytest
import torch

from lightning_megatrain.memory.device import CudaMemory, expand_segments, set_allocator

if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
    pytest.skip("this torch cannot say what its allocator was told", allow_module_level=True)
settings = torch._C._accelerator_getAllocatorSettings


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    before = settings()
    yield
    set_allocator(before)


@pytest.mark.parametrize("others", ["", "max_split_size_mb:512", "roundup_power2_divisions:[256:1,512:2,>:4]"])
def test_other_settings_stay(others: str) -> None:
    set_allocator(others)
    after = expand_segments()
    assert settings() == ",".join(filter(None, [others, "expandable_segments:True"]))
    assert after is not None
    set_allocator(after)
    assert settings() == ",".join(filter(None, [others, "expandable_segments:False"]))
    assert expand_segments() == after  # the next run
    assert settings().endswith("expandable_segments:True")


@pytest.mark.parametrize("names", [(), ("PYTORCH_ALLOC_CONF",), ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")])
def test_a_torch_that_does_not_tell_its_settings(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As before torch 2.13: what the process was started with is said again."""
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    for index, name in enumerate(names):
        monkeypatch.setenv(name, f"max_split_size_mb:{512 + index}")
    others = "max_split_size_mb:512," if names else ""
    assert expand_segments() == f"{others}expandable_segments:False"
    assert settings() == f"{others}expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("chosen", ["True", "False"])
def test_what_the_user_chose_stays(name: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, f"max_split_size_mb:512,expandable_segments:{chosen}")
    set_allocator(f"max_split_size_mb:512,expandable_segments:{chosen}")
    assert expand_segments() is None
    assert settings() == f"max_split_size_mb:512,expandable_segments:{chosen}"


@pytest.mark.parametrize(
    ("system", "release"), [("Linux", "6.6.87.2-microsoft-standard-WSL2"), ("Windows", "11"), ("Linux", "6.8.0")]
)
def test_only_where_the_system_can_map(system: str, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    before = settings()
    assert (expand_segments() is not None) == (release == "6.8.0")
    assert (settings() != before) == (release == "6.8.0")


def test_who_uses_them_already_keeps_them() -> None:
    """The user by a call of torch, or a run around this one."""
    set_allocator("expandable_segments:True")
    assert expand_segments() is None
    assert settings() == "expandable_segments:True"


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_device_that_cannot_map(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for one: the first allocation fails, and not because it is full."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 * gib, 8 * gib))
    for name in ("memory_reserved", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0, raising=False)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *_: None)
    empty, tried = torch.empty, []

    def failing(*args: object, **kwargs: object) -> torch.Tensor:
        tried.append(settings())
        if len(tried) == 1:
            raise error("CUDA driver error: operation not supported")
        return empty(0)

    monkeypatch.setattr(torch, "empty", failing)
    set_allocator("max_split_size_mb:512,expandable_segments:False")
    CudaMemory(torch.device("cuda", 0)).close()
    assert not tried
    assert settings() == "max_split_size_mb:512,expandable_segments:False"
    memory = CudaMemory(torch.device("cuda", 0), "4GiB")
    assert tried == ["max_split_size_mb:512,expandable_segments:True"]
    works = error is torch.OutOfMemoryError
    assert settings() == f"max_split_size_mb:512,expandable_segments:{works}"
    memory.close()
    assert settings() == "max_split_size_mb:512,expandable_segments:False"
