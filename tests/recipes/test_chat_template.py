"""Which tokens of a conversation are answers, for templates of several families."""

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_megatrain.recipes.chat_template import ChatTokenizer
from lightning_megatrain.recipes.offline_model import CHATML, offline_tokenizer
from lightning_megatrain.recipes.records import BadRecord

PLAIN_CHATML = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LLAMA3 = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + '</s>' }}{% endif %}"
    "{% endfor %}"
)
# As Qwen3's: the last answer opens with an empty reasoning, earlier ones do not.
THINKING = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Phi-3's: the text's end is written once, after the last turn.
ENDING = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# Everything depends on the number of turns: nothing can be found by looking at fewer of them.
REWRITING = "{% for message in messages %}{{ messages | length ~ message['role'] ~ message['content'] }}{% endfor %}"

CONVERSATION = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "Four, of course."},
    {"role": "user", "content": "Four, of course. Why? \u00e9\u4e2d"},
    {"role": "assistant", "content": "def add(a, b):\n    return a + b  # \u00e9\u4e2d\n"},
    {"role": "user", "content": "Four, of course."},
    {"role": "assistant", "content": "Bye"},
]
ANSWERS = [message["content"] for message in CONVERSATION if message["role"] == "assistant"]


def chat(template, specials=()):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=offline_tokenizer().backend_tokenizer,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=template,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *specials]})
    return ChatTokenizer(tokenizer)


FAMILIES = {
    "marked": (CHATML, (), "", "<|im_end|>"),
    "chatml": (PLAIN_CHATML, (), "", "<|im_end|>"),
    "llama3": (LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "", "<|eot_id|>"),
    "mistral": (MISTRAL, ("[INST]", "[/INST]", "</s>"), " ", "</s>"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_labelled_tokens_are_the_answers_with_their_ends(family):
    template, specials, before, after = FAMILIES[family]
    tokenizer = chat(template, specials)
    ids, targets = tokenizer.tokens(CONVERSATION)
    assert len(ids) == len(targets)
    answers = [answer.strip() if family == "llama3" else answer for answer in ANSWERS]
    labelled = tokenizer.decode([token for token, target in zip(ids, targets, strict=True) if target])
    assert labelled == "".join(before + answer + after for answer in answers)


# Llama 3's prompt ends in two newlines, which this small tokenizer, unlike Llama's, joins at the end of a text only.
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llama3"}))
def test_the_prompt_is_what_stands_before_an_answer(family):
    template, specials, *_ = FAMILIES[family]
    tokenizer = chat(template, specials)
    ids, targets = tokenizer.tokens(CONVERSATION[:2])
    first = targets.index(True)
    assert tokenizer.prompt(CONVERSATION[0]["content"]) == ids[:first]


def test_marks_and_prefixes_agree():
    assert chat(CHATML).tokens(CONVERSATION) == chat(PLAIN_CHATML).tokens(CONVERSATION)


def test_an_earlier_turn_that_is_written_otherwise_when_last_is_found():
    tokenizer = chat(THINKING)
    ids, targets = tokenizer.tokens(CONVERSATION)
    labelled = tokenizer.decode([token for token, target in zip(ids, targets, strict=True) if target])
    first, second, last = ANSWERS
    assert labelled == f"{first}<|im_end|>{second}<|im_end|><think>\n\n</think>\n\n{last}<|im_end|>"


def test_a_text_that_ends_once_has_all_its_answers():
    tokenizer = chat(ENDING, ("<|start|>", "<|end|>"))
    for turns in (2, 4, 6):
        ids, targets = tokenizer.tokens(CONVERSATION[:turns])
        labelled = tokenizer.decode([token for token, target in zip(ids, targets, strict=True) if target])
        answers = ANSWERS[: turns // 2]
        assert labelled == "".join(f"{answer}<|end|>" for answer in answers) + "\n<|im_end|>"


def test_a_template_that_hides_where_answers_are_is_refused():
    with pytest.raises(BadRecord, match=r"chat template.*may mark answers with \{% generation %\} instead"):
        chat(REWRITING).tokens(CONVERSATION)


def test_roles_that_the_template_refuses_are_named():
    with pytest.raises(BadRecord, match=r"there are user, user, assistant \(.*must alternate"):
        chat(MISTRAL, ("[INST]",)).tokens([CONVERSATION[0], *CONVERSATION[:2]])


@pytest.mark.parametrize("opening", ["", "<|im_start|>system\nYou are kind.<|im_end|>\n"])
def test_an_answer_that_opens_the_conversation_counts_and_what_comes_before_it_does_not(opening):
    reader = chat(opening + PLAIN_CHATML)
    answer, question = CONVERSATION[1], CONVERSATION[2]
    ids, targets = reader.tokens([answer, question])
    learned = reader.decode([i for i, target in zip(ids, targets, strict=True) if target])
    assert learned == answer["content"] + "<|im_end|>"


def test_a_template_may_be_a_file_or_a_text(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(MISTRAL)
    tokenizer = offline_tokenizer()
    from_file, from_text = ChatTokenizer(tokenizer, str(path)), ChatTokenizer(tokenizer, MISTRAL)
    assert from_file.tokens(CONVERSATION) == from_text.tokens(CONVERSATION)
    with pytest.raises(ValueError, match="neither a file nor a Jinja template"):
        ChatTokenizer(tokenizer, str(tmp_path / "none.jinja"))


def test_what_cannot_serve_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="could not be loaded"):
        ChatTokenizer(str(tmp_path / "none"))
    bare = PreTrainedTokenizerFast(tokenizer_object=offline_tokenizer().backend_tokenizer)
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"set data\.chat_template"):
        ChatTokenizer(str(tmp_path / "bare"))
