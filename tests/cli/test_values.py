"""Config values against the annotations of their targets."""

import pytest
from omegaconf import OmegaConf

from lightning_megatrain.cli.app import UserError
from lightning_megatrain.cli.values import check_values

TRAINER = "lightning.pytorch.Trainer"


def check(key, value):
    check_values(OmegaConf.create({"trainer": {"_target_": TRAINER, key: value}}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_steps", 5),
        ("max_epochs", None),
        ("precision", "bf16-mixed"),
        ("gradient_clip_val", 1),
        ("val_check_interval", 0.5),
        ("devices", "auto"),
        ("devices", [0]),
        ("accelerator", "cpu"),
        ("default_root_dir", "somewhere"),
        ("callbacks", {"_target_": TRAINER}),
    ],
)
def test_right_values_pass(key, value):
    check(key, value)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("max_steps", "many", "an integer"),
        ("max_steps", 1.5, "an integer"),
        ("max_steps", True, "an integer"),
        ("max_steps", None, "an integer"),
        ("precision", "fp99", "bf16-mixed"),
        ("gradient_clip_val", "hard", "a number"),
        ("inference_mode", "no", "true or false"),
    ],
)
def test_wrong_values_are_named_with_what_they_should_be(key, value, expected):
    with pytest.raises(UserError, match=rf"trainer\.{key}=.*{expected}"):
        check(key, value)


def test_groups_without_a_target_are_held_against_the_one_that_takes_them():
    cfg = OmegaConf.create({"optim": {"max_steps": "many"}})
    check_values(cfg)
    with pytest.raises(UserError, match=r"optim\.max_steps"):
        check_values(cfg, targets={"optim": TRAINER})


def test_a_target_that_does_not_exist_is_left_to_instantiate():
    check_values(OmegaConf.create({"model": {"_target_": "nowhere.Nothing", "size": "x"}}))
