"""Conversations in JSONL files: three common forms, one list of messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, str]
"""One turn: `role` ("system", "user", "assistant", ...) and `content`."""

_FORMS = '{"messages": [...]}, {"conversations": [...]} or {"instruction": ..., "output": ...}'
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class BadRecord(ValueError):
    """A record that cannot be trained on; the message says what was needed and what there is."""


@dataclass(frozen=True)
class Place:
    """Where a record stands, written as FILE:LINE."""

    path: Path
    line: int  # from 1

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def read_jsonl(path: Path) -> Iterator[tuple[Place, list[Message] | BadRecord]]:
    """Read a file line by line, holding one line at a time.

    Blank lines are passed over; a byte order mark at the file's start is ignored.

    Args:
        path: one JSON object per line, UTF-8.

    Yields:
        Each record's place, and its messages or what is wrong with it.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"A JSONL file was needed, and {path} is none; set data.train_path or data.val_path.")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            try:
                yield Place(path, number), parse_record(_decode(line))
            except BadRecord as error:
                yield Place(path, number), error


def _decode(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadRecord(f"needed UTF-8 text, there is byte {line[error.start]:#04x} at offset {error.start}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadRecord(f"needed one JSON object per line, there is no valid JSON ({error})") from error


def parse_record(record: Any) -> list[Message]:
    """Turn a record of any of the forms into messages.

    - OpenAI: `{"messages": [{"role", "content"}, ...]}`;
    - ShareGPT: `{"conversations": [{"from", "value"}, ...], "system"?}`;
    - alpaca: `{"instruction", "input"?, "output", "system"?}`, where the input follows the instruction after a blank
      line.

    Args:
        record: parsed JSON.

    Raises:
        BadRecord: if the form is unknown, a value has the wrong type, or there is no answer to learn from.
    """
    if not isinstance(record, dict):
        raise BadRecord(f"needed a JSON object, there is {_kind(record)}")
    if "messages" in record:
        messages = _turns(record, "messages")
    elif "conversations" in record:
        messages = _turns(record, "conversations")
    elif "instruction" in record or "output" in record:
        messages = _alpaca(record)
    else:
        raise BadRecord(f"needed {_FORMS}, there is an object with the keys {sorted(record)}")
    if record.get("system"):
        messages.insert(0, {"role": "system", "content": _text(record, "system")})
    _check_answers(messages)
    return messages


def _turns(record: dict[str, Any], key: str) -> list[Message]:
    turns = record[key]
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"needed {key!r} to be a list of turns, there is {_kind(turns)}")
    return [_turn(turn, f"{key}[{index}]") for index, turn in enumerate(turns)]


def _turn(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise BadRecord(f"needed {where} to be an object, there is {_kind(turn)}")
    # Conversations in the wild mix the list's name of one form with the turns of the other.
    if "from" in turn:
        role = _SHAREGPT_ROLES.get(_text(turn, "from", where))
        if role is None:
            raise BadRecord(f"needed {where}.from to be one of {sorted(_SHAREGPT_ROLES)}, there is {turn['from']!r}")
        return {"role": role, "content": _text(turn, "value", where)}
    role = _text(turn, "role", where)
    if role not in _ROLES:
        raise BadRecord(f"needed {where}.role to be one of {sorted(_ROLES)}, there is {role!r}")
    return {"role": role, "content": _text(turn, "content", where)}


def _alpaca(record: dict[str, Any]) -> list[Message]:
    prompt = _text(record, "instruction")
    if record.get("input"):
        prompt += "\n\n" + _text(record, "input")
    if not prompt.strip():
        raise BadRecord("needed an 'instruction', there is an empty text")
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": _text(record, "output")}]


def _check_answers(messages: list[Message]) -> None:
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if not answers:
        raise BadRecord(f"needed an assistant's turn, there are only {sorted({m['role'] for m in messages})}")
    if not all(answer.strip() for answer in answers):
        raise BadRecord("needed an answer in every assistant's turn, there is an empty one")


def _text(owner: dict[str, Any], key: str, where: str = "") -> str:
    name = f"{where}.{key}" if where else repr(key)
    if key not in owner:
        raise BadRecord(f"needed {name}, there are only the keys {sorted(owner)}")
    value = owner[key]
    if not isinstance(value, str):
        raise BadRecord(f"needed {name} to be a text, there is {_kind(value)}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise BadRecord(f"needed {name} to be a text, there is half of a surrogate pair in it")
    return value


def _kind(value: Any) -> str:
    """Name a JSON value's type."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    names = {bool: "true or false", int: "a number", float: "a number", str: "a text", dict: "an object"}
    return names[type(value)]
