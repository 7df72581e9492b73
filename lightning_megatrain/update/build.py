"""Building the host optimizer's kernel in place: ``python -m lightning_megatrain.update.build``.

For running from a source tree, and for a package that was installed before there was a compiler. ``pip install``
does the same through ``ext-modules`` in pyproject.toml.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lightning_megatrain.update import kernel
from lightning_megatrain.update.kernel import KernelUnavailableError

# pyproject.toml repeats these for `pip install`; a test holds the two together.
COMPILE_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",  # one rounding per operation: the results must not depend on the instruction set
    "-fno-math-errno",  # sqrtf as an instruction
    "-fno-trapping-math",  # comparisons as vector selects; neither flag changes a value
    "-fvisibility=hidden",
    "-pthread",
)
_SOURCE = Path(__file__).parent / "csrc" / "adam.c"


def build(folder: Path = kernel.FOLDER) -> Path:
    """Compile ``csrc/adam.c`` into ``folder``, by default this package's, and return the library's path.

    The compiler is ``$CC``, or the first of cc, gcc and clang found.

    Raises:
        KernelUnavailableError: no compiler was found, or it failed.
    """
    compiler = (
        shlex.split(os.environ.get("CC", ""))
        or [found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))][:1]
    )
    if not compiler:
        raise KernelUnavailableError("no C compiler found: set CC, or install gcc or clang.")
    target = folder / "_adam.so"
    # Built aside and renamed, so that nobody opens half a library and a process that runs the old one keeps it.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as aside:
        output = Path(aside) / target.name
        command = [*compiler, *COMPILE_FLAGS, "-fPIC", "-shared", str(_SOURCE), "-o", str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise KernelUnavailableError(f"{compiler[0]} could not be run: {error}.") from error
        if done.returncode != 0:
            raise KernelUnavailableError(f"`{shlex.join(command)}` failed:\n{done.stderr}")
        output.replace(target)
    return target


def main() -> int:
    """Build in place, then hold every instruction set of this machine against the reference."""
    try:
        path = build()
        for isa in kernel.available_isas():
            kernel.open_kernel(isa)
            print(f"{path}: {isa} built and equal to the reference")
    except (KernelUnavailableError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
