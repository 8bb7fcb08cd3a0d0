"""The draft decodes in eval mode, and is afterwards as it was."""

from typing import Any, cast

import pytest
from torch import nn

from dspark_lightning.callbacks.decode_acceptance import DecodeAcceptance, _ready_to_decode
from family_helpers import build_pair


@pytest.mark.parametrize("training", [True, False])
def test_a_draft_decodes_in_eval_mode_and_goes_back(training: bool) -> None:
    target, draft = build_pair("qwen3")
    module = cast(nn.Module, draft)
    module.train(training)
    with _ready_to_decode(draft, target) as ready:
        assert not any(each.training for each in cast(nn.Module, ready).modules())
    assert module.training == training


def test_a_draft_goes_back_also_behind_an_error() -> None:
    target, draft = build_pair("qwen3")
    module = cast(nn.Module, draft)
    module.train()
    with pytest.raises(KeyError), _ready_to_decode(draft, target):
        raise KeyError
    assert module.training


def test_a_resumed_fit_does_not_decode_at_the_step_it_starts_from(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    callback = DecodeAcceptance("embedded", every_n_steps=2)

    class Trainer:
        global_step = 4

    monkeypatch.setattr(callback, "_decode", lambda trainer, *_: decoded.append(trainer.global_step) or {})
    monkeypatch.setattr("dspark_lightning.callbacks.decode_acceptance.write_scalars", lambda *_: None)
    module: Any = type("Module", (), {"log_dict": lambda *_, **__: None, "target": object()})()
    trainer: Any = Trainer()
    callback.on_train_start(trainer, module)
    for step in (4, 5, 6):  # micro-batches of the step that was being accumulated, and two more
        trainer.global_step = step
        callback.on_train_batch_end(trainer, module, None, None, 0)
    assert decoded == [6]
