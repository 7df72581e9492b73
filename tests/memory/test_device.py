"""What torch's allocator is told."""

import platform
from collections.abc import Iterator

import pytest
import torch

from lightning_megatrain.memory.device import expand_segments, set_allocator

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
    assert expand_segments() == after  # a second run finds what the first left
    assert settings().endswith("expandable_segments:True")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("chosen", ["True", "False"])
def test_what_the_user_chose_stays(name: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, f"max_split_size_mb:512,expandable_segments:{chosen}")
    set_allocator(f"max_split_size_mb:512,expandable_segments:{chosen}")
    assert expand_segments() is None
    assert settings() == f"max_split_size_mb:512,expandable_segments:{chosen}"


def test_not_on_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    assert expand_segments() is None
    assert settings() == ""
