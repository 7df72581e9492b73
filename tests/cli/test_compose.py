"""Every config file composes, and every value suits its target."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lightning_megatrain.cli.app import config_dir
from lightning_megatrain.cli.values import check_values
from lightning_megatrain.memory.host import parse_bytes

OPTIONS = [
    f"{path.parent.relative_to(config_dir()).as_posix()}={path.stem}" for path in sorted(config_dir().rglob("*/*.yaml"))
]
PLAN_ONLY = [option for option in OPTIONS if option.partition("=")[0] in ("host", "gpu", "node")]


@pytest.fixture
def composed(tmp_path):
    def make(*overrides, config="train"):
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            cfg = compose(config, overrides=list(overrides), return_hydra_config=True)
        cfg.hydra.runtime.output_dir = str(tmp_path)
        HydraConfig.instance().set_config(cfg)
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
        return cfg

    yield make
    HydraConfig.instance().cfg = None


def test_the_configs_are_where_the_package_finds_them():
    assert (Path(config_dir()) / "train.yaml").is_file()


@pytest.mark.parametrize("option", [option for option in OPTIONS if option not in PLAN_ONLY])
def test_every_option_composes(composed, option):
    cfg = composed(option)
    OmegaConf.resolve(cfg)
    check_values(cfg, targets={"optim": cfg.model["_target_"]})


@pytest.mark.parametrize("option", OPTIONS)
def test_a_plan_takes_every_option_of_training_and_the_machine(composed, option):
    cfg = composed(option, config="plan")
    OmegaConf.resolve(cfg)
    check_values(cfg, targets={"optim": cfg.model["_target_"]})


@pytest.mark.parametrize("group", ["host", "gpu", "node"])
def test_every_machine_of_a_group_has_the_same_fields(composed, group):
    machines = {
        option: composed(option, config="plan")[group] for option in PLAN_ONLY if option.startswith(f"{group}=")
    }
    assert len({tuple(machine) for machine in machines.values()}) == 1
    for option, machine in machines.items():
        numbers = {key: value for key, value in machine.items() if key not in ("name", "memory")}
        if option.endswith("=auto"):
            assert set(machine.values()) == {None}
        elif option != "gpu=none":
            assert parse_bytes(machine.memory) > 2**30
            assert all(isinstance(value, (int, float)) and value > 0 for value in numbers.values())


def test_precision_reaches_the_trainer(composed):
    names = {
        option: composed(f"precision={option}").trainer.precision for option in ("fp32", "bf16_mixed", "bf16_true")
    }
    assert names == {"fp32": "32-true", "bf16_mixed": "bf16-mixed", "bf16_true": "bf16-true"}
