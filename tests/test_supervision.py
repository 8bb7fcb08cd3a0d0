"""Which part of a conversation is supervised: roles, tool calls, reasoning, and rows that are far too long."""

import json
from typing import Any

import numpy as np
import pytest

from chat_helpers import BARE_TAGS, CHATML, DEFAULT_SYSTEM, DROPS_REASONING, TAGGED, byte_tokenizer, chat
from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.rows import Chat, parse_row

END = "<|im_end|>"
# Like Qwen3's: tool calls as JSON in the assistant's turn, tool outputs inside one user turn.
TOOLS = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The system text stands inside the first user turn, blanks around contents are taken off.
LLAMA_LIKE = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if loop.index0 == 1 and messages[0].role == 'system' %}"
    "<<SYS>>{{ messages[0].content | trim }}<</SYS>>{% endif %}"
    "{{ m.content | trim }} [/INST]{% elif m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
TALK = [
    {"role": "system", "content": "Rhyme."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "more? "},
    {"role": "assistant", "content": "bye"},
]


def normal(row: dict[str, Any]) -> Chat:
    parsed = parse_row(row)
    assert isinstance(parsed, Chat)
    return parsed


def supervised(template: str, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """Texts of the supervised stretches, decoded from the ids."""
    tokenizer = byte_tokenizer(template)
    renderer = ChatRenderer(tokenizer, **options)
    [(ids, mask)] = renderer.encode([renderer.render(normal({"messages": messages}))])
    borders = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.decode(ids[start:end]) for start, end in borders]


ROLES = {
    "assistant alone": (["assistant"], ["hello" + END, "bye" + END]),
    "system": (["assistant", "system"], ["Rhyme.", "hello" + END, "bye" + END]),
    "user": (["user", "assistant"], ["hi", "hello" + END, "more? ", "bye" + END]),
    "all": (["system", "user", "assistant"], ["Rhyme.", "hi", "hello" + END, "more? ", "bye" + END]),
}


@pytest.mark.parametrize(("roles", "expected"), ROLES.values(), ids=ROLES.keys())
@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, TAGGED, BARE_TAGS])
def test_content_of_other_roles(template: str, roles: list[str], expected: list[str]) -> None:
    assert supervised(template, TALK, supervise_roles=roles) == expected


def test_content_is_found_where_the_template_moves_it() -> None:
    expected = ["Rhyme.", "hi", "hello" + END, "more?", "bye" + END]
    assert supervised(LLAMA_LIKE, TALK, supervise_roles=["assistant", "system", "user"]) == expected


def test_content_that_stands_elsewhere_too_is_not_mistaken() -> None:
    talk = [{"role": "user", "content": "user"}, {"role": "assistant", "content": "user"}]
    [(ids, mask)] = (r := ChatRenderer(byte_tokenizer(CHATML), supervise_roles=["assistant", "user"])).encode(
        [r.render(normal({"messages": talk}))]
    )
    # <|im_start|> user \n | user | <|im_end|> \n <|im_start|> assistant \n | user <|im_end|> | \n
    assert mask.tolist() == [0] * 6 + [1] * 4 + [0] * (3 + 10) + [1] * 5 + [0]
    assert len(ids) == len(mask)


UNUSABLE = {
    "changes the content": CHATML.replace(
        "{{ m.content }}", "{{ m.content | upper if m.role == 'user' else m.content }}"
    ),
    "writes it twice": CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"),
    "leaves it out": CHATML.replace("{{ m.content }}", "{% if m.role != 'user' %}{{ m.content }}{% endif %}"),
}


@pytest.mark.parametrize("template", UNUSABLE.values(), ids=UNUSABLE.keys())
def test_content_that_cannot_be_located_exactly_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"mine.jinja does not write the content of turn 2 \(user\) once") as error:
        supervised(template, TALK, supervise_roles=["assistant", "user"], template_name="mine.jinja")
    assert "\n" not in str(error.value)


def test_nothing_is_supervised_from_the_first_character_on() -> None:
    headless = CHATML.replace(
        "<|im_start|>{{ m.role }}\n", "{% if not loop.first %}<|im_start|>{{ m.role }}\n{% endif %}"
    )
    assert supervised(headless, TALK) == ["hello" + END, "bye" + END]
    with pytest.raises(ValueError, match="from its first character on"):
        supervised(headless, TALK, supervise_roles=["assistant", "system"])


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "time", "arguments": {"zone": "UTC"}}}],
}
TOOL_TALK = [
    {"role": "user", "content": "what time is it?"},
    CALL,
    {"role": "tool", "content": "noon"},
    {"role": "tool", "content": "12:00"},
    {"role": "assistant", "content": "It is noon."},
]
WRITTEN_CALL = '<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>' + END


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [WRITTEN_CALL, "It is noon." + END]),
        ({"supervise": "last"}, ["It is noon." + END]),
        ({"supervise_roles": ["assistant", "tool"]}, [WRITTEN_CALL, "noon", "12:00", "It is noon." + END]),
    ],
)
def test_tool_calls_are_supervised_and_tool_outputs_only_on_request(
    options: dict[str, Any], expected: list[str]
) -> None:
    assert supervised(TOOLS, TOOL_TALK, **options) == expected


