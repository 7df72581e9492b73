"""Every config file composes, and every value suits its target."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lightning_megatrain.cli.app import config_dir
from lightning_megatrain.cli.values import check_values

OPTIONS = [
    f"{path.parent.relative_to(config_dir()).as_posix()}={path.stem}" for path in sorted(config_dir().rglob("*/*.yaml"))
]


@pytest.fixture
def composed(tmp_path):
    def make(*overrides):
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            cfg = compose("train", overrides=list(overrides), return_hydra_config=True)
        cfg.hydra.runtime.output_dir = str(tmp_path)
        HydraConfig.instance().set_config(cfg)
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
        return cfg

    yield make
    HydraConfig.instance().cfg = None


def test_the_configs_are_where_the_package_finds_them():
    assert (Path(config_dir()) / "train.yaml").is_file()


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes(composed, option):
    cfg = composed(option)
    OmegaConf.resolve(cfg)
    check_values(cfg, targets={"optim": cfg.model["_target_"]})


def test_precision_reaches_the_trainer(composed):
    names = {
        option: composed(f"precision={option}").trainer.precision for option in ("fp32", "bf16_mixed", "bf16_true")
    }
    assert names == {"fp32": "32-true", "bf16_mixed": "bf16-mixed", "bf16_true": "bf16-true"}
