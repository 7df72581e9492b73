"""Instruction pairs that every Python has: a library function's source, and what its docstring says it does."""

from __future__ import annotations

import ast
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from lightning_megatrain.recipes.bytes_data import is_validation, stdlib_root, stdlib_sources
from lightning_megatrain.recipes.chat_data import ChatData
from lightning_megatrain.recipes.offline_model import VOCABULARY, offline_tokenizer
from lightning_megatrain.recipes.records import BadRecord, Message, Place

INSTRUCTION = "Say in one line what this function does."

_ANSWER_CHARACTERS = range(15, 121)
_MIN_SOURCE_CHARACTERS = 40  # below it is little more than the name


class StdlibPairs(ChatData):
    """Questions about the standard library's own functions, split into train and validation by file.

    The user shows a function without its docstring; the assistant answers with the docstring's first line.

    Args:
        tokenizer: Hugging Face directory or name; None trains a small one on the standard library, in seconds.
        max_records: training pairs, so that every Python install trains on about the same amount.
        max_val_records: validation pairs.
        max_source_chars: characters of the longest function that is asked about.
        root: folder of Python sources; by default the running interpreter's standard library.
        seq_len: see `ChatData`, as for all others.

    Raises:
        ValueError: if a size or choice is out of range.
    """

    def __init__(
        self,
        *,
        tokenizer: str | None = None,
        vocab_size: int | None = VOCABULARY,
        max_records: int = 2000,
        max_val_records: int = 100,
        max_source_chars: int = 600,
        root: str | None = None,
        chat_template: str | None = None,
        seq_len: int = 256,
        batch_size: int = 4,
        val_batch_size: int = 16,
        packing: bool = True,
        on_bad_record: Literal["raise", "skip"] = "raise",
        seed: int = 0,
    ) -> None:
        super().__init__(
            tokenizer=tokenizer,
            chat_template=chat_template,
            seq_len=seq_len,
            batch_size=batch_size,
            val_batch_size=val_batch_size,
            packing=packing,
            on_bad_record=on_bad_record,
            vocab_size=vocab_size,
            seed=seed,
        )
        if min(max_records, max_val_records) < 1:
            raise ValueError(
                f"data.max_records={max_records} and data.max_val_records={max_val_records} must be at least 1."
            )
        if max_source_chars < _MIN_SOURCE_CHARACTERS:
            raise ValueError(
                f"data.max_source_chars={max_source_chars} must be at least {_MIN_SOURCE_CHARACTERS}, the shortest "
                "function that is asked about."
            )
        self.max_records = max_records
        self.max_val_records = max_val_records
        self.max_source_chars = max_source_chars
        self.root = Path(root) if root else stdlib_root()

    def load_tokenizer(self) -> Any:
        """Return the tokenizer's name, or one trained here."""
        return self.tokenizer or offline_tokenizer(self.vocab_size or VOCABULARY)

    def records(self) -> Iterator[tuple[bool, Place, list[Message] | BadRecord]]:
        """Read files until there are enough pairs on both sides."""
        wanted = {False: self.max_records, True: self.max_val_records}
        for path in stdlib_sources(self.root):
            side = is_validation(path)
            if wanted[side] == 0:
                if not any(wanted.values()):
                    return
                continue
            for line, source, answer in functions(self.root / path, self.max_source_chars):
                if wanted[side] == 0:
                    break
                wanted[side] -= 1
                question = {"role": "user", "content": f"{INSTRUCTION}\n\n{source}"}
                yield side, Place(self.root / path, line), [question, {"role": "assistant", "content": answer}]


def functions(path: Path, max_source_chars: int) -> Iterator[tuple[int, str, str]]:
    """Yield the functions of a file that say in one line what they do, in the order of their lines.

    A file that this Python cannot parse has none. Left out are functions that are nothing but their docstring, that
    share a line with it, or whose source or answer is too short or too long to learn from.

    Args:
        path: of a Python file.
        max_source_chars: characters of the longest function.

    Yields:
        The line of `def`, the source without docstring and decorators, not indented, and the docstring's first line.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes in other people's strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.split("\n")
    found = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for node in sorted(found, key=lambda node: node.lineno):
        docstring = ast.get_docstring(node)
        if not docstring or len(node.body) < 2:
            continue
        answer = docstring.partition("\n")[0].strip()
        first, second = node.body[:2]
        if first.lineno == node.lineno or second.lineno == first.end_lineno:
            continue
        kept = lines[node.lineno - 1 : first.lineno - 1] + lines[first.end_lineno : node.end_lineno]
        source = textwrap.dedent("\n".join(kept)).strip()
        if len(answer) in _ANSWER_CHARACTERS and _MIN_SOURCE_CHARACTERS <= len(source) <= max_source_chars:
            yield node.lineno, source, answer
