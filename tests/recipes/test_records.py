"""Records of three forms, and what is wrong with bad ones."""

import json

import pytest

from lightning_megatrain.recipes.records import BadRecord, parse_record, read_jsonl

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "Be."},
            [{"role": "system", "content": "Be."}, USER, ANSWER],
        ),
        ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
        ({"instruction": "Hi", "output": "Hello"}, [USER, ANSWER]),
        ({"instruction": "Hi", "input": "", "output": "Hello", "id": 3}, [USER, ANSWER]),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, "Add\n\n1 2"),
    ],
)
def test_each_form_is_recognised(record, messages):
    parsed = parse_record(record)
    assert parsed == messages if isinstance(messages, list) else parsed[0]["content"] == messages


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "JSON object, there is a list"),
        ({"text": "a"}, r"keys \['text'\]"),
        ({"messages": []}, "an empty list"),
        ({"messages": [1]}, r"messages\[0\] to be an object, there is a number"),
        ({"messages": [USER]}, r"assistant's turn, there are only \['user'\]"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, r"messages\[1\].content to be a text.* null"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "empty one"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "'robot'"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "'alien'"),
        ({"conversations": [{"value": "a"}]}, r"needed conversations\[0\].role"),
        ({"instruction": "a"}, "needed 'output'"),
        ({"instruction": " ", "output": "a"}, "'instruction', there is an empty"),
        ({"instruction": "a", "output": ["b"]}, "'output' to be a text, there is a list"),
        ({"instruction": "a", "output": "b\ud800"}, "surrogate"),
    ],
)
def test_bad_records_say_what_was_needed_and_what_there_is(record, reason):
    with pytest.raises(BadRecord, match=reason):
        parse_record(record)


def test_a_file_is_read_by_lines_with_their_numbers(tmp_path):
    path = tmp_path / "data.jsonl"
    good = json.dumps({"messages": [USER, ANSWER]}).encode()
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\r\n\n   \n{broken\n\xff\n" + b"[" * 100_000 + b"\n" + good)
    places, records = zip(*read_jsonl(path), strict=True)
    assert [str(place) for place in places] == [f"{path}:{line}" for line in (1, 4, 5, 6, 7)]
    assert records[0] == records[4] == [USER, ANSWER]
    assert [type(record) for record in records[1:4]] == [BadRecord] * 3
    assert "no valid JSON" in str(records[1])
    assert "byte 0xff at offset 0" in str(records[2])


def test_a_line_separator_inside_a_text_ends_no_record(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"instruction": "a\u2028b", "output": "c"}, ensure_ascii=False), encoding="utf-8")
    [(_, record)] = read_jsonl(path)
    assert record[0]["content"] == "a\u2028b"


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.train_path"):
        next(read_jsonl(tmp_path / "none.jsonl"))
