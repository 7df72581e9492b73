"""The order in which units are used, observed and never assumed."""


class UseOrder:
    """Predicts which units come next from which came next before.

    A wrong prediction costs a fetch that nobody uses, never an error. Only the last seen successor of each unit is
    kept, so the memory is bounded and a loop over the blocks (generation) is learned in its first turn.
    """

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        self._current: int | None = None

    def begin(self) -> None:
        """Start a new pass: the first unit of it does not follow the last one of the pass before."""
        self._current = None

    def observe(self, unit: int, depth: int) -> list[int]:
        """Note a use; returns up to ``depth`` different units expected after it, nearest first."""
        if self._current is not None:
            self._next[self._current] = unit
        self._current = unit
        expected: list[int] = []
        at = unit
        while len(expected) < depth and at in self._next:
            at = self._next[at]
            if at == unit or at in expected:
                break
            expected.append(at)
        return expected
