import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from chat_helpers import BARE_TAGS, CHATML, DEFAULT_SYSTEM, DROPS_REASONING, SPECIAL, TAGGED, byte_tokenizer, chat
from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.rows import BadRow, Chat, parse_row

END = "<|im_end|>"
TALK = chat("hi", "hello", "more?", "bye")


def normal(row: dict[str, Any]) -> Chat:
    parsed = parse_row(row)
    assert isinstance(parsed, Chat)
    return parsed


def supervised(
    template: str, row: dict[str, Any], tokenizer: PreTrainedTokenizerFast | None = None, **kwargs: Any
) -> list[str]:
    """Texts of the supervised stretches, decoded from the ids; checks the ids on the way."""
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.chat_template = template
    renderer = ChatRenderer(tokenizer, **kwargs)
    [(ids, mask)] = renderer.encode([renderer.render(normal(row))])
    template_kwargs = kwargs.get("template_kwargs", {})
    served = tokenizer.apply_chat_template(normal(row).messages, tools=row.get("tools"), **template_kwargs)
    assert ids.tolist() == served["input_ids"]
    stretches, current = [], []
    for token, on in [*zip(ids.tolist(), mask.tolist(), strict=True), (0, 0)]:
        if on:
            current.append(token)
        elif current:
            stretches.append(tokenizer.decode(current))
            current = []
    return stretches


def test_mask_of_a_conversation_counted_by_hand() -> None:
    renderer = ChatRenderer(byte_tokenizer(CHATML))
    [(ids, mask)] = renderer.encode([renderer.render(normal(chat("hi", "hello")))])
    # <|im_start|> user \n hi <|im_end|> \n <|im_start|> assistant \n: 1 + 5 + 2 + 1 + 1 + 1 + 10 = 21 tokens of prompt,
    # hello <|im_end|> supervised, one newline behind.
    assert mask.tolist() == [0] * 21 + [1] * 6 + [0]
    assert ids[26] == SPECIAL.index(END)


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, TAGGED, BARE_TAGS])
def test_every_assistant_turn_with_its_end_token(template: str) -> None:
    assert supervised(template, TALK) == ["hello" + END, "bye" + END]
    assert supervised(template, TALK, supervise="last") == ["bye" + END]


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, TAGGED, BARE_TAGS])
def test_a_cut_answer_has_no_supervised_end_token(template: str) -> None:
    row = chat("hi", "hello", "more?", "cut of\n", truncated=True)
    assert supervised(template, row) == ["hello" + END, "cut of\n"]
    assert supervised(template, row, supervise="last") == ["cut of\n"]


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_turns_that_follow_the_answer_are_not_supervised(template: str) -> None:
    row = chat("hi", "hello", "and then?")
    assert supervised(template, row) == ["hello" + END]


def test_tagged_spans_are_those_of_transformers() -> None:
    tokenizer = byte_tokenizer(TAGGED)
    theirs = tokenizer.apply_chat_template(TALK["messages"], return_dict=True, return_assistant_tokens_mask=True)
    renderer = ChatRenderer(tokenizer)
    [(_, mask)] = renderer.encode([renderer.render(normal(TALK))])
    assert mask.tolist() == theirs["assistant_masks"]


def test_system_turn_replaces_the_default_one() -> None:
    row = {"messages": [{"role": "system", "content": "Rhyme."}, *TALK["messages"]]}
    assert supervised(DEFAULT_SYSTEM, row) == ["hello" + END, "bye" + END]


ENDS = {
    "nothing_but_newline": ("\n", ""),
    "plain_text": (" ###\n", " ###"),
    "two_tokens": ("<|im_end|>\n<pad>", "<|im_end|>"),
    "blank_before": (" <|im_end|>", " <|im_end|>"),
    "nothing": ("", ""),
}


@pytest.mark.parametrize(("closing", "end"), ENDS.values(), ids=ENDS.keys())
def test_the_end_of_turn_is_the_first_token_of_the_closing(closing: str, end: str) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}CLOSE{% endif %}{% endfor %}"
    )
    template = template.replace("CLOSE", "{{ '" + closing.replace("\n", "\\n") + "' }}")
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    assert supervised(template, chat("q", "one\ntwo")) == ["one\ntwo" + end]
    assert supervised(template, chat("q", "one\ntwo", truncated=True)) == ["one\ntwo"]


def test_a_token_across_the_border_is_not_supervised() -> None:
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    plain, merged = byte_tokenizer(), byte_tokenizer(merges=((":", "x"), ("z", ";")))
    assert supervised(template, chat("q", "xyz"), plain) == ["xyz;"]
    assert supervised(template, chat("q", "xyz"), merged) == ["yz;"]
    assert supervised(template, chat("q", "xyz", truncated=True), plain) == ["xyz"]
    assert supervised(template, chat("q", "xyz", truncated=True), merged) == ["y"]


def test_trimmed_offsets_do_not_shift_the_mask() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert supervised(CHATML, chat("hi", " \n hello \n"), tokenizer) == [" \n hello \n" + END]


def test_characters_of_several_tokens() -> None:
    assert supervised(CHATML, chat("ü", "naïve 漢字 🙂")) == ["naïve 漢字 🙂" + END]


