"""Answers in process: the target's own, whatever they are batched with, to the very prompts that are trained on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from chat_helpers import CHATML, byte_tokenizer, chat, datasets_cache, write_jsonl  # noqa: F401
from dspark_lightning.datamodules import ChatDataModule
from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.prompts import load_conversations
from dspark_lightning.datamodules.tokenizer import load_tokenizer
from dspark_lightning.decoding.plain import decode_plainly
from dspark_lightning.evaluation.play import DecodeSettings, Player
from dspark_lightning.regeneration.dialogue import Dialogue
from dspark_lightning.regeneration.local import LocalTarget
from dspark_lightning.regeneration.sampling import Sampling
from dspark_lightning.regeneration.scripts import Script, load_scripts
from dspark_lightning.target import HFDSparkTargetModel
from evaluation_helpers import embedded_pair
from family_helpers import FAMILIES, VARIANTS, token_ids
from helpers import tiny_qwen3
from tiny_target import build_tiny_target

ROW_BY_ROW = ("deepseek_v4", "minimax_m3_vl", "minimax_m3_text")

THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% if not enable_thinking %}none: {% endif %}{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if not enable_thinking %}none: {% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def pair() -> tuple[HFDSparkTargetModel, Any]:
    return embedded_pair()


@pytest.fixture
def target(pair: tuple[HFDSparkTargetModel, Any]) -> HFDSparkTargetModel:
    return pair[0]


def local(target: HFDSparkTargetModel, renderer: ChatRenderer | None = None, **sampling: Any) -> LocalTarget:
    return LocalTarget(target.model, renderer or ChatRenderer(load_tokenizer("embedded")), Sampling(**sampling), seed=0)


def answered(local: LocalTarget, scripts: list[Script], size: int) -> dict[str, list[Any]]:
    """The messages of each script, by its key."""
    kept: dict[str, list[Any]] = {}
    groups, failed = local.groups(scripts, size)
    assert not failed

    def keep(dialogues: Sequence[Dialogue]) -> None:
        assert all(each.failure is None for each in dialogues)
        kept.update({each.script.key: each.messages for each in dialogues})

    local.answer(groups, set(), keep)
    return kept


def test_answers_do_not_depend_on_the_batch(target: HFDSparkTargetModel, tmp_path: Path) -> None:
    rows = [
        chat("Name a colour.", "x", "Sort 4, 2, 9.", "x"),
        *({"prompt": f"Say {n}{' or so' * n}."} for n in range(5)),
    ]
    scripts = load_scripts(write_jsonl(tmp_path / "rows.jsonl", rows), None, "all").scripts
    one = local(target, temperature=1.0, max_new_tokens=16)
    alone, batched = answered(one, scripts, 1), answered(one, scripts, 4)
    assert alone == batched and len(alone) == 6
    assert answered(one, scripts[::-1], 3) == alone
    assert len({messages[1]["content"] for messages in alone.values()}) == 6


def test_greedy_answers_are_the_targets_own(target: HFDSparkTargetModel) -> None:
    greedy = local(target, temperature=0, max_new_tokens=20)
    prompts = [[7, 30, 41, 52], [9, 33], [11, 60, 61, 62, 63, 64, 65]]
    expected = [decode_plainly(target, torch.tensor(prompt), 20, 0.0, greedy.stops) for prompt in prompts]
    assert greedy.generate(prompts, ["a", "b", "c"]) == expected


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_every_family_answers_and_none_sees_padding(family: str) -> None:
    model = build_tiny_target(family)
    renderer = ChatRenderer(byte_tokenizer(CHATML))
    one = LocalTarget(model, renderer, Sampling(temperature=1.0, max_new_tokens=6), seed=0)
    scripts = [Script(i, "", [[{"role": "user", "content": "a" * i}]], None, {}) for i in range(4)]
    groups, _ = one.groups(scripts, 2)
    assert [len(group) for group in groups] == ([1] * 4 if family in ROW_BY_ROW else [2, 2])
    prompts = [row[:length].tolist() for row, length in zip(token_ids(3, 24), (24, 5, 13), strict=True)]
    if family not in ROW_BY_ROW:
        alone = [one.generate([prompt], [str(i)])[0] for i, prompt in enumerate(prompts)]
        assert one.generate(prompts, ["0", "1", "2"]) == alone
    greedy = LocalTarget(model, renderer, Sampling(temperature=0, max_new_tokens=6), seed=0)
    plain = decode_plainly(HFDSparkTargetModel(model, [0]), torch.tensor(prompts[0]), 6, 0.0, greedy.stops)
    assert greedy.generate(prompts[:1], ["0"]) == [plain]


@pytest.mark.parametrize(
    ("template", "options"),
    [(None, None), (THINKING, {"enable_thinking": True}), (THINKING, {"enable_thinking": False})],
)
def test_training_regeneration_and_decoding_have_one_prompt(
    template: str | None, options: dict[str, Any] | None, pair: tuple[HFDSparkTargetModel, Any], tmp_path: Path
) -> None:
    """Two turns, of which the second has the first answer before it."""
    path = None
    if template is not None:
        path = str(tmp_path / "thinking.jinja")
        Path(path).write_text(template)
    row = chat("Sort 4, 2, 9 for me.", "2, 4, 9 it is.", "And now 8, 3?", "3, 8 it is.")
    system = {"role": "system", "content": "Be brief."}
    data = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [system, *row["messages"]]}])
    settings: Any = {"chat_template": path, "chat_template_kwargs": options, "tokenizer": "embedded"}
    module = ChatDataModule(train_data=data, mask_token_id=5, **settings)
    module.setup("fit")
    (trained,) = module.train_dataloader()
    ids, mask = trained["input_ids"][0].tolist(), trained["loss_mask"][0].tolist()
    begins = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
    assert len(begins) == 2

    model, draft = pair
    renderer = ChatRenderer(load_tokenizer("embedded"), chat_template=template, template_kwargs=options)
    player = Player(model, draft, renderer, DecodeSettings())
    (conversation,) = load_conversations(data)
    dialogue = Dialogue(load_scripts(data, None, "all").scripts[0])
    one = local(model, renderer)
    for turn, begin in enumerate(begins):
        decoded = player._prompt(conversation, [system, *row["messages"][: 2 * turn + 1]])
        assert one.prompt(dialogue) == decoded.tolist() == ids[:begin]
        dialogue.answer(row["messages"][2 * turn + 1], 1, truncated=False)
    (last,) = load_scripts(data, None, "last").scripts
    assert one.prompt(Dialogue(last)) == ids[: begins[1]]


def written(target: HFDSparkTargetModel, text: str, script: Script, ends: bool = True, **options: Any) -> Dialogue:
    """What becomes of a script when the target's answers are all `text`."""
    renderer = ChatRenderer(load_tokenizer("embedded"), **options)
    one = local(target, renderer)
    tokens = [token for token, _ in renderer.encode_text(text)] + [min(one.stops)] * ends
    one.generate = lambda prompts, places: [tokens] * len(prompts)  # type: ignore[method-assign]
    dialogue = Dialogue(script)
    one.play([dialogue])
    return dialogue


