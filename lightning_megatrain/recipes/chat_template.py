"""Messages to tokens through the tokenizer's chat template, and which of the tokens are answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from lightning_megatrain.recipes.records import BadRecord, Message

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

_INSTEAD = "data.chat_template may mark answers with {% generation %} instead"

_STAND_IN = "\u2063answer\u2063"
"""Put in an answer's place to find what the template writes around it; U+2063 is invisible and not trimmed."""


class ChatTokenizer:
    """A fast tokenizer with a chat template.

    Args:
        tokenizer: a Hugging Face directory, a name, or a tokenizer already loaded.
        chat_template: instead of the tokenizer's own: a file's path, or the template itself.

    Raises:
        ValueError: if the tokenizer cannot be loaded, is not a fast one (which alone tells the characters of a token),
            or has no chat template.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.tokenizer = _load(tokenizer) if isinstance(tokenizer, str) else tokenizer
        name = tokenizer if isinstance(tokenizer, str) else type(tokenizer).__name__
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"A fast tokenizer was needed to tell answers from prompts, and {name} has none; set data.tokenizer to "
                "a directory with a tokenizer.json."
            )
        self._template = _template(chat_template) or self.tokenizer.chat_template
        if isinstance(self._template, dict):
            # Some tokenizers have several, for retrieval or tools; this one is for plain chats.
            self._template = self._template.get("default")
        if self._template is None:
            raise ValueError(
                f"A chat template was needed, and the tokenizer {name} has none; set data.chat_template to a file or "
                "to the template itself."
            )
        self._marks_answers = _GENERATION.search(self._template) is not None
        # Longest first, so that what ends a turn is recognised whole.
        self._special = sorted(
            {str(token) for token in self.tokenizer.get_added_vocab()} | set(self.tokenizer.all_special_tokens),
            key=len,
            reverse=True,
        )

    def __len__(self) -> int:
        """Count the tokens, added ones included."""
        return len(self.tokenizer)

    @property
    def pad_id(self) -> int:
        """Token that fills rows; any will do, as nothing looks at it."""
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in ids if token is not None), 0)

    def tokens(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        """Render a conversation.

        Answers are all that the assistant says, with the token that ends its turn, since the model must learn to emit
        it. A template with `{% generation %}` marks them itself; with any other they are found by rendering the
        conversation up to each answer, and a token that reaches over an answer's border counts as the answer's.

        Returns:
            Token ids, and for each whether it belongs to an answer.

        Raises:
            BadRecord: if the template refuses the messages, or rewrites earlier turns so that the answers cannot be
                told from the rest.
        """
        if self._marks_answers:
            ids, answers = self._marked(messages)
        else:
            text = self._render(messages)
            spans = [self._span(messages, i, text) for i, m in enumerate(messages) if m["role"] == "assistant"]
            encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids = encoding["input_ids"]
            answers = _overlapping(encoding["offset_mapping"], spans)
        if not any(answers):
            raise BadRecord("needed an answer in what the chat template renders, there is none")
        return ids, answers

    def prompt(self, text: str) -> list[int]:
        """Render `text` as a user's only message, ready to be answered; returns token ids."""
        rendered = self._render([{"role": "user", "content": text}], add_generation_prompt=True)
        return self.tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """Turn token ids into text, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _marked(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        encoding = self._apply(
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        return list(encoding["input_ids"]), [bool(mark) for mark in encoding["assistant_masks"]]

    def _render(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        return self._apply(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    def _apply(self, messages: list[Message], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, chat_template=self._template, **options)
        except (TemplateError, ValueError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise BadRecord(f"needed turns that the chat template takes, there are {roles} ({error})") from error

    def _span(self, messages: list[Message], turn: int, text: str) -> tuple[int, int]:
        """Characters of `text`, the whole conversation's rendering, that are the answer of `messages[turn]`."""
        prompt = self._render(messages[:turn], add_generation_prompt=True) if turn else self._before_first(messages)
        if not text.startswith(prompt):
            raise BadRecord(
                f"needed a chat template that leaves earlier turns alone, it rewrites them at turn {turn} ({_INSTEAD})"
            )
        answered = self._render(messages[: turn + 1])
        end = len(answered) if text.startswith(answered) else self._end(messages, turn, text)
        if end <= len(prompt):
            raise BadRecord(f"needed an answer in turn {turn}, the chat template renders none")
        return len(prompt), end - self._trailing(text[len(prompt) : end])

    def _before_first(self, messages: list[Message]) -> str:
        """What is rendered before the first message's content: templates take no empty conversation."""
        return self._around(messages, 0)[0]

    def _end(self, messages: list[Message], turn: int, text: str) -> int:
        """Where an answer ends whose turn is written otherwise when it is the last.

        Thinking templates do that: the reasoning of earlier turns is left out. What follows the answer's own words is
        the same in both, and that is enough to find their end. Others write the end of the text after the last turn.
        """
        rest = self._after(messages, turn)
        closing = self._after(messages[: turn + 1], turn)
        if closing and rest and not rest.startswith(closing):
            closing = closing.removesuffix(self.tokenizer.eos_token or "")
        if rest is None or closing is None or not text.endswith(rest) or not rest.startswith(closing):
            raise BadRecord(
                f"needed a chat template that shows where answers end, it rewrites turn {turn} ({_INSTEAD})"
            )
        return len(text) - len(rest) + len(closing)

    def _after(self, messages: list[Message], turn: int) -> str | None:
        """What is rendered after the content of `messages[turn]`, or None if that cannot be seen."""
        parts = self._around(messages, turn)
        return parts[1] if len(parts) == 2 else None

    def _around(self, messages: list[Message], turn: int) -> list[str]:
        """What is rendered before and after the content of `messages[turn]`; more or fewer parts if it is not once."""
        changed = [dict(message) for message in messages]
        changed[turn]["content"] = _STAND_IN
        return self._render(changed).split(_STAND_IN)

    def _trailing(self, answer: str) -> int:
        """Count the blanks behind the token that ends a turn: they belong to the template, not to the answer."""
        stripped = answer.rstrip()
        return len(answer) - len(stripped) if any(stripped.endswith(token) for token in self._special) else 0


def _overlapping(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """Tell which tokens share a character with one of `spans`; both lists are in order of the text."""
    marks = []
    current = 0
    for start, end in offsets:
        while current < len(spans) and start >= spans[current][1]:
            current += 1
        marks.append(current < len(spans) and end > spans[current][0])
    return marks


def _load(name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # its type depends on what is missing: files, a repository, the network
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"A tokenizer was needed, and {name!r} could not be loaded ({reason}); set data.tokenizer to a Hugging "
            "Face directory or name."
        ) from error


def _template(chat_template: str | None) -> str | None:
    """Read a template from its file, unless it is the template itself."""
    if chat_template is None or "{%" in chat_template or "{{" in chat_template:
        return chat_template
    path = Path(chat_template)
    if not path.is_file():
        raise ValueError(
            f"A chat template was needed, and data.chat_template={chat_template!r} is neither a file nor a Jinja "
            "template; set it to one of them."
        )
    return path.read_text(encoding="utf-8")