@pytest.mark.parametrize("answer", ["bye", "<think>hm</think>bye"])
def test_reasoning_of_the_last_answer_where_earlier_reasoning_is_dropped(answer: str) -> None:
    drops = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last %}{{ m.content }}"
        "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = chat("hi", "<think>so</think>hello", "more?", answer)["messages"]
    with pytest.raises(ValueError, match=r"rewrites history: turn 2 of 4 .* or supervise: last"):
        supervised(drops, messages)
    assert supervised(drops, messages, supervise="last") == [answer + END]
    assert supervised(drops, messages, supervise="last", supervise_reasoning=False) == ["bye" + END]


def test_all_tagged_parts_of_the_last_answer() -> None:
    parts = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content.split('/')[0] }}{% endgeneration %}#"
        "{% generation %}{{ m.content.split('/')[-1] }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    messages = chat("hi", "hel/lo", "more?", "good/bye")["messages"]
    assert supervised(parts, messages, supervise="last") == ["good", "bye" + END]


def test_a_second_block_of_reasoning_behind_one_that_the_prompt_opens() -> None:
    opens = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>").replace(
        "{{ m.role }}\n", "{{ m.role }}\n{% if m.role == 'assistant' %}<think>{% endif %}"
    )
    messages = chat("hi", "so</think>yes<think>no</think>bye")["messages"]
    assert supervised(opens, messages) == ["so</think>yes<think>no</think>bye" + END]
    assert supervised(opens, messages, supervise_reasoning=False) == ["yes", "bye" + END]


def test_reasoning_content_of_the_last_answer_alone() -> None:
    messages = chat("hi", "hello", "more?", "bye")["messages"]
    for message in messages[1::2]:
        message["reasoning_content"] = "hm"
    assert supervised(DROPS_REASONING, messages, supervise="last", supervise_reasoning=False) == ["\nbye" + END]


def head(template: str, row: dict[str, Any], max_length: int | None, **options: Any) -> list[list[int]]:
    """First 50 ids and mask entries, of a row rendered with or without a limit."""
    renderer = ChatRenderer(byte_tokenizer(template, merges=(("a", "b"), ("Ġ", "Ġ"))), **options)
    text, spans = renderer.render(normal(row), max_length)
    if max_length is not None:
        assert len(text) < 3000
    [(ids, mask)] = renderer.encode([(text, spans)])
    assert len(ids) > 50
    return [ids[:50].tolist(), mask[:50].tolist()]


HUGE = {
    "answer": chat("hi", "ab " * 100_000),
    "question": chat("ab" * 100_000, "hello"),
    "turns": chat(*["q", "a"] * 200, "more?", "bye"),
    "characters of several bytes": chat("ü", "漢" * 50_000),
    "turns and a long answer": chat(*["q", "a"] * 100, "more?", "ab" * 100_000),
    "cut off": chat("hi", "ab " * 100_000, truncated=True),
}


@pytest.mark.parametrize("row", HUGE.values(), ids=HUGE.keys())
@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_of_a_huge_row_only_the_beginning_is_tokenised(template: str, row: dict[str, Any]) -> None:
    assert head(template, row, 50) == head(template, row, None)


def test_other_roles_of_a_huge_row() -> None:
    row, roles = HUGE["turns"], ["assistant", "user"]
    assert head(CHATML, row, 50, supervise_roles=roles) == head(CHATML, row, None, supervise_roles=roles)


def test_more_characters_are_read_where_tokens_are_long() -> None:
    row = chat("hi", json.dumps("=" * 40_000) + "ab" * 20_000)
    merges, text = [], "="
    while len(text) < 512:
        merges.append((text, text))
        text += text
    renderer = ChatRenderer(byte_tokenizer(CHATML, merges=tuple(merges)))
    results = []
    for max_length in (50, None):
        [(ids, _)] = renderer.encode([renderer.render(normal(row), max_length)])
        results.append(ids[:50].tolist())
    assert results[0] == results[1]
    assert text in renderer.tokenizer.decode(results[0])
