"""Every error and warning of the package, held to what one should say: what is wrong, what there is, what to set."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import lightning_megatrain

PACKAGE = Path(lightning_megatrain.__file__).parent
WARNINGS = {"warn", "rank_zero_warn"}

PARTS = {
    "BadRecord": "what is wrong with one record; ChatData says where it stands and what to set",
    "KernelUnavailableError": "why there is no compiled kernel; the warning about it says what to install",
    "UnpicklingError": "why a file was not read; the error about the file says what to use",
    "AttributeError": "Python's protocol of attributes",
    "IndexError": "Python's protocol of sequences",
}
"""Classes whose text is no message by itself, and why."""

PASSED_ON = {
    "cli/app.py": {"_sentence(cause)", "_sentence(error)"},  # an error of this list, without its traceback
    "cli/export.py": {"message"},  # of the table _MISSING
    "checkpoint/files.py": {"code"},  # the system's own error
    "update/device.py": {"it does not give the reference's bits"},  # part of the warning that the host updates instead
}
"""Texts that are no message by themselves: by file, the text, or the expression that stands for it."""

NO_REMEDY = {
    "checkpoint/convert.py": {"shard_size={text} is not valid: {error}"},  # the error put in is one of this list
    "checkpoint/sharded.py": {"is not defined for a part of a stored tensor"},  # torch asks, and takes another way
}
"""Messages without an instruction of their own: by file, a part of each."""

VERBS = (
    "ask|build|call|change|choose|clone|compute|configure|convert|correct|fill|free|get|give|go back|install|leave|load"
    "|lower|make|move|name|pass|put|raise|rebuild|remove|replace|return|run|see to|set|start|take|train|turn|use|write"
)
REMEDY = re.compile(
    rf"(?:; |[.:,] |, (?:or|so|and) |if you trust the file, )(?:{VERBS})\b"  # an instruction
    r"|\bmust (?:not )?(?:be|depend|hold|lie)\b"  # the values that are valid
    r"|; \{[^{}]*(?:hint|remedy)[^{}]*\}",  # an instruction, made elsewhere
    re.IGNORECASE,
)
MOST_CHARACTERS = 330


@dataclass(frozen=True)
class Said:
    """One message as it stands in the source, `{expression}` where a value is put in."""

    place: str
    file: str
    text: str


def _text(node: ast.expr) -> str:
    """The text of an expression; one that is no text as if it were put into one."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return f"{{{ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node)}}}"


def _is_message(call: ast.Call) -> bool:
    name = ast.unparse(call.func).rpartition(".")[2]
    return name in WARNINGS or (re.search(r"(?:Error|Exception|BadRecord)$", name) is not None and name not in PARTS)


def _said() -> list[Said]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
        messages = (call for call in calls if call.args and _is_message(call))
        found += [Said(f"{file}:{call.lineno}", file, _text(call.args[0])) for call in messages]
    return found


def _faults(said: Said) -> list[str]:
    """What a reader would miss in a message."""
    text = said.text
    if text.strip("{}") in PASSED_ON.get(said.file, ()):
        return []
    faults = []
    if "\n" in text:
        faults.append("is more than one line")
    if not re.search(r"[.?]$|\{[^{}]*(?:hint|remedy|error)[^{}]*\}$", text):
        faults.append("does not end as a sentence")
    if len(re.findall(r"[.?!] (?=[A-Z])", text)) > 1:
        faults.append("is more than two sentences")
    if len(text) > MOST_CHARACTERS:
        faults.append(f"has {len(text)} characters")
    if not REMEDY.search(text) and not any(part in text for part in NO_REMEDY.get(said.file, ())):
        faults.append("does not say what to set or do")
    if not re.search(r"\{|=|\w\.\w|\w\(|[A-Z]{2}|[a-z][A-Z]", text):
        faults.append("names nothing that is there")
    return faults


def test_errors_and_warnings_say_what_there_is_and_what_to_set():
    messages = _said()
    assert len(messages) > 150  # the list is of the whole package
    bad = [f"{said.place} {', '.join(faults)}: {said.text}" for said in messages if (faults := _faults(said))]
    assert not bad, f"{len(bad)} of {len(messages)} messages:\n" + "\n".join(bad)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("prefetch={prefetch} is wrong.", "what to set"),
        ("prefetch={prefetch} is wrong; set 0 or more", "end"),
        ("prefetch={prefetch}\nis wrong; set 0 or more.", "line"),
        ("A value is wrong; set another.", "names nothing"),
        ("{a} is wrong. It was {b}. Set {c}.", "sentences"),
    ],
)
def test_a_message_that_says_too_little_is_found(text, fault):
    [found] = _faults(Said("here:1", "here", text))
    assert fault in found


def test_exemptions_are_in_use():
    messages = _said()
    for table in (PASSED_ON, NO_REMEDY):
        for file, parts in table.items():
            assert all(any(said.file == file and part in said.text for said in messages) for part in parts)
    sources = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert all(re.search(rf"raise (?:\w+\.)?{name}\(", sources) for name in PARTS)
