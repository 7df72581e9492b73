"""Every model config has the architecture that its publisher states, counted without its memory."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import lightning_megatrain
from lightning_megatrain.cli.app import config_dir
from lightning_megatrain.stream.discovery import find_units

STATUS = Path("/proc/self/status")


class Published(NamedTuple):
    exact: int
    stated: float | None = None  # by the publisher, in billions, as rounded there
    stated_active: float | None = None  # the same, of the parameters that one token uses


MODELS = {
    "tiny": Published(3_344_640),
    "qwen2_5_0_5b": Published(494_032_768, 0.49),
    "qwen2_5_3b": Published(3_085_938_688, 3.09),
    "qwen2_5_7b": Published(7_615_616_512, 7.61),
    "qwen2_5_14b": Published(14_770_033_664, 14.7),
    "qwen2_5_32b": Published(32_763_876_352, 32.5),
    "qwen2_5_72b": Published(72_706_203_648, 72.7),
    "qwen3_8b": Published(8_190_735_360, 8.2),
    "qwen3_14b": Published(14_768_307_200, 14.8),
    "qwen3_32b": Published(32_762_123_264, 32.8),
    "qwen3_30b_a3b": Published(30_532_122_624, 30.5, 3.3),
    "llama3_1_8b": Published(8_030_261_248, 8.0),
    "llama3_1_70b": Published(70_553_706_496, 70.0),
    "mistral_large_123b": Published(122_610_069_504, 123.0),
    "gpt_oss_20b": Published(20_914_757_184, 20.9, 3.6),
    "gpt_oss_120b": Published(116_829_156_672, 116.8, 5.1),
    "dense_120b": Published(119_817_349_120, 120.0),
}
MIXTURES = [name for name, published in MODELS.items() if published.stated_active]


def build(name):
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose("train", overrides=[f"model={name}"])
    with torch.device("meta"):
        return instantiate(cfg.model)


def numel(parameters):
    return sum(parameter.numel() for parameter in parameters)


def test_every_config_is_in_the_table():
    found = {path.stem for path in (config_dir() / "model").glob("*.yaml")}
    assert found == {*MODELS, "pretrained"}  # which has no shape of its own


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_published(name):
    module = build(name)
    published = MODELS[name]
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert numel(module.parameters()) == published.exact
    if published.stated is not None:
        assert published.exact / 1e9 == pytest.approx(published.stated, rel=0.01)


@pytest.mark.parametrize("name", MIXTURES)
def test_active_parameters_are_as_published(name):
    """A token uses everything but the experts that it is not routed to.

    The embedding, of which a token reads one row, is counted for Qwen3 and not for gpt-oss, as their publishers do.
    """
    model = build(name).model
    experts = numel(p for key, p in model.named_parameters() if ".experts." in key)
    count = getattr(model.config, "num_local_experts", None) or model.config.num_experts  # the name varies by release
    idle = 1 - model.config.num_experts_per_tok / count
    active = numel(model.parameters()) - experts * idle
    if model.config.model_type == "gpt_oss":
        active -= model.get_input_embeddings().weight.numel()
    assert active / 1e9 == pytest.approx(MODELS[name].stated_active, rel=0.02)


@pytest.mark.parametrize("name", MODELS)
def test_units_are_the_decoder_blocks(name):
    module = build(name)
    units = find_units(module)
    assert list(units) == [f"model.model.layers.{index}" for index in range(module.model.config.num_hidden_layers)]


@pytest.mark.skipif(not STATUS.exists(), reason="reads the peak from /proc")
def test_building_the_largest_takes_little_memory_and_time():
    """In a process of its own, whose peak is that of the imports and the three models."""
    code = (
        "import re, time; from test_models import STATUS, build; start = time.perf_counter();"
        "[build(name) for name in ('dense_120b', 'mistral_large_123b', 'gpt_oss_120b')];"
        "print(time.perf_counter() - start, re.search(r'VmHWM:\\s+(\\d+) kB', STATUS.read_text())[1])"
    )
    paths = [str(Path(lightning_megatrain.__file__).parents[1]), str(Path(__file__).parent)]
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    seconds, peak_kib = run.stdout.split()
    assert float(seconds) < 10
    assert int(peak_kib) < 2 * 2**20