def two_turns() -> Script:
    return Script(
        "x", "rows.jsonl:1", [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]], None, {}
    )


def test_each_turn_has_random_numbers_of_its_own() -> None:
    dialogue = Dialogue(two_turns())
    first = dialogue.place
    dialogue.answer({"role": "assistant", "content": "x"}, 1, truncated=False)
    assert dialogue.place != first


def test_text_is_kept_as_it_was_sampled(target: HFDSparkTargetModel) -> None:
    text = "<think>\n 2 < 4 </think> \n\nTwo. "
    dialogue = written(target, text, two_turns())
    assert [message["content"] for message in dialogue.messages] == ["a", text, "b", text]
    assert (dialogue.truncated, dialogue.rewritten, dialogue.failure) == (False, 0, None)


def test_a_template_that_rewrites_answers_is_noticed(target: HFDSparkTargetModel) -> None:
    trims = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}<|assistant|>"
    dialogue = written(target, " two", two_turns(), chat_template=trims)
    assert dialogue.rewritten == 2 and dialogue.messages[1]["content"] == " two"
    dialogue = written(target, "two", two_turns(), chat_template=trims)
    assert dialogue.rewritten == 0


def test_a_cut_answer_ends_the_conversation_and_is_not_closed_in_training(
    target: HFDSparkTargetModel, tmp_path: Path
) -> None:
    dialogue = written(target, "Two and", two_turns(), ends=False)
    row = dialogue.row()
    assert row == {"id": "x", **chat("a", "Two and"), "truncated": True}
    data = ChatDataModule(write_jsonl(tmp_path / "rows.jsonl", [row]), tokenizer="embedded", mask_token_id=5)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    supervised = batch["input_ids"][batch["loss_mask"].bool()]
    assert load_tokenizer("embedded").decode(supervised) == "Two and"


def test_an_empty_answer_is_a_failure(target: HFDSparkTargetModel) -> None:
    failure = written(target, " \n", two_turns()).failure
    assert failure is not None and (failure.id, failure.place, failure.reason) == ("x", "rows.jsonl:1", "empty answer")


def test_what_a_template_refuses_is_a_failure(target: HFDSparkTargetModel) -> None:
    template = "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}{{ messages[0].content }}"
    failure = written(target, "Two", two_turns(), chat_template=template, template_name="t.jinja").failure
    assert failure is not None and failure.reason == "refused by the chat template"
    assert failure.detail == "t.jinja refuses the conversation: too many"


def test_what_is_longer_than_the_target_reads_is_a_failure() -> None:
    renderer = ChatRenderer(byte_tokenizer(CHATML))
    model = tiny_qwen3(max_position_embeddings=64, vocab_size=270)
    one = LocalTarget(model, renderer, Sampling(max_new_tokens=20), seed=0)
    script = two_turns()
    long = Script("long", "rows.jsonl:2", [[{"role": "user", "content": "a" * 50}]], None, {})
    groups, (failure,) = one.groups([script, long], 4)
    assert groups == [[script]] and (failure.id, failure.reason) == ("long", "too long for the target")
    assert "prompt tokens and max_new_tokens 20 are more than the 64 positions of the target" in failure.detail
