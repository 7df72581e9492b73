"""Train large language models on one GPU from host memory, as a PyTorch Lightning strategy.

Importing the package registers ``Trainer(strategy="megatrain")``.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_megatrain.strategy import MegaTrainStrategy

MegaTrainStrategy.register_strategies(StrategyRegistry)

__version__ = "0.1.0"
__all__ = ["MegaTrainStrategy"]