def test_a_template_that_rewrites_history_is_refused_by_name() -> None:
    row = chat("hi", "hello", "more?", "bye")
    for message in row["messages"][1::2]:
        message["reasoning_content"] = "hm"
    with pytest.raises(ValueError, match=r"^no loss mask: mine.jinja has no .* rewrites history: turn 2 of 4") as error:
        supervised(DROPS_REASONING, row, template_name="mine.jinja")
    assert "\n" not in str(error.value)
    assert "supervise: last" in str(error.value)
    assert supervised(DROPS_REASONING, row, supervise="last") == ["<think>\nhm\n</think>\nbye" + END]
    assert supervised(DROPS_REASONING, {"messages": row["messages"][:2]}) == ["<think>\nhm\n</think>\nhello" + END]


def test_a_generation_prompt_that_the_data_contradicts_is_refused() -> None:
    thinks = CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
    with pytest.raises(
        ValueError, match=r"turn 2 does not begin with the generation prompt that ends in .*<think>\\n'"
    ):
        supervised(thinks, chat("hi", "hello"))
    assert supervised(thinks, chat("hi", "<think>\nhm</think>hello")) == ["hm</think>hello" + END]


UNUSABLE = {
    "tags never reached": (TAGGED.replace("== 'assistant'", "== 'model'"), "reaches none of them"),
    "everything is the assistant's": (
        "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}",
        "first character",
    ),
    "no header at all": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}",
        "first character",
    ),
    "drops the content": ("{% for m in messages %}[{{ m.role }}]{% endfor %}", "does not write the content"),
    "not Jinja": ("{% for m in %}", r"is not a Jinja template: .* \(line 1\)"),
}


@pytest.mark.parametrize(("template", "message"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_a_template_without_trustworthy_spans_is_refused(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        supervised(template, TALK)
    assert not isinstance(error.value, BadRow)  # no row is to blame
    assert "\n" not in str(error.value)


def test_rows_that_the_template_or_the_tokenizer_cannot_take() -> None:
    alternating = "{% if messages[1].role == 'user' %}{{ raise_exception('no two user turns') }}{% endif %}" + CHATML
    twice = {"messages": [{"role": "user", "content": "a"}, *TALK["messages"]]}
    with pytest.raises(BadRow, match="refuses the conversation: no two user turns"):
        supervised(alternating, twice)
    with pytest.raises(BadRow, match="begins with an assistant turn"):
        supervised(CHATML, {"messages": TALK["messages"][1:]})
    with pytest.raises(BadRow, match="surrogate"):
        supervised(CHATML, chat("hi", "\ud83d"))


def test_no_template_and_no_offsets() -> None:
    with pytest.raises(ValueError, match=r"the chat template of .* does not exist: give chat_template"):
        ChatRenderer(byte_tokenizer(None)).render(normal(TALK))
    slow = byte_tokenizer()
    slow.__class__ = type("SlowTokenizer", (PreTrainedTokenizerFast,), {"is_fast": False})
    with pytest.raises(ValueError, match=r"\(SlowTokenizer\) gives no character offsets.* use a fast tokenizer"):
        ChatRenderer(slow)


REASONING = {
    "tags in the text": ("<think>hm</think>\n\nhello", ["\n\nhello" + END]),
    "two blocks": ("<think>a</think>one<think>b</think>two", ["one", "two" + END]),
    "never closed": ("so <think>hm", ["so "]),
    "opened by the prompt": ("hm</think>hello", ["hello" + END]),
    "none": ("hello", ["hello" + END]),
}


@pytest.mark.parametrize(("answer", "expected"), REASONING.values(), ids=REASONING.keys())
@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_reasoning_can_be_left_unsupervised(template: str, answer: str, expected: list[str]) -> None:
    assert supervised(template, chat("hi", answer), supervise_reasoning=False) == expected
    assert supervised(template, chat("hi", answer)) == [answer + END]


def test_reasoning_content_can_be_left_unsupervised() -> None:
    row = chat("hi", "hello")
    row["messages"][1]["reasoning_content"] = "hm"
    assert supervised(DROPS_REASONING, row, supervise_reasoning=False) == ["\nhello" + END]
    with pytest.raises(ValueError, match="writes reasoning_content without <think> tags"):
        supervised(re.sub("</?think>", "", DROPS_REASONING), row, supervise_reasoning=False)


def test_template_options_and_tools_reach_the_template() -> None:
    template = "{{ mood }}{% if tools %}{{ tools[0].name }}{% endif %}" + CHATML
    renderer = ChatRenderer(byte_tokenizer(template), template_kwargs={"mood": "calm "})
    text, _ = renderer.render(normal(TALK | {"tools": [{"name": "clock"}]}))
    assert text.startswith("calm clock<|im_start|>user")


TEXT = st.text(alphabet="ab \n<>|é漢", max_size=8).filter(str.strip)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), st.booleans())
def test_tags_and_prefixes_agree(turns: list[tuple[str, str]], truncated: bool) -> None:
    row = chat(*(text for pair in turns for text in pair), truncated=truncated)
    by_tag, by_prefix = supervised(TAGGED, row), supervised(CHATML, row)
    answers = [answer + END for _, answer in turns]
    if truncated:
        answers[-1] = turns[-1][1]
    assert by_tag == by_prefix == answers
