"""`megatrain bench step` without the host's update, to see what streaming alone costs beside it.

    python tests/benchmarks/without_update.py model=qwen2_5_7b rows=[4,8,16,32] seq_len=2048 strategy.microbatch=8

Takes what `megatrain bench step` takes, but for `clip` and `strategy.update`: gradients arrive on the host, as with
`in_backward`, and no weight changes.
"""

import sys

from lightning_megatrain.cli.main import main
from lightning_megatrain.update.optimizers import AdamUpdate

AdamUpdate.update = lambda self, *args, **kwargs: None  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main(["bench", "step", *sys.argv[1:], "strategy.update=in_backward"]))
