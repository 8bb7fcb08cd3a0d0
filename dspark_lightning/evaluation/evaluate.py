"""Playing many conversations, spread over processes; the numbers do not depend on how many there are."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dspark_lightning.datamodules.prompts import Conversation
from dspark_lightning.decoding.records import AnswerRecord
from dspark_lightning.delivery import all_or_none, gather_values, process_rank, world_size
from dspark_lightning.evaluation.play import Player
from dspark_lightning.evaluation.summary import summarise
from dspark_lightning.sharding import is_sharded

Track = Callable[[Sequence[Conversation]], Iterator[Conversation]]
"""Goes through conversations and shows how far it is."""


def play_all(player: Player, conversations: Sequence[Conversation], track: Track = iter) -> list[AnswerRecord]:
    """Play conversations, each on one process; of a target that is split over the ranks, all play all of them.

    Args:
        player: of this process; all have the same weights and settings.
        conversations: the same on every process.
        track: shows the progress of this process.

    Returns:
        the records of all processes, in the order of the conversations.

    Raises:
        ValueError: that of any process, on all of them.
    """
    # Ranks that hold parts of a target run it together, so all have to take the same steps.
    together = is_sharded(player.target.model)
    mine = conversations if together else conversations[process_rank() :: world_size()]
    played = all_or_none(lambda: {_key(each): list(player.play(each)) for each in track(mine)})
    merged = {key: records for part in gather_values(played) for key, records in part.items()}
    return [record for each in conversations for record in merged[_key(each)]]


def evaluation_results(records: Sequence[AnswerRecord], size: int, threshold: float = 0.0) -> dict[str, Any]:
    """Summaries of all answers and of each dataset; see `summarise`."""
    names = list(dict.fromkeys(record.dataset for record in records))
    parts = {name: [record for record in records if record.dataset == name] for name in names}
    return {
        "overall": summarise(records, size, threshold),
        "datasets": {name: summarise(part, size, threshold) for name, part in parts.items()},
    }


def scalars(summary: dict[str, Any]) -> dict[str, float]:
    """The numbers of a summary under the names they have in logs: tau_decode, acceptance@k, survival@k, ..."""
    values = {"tau_decode": summary["tau"]}
    for name, key in (("acceptance_decode", "conditional_acceptance"), ("survival_decode", "survival")):
        values |= {f"{name}@{k}": value for k, value in enumerate(summary[key], 1)}
    if summary["speedup"] is not None:
        values["speedup"] = summary["speedup"]["ratio"]
    if summary["confidence"] is not None:
        pooled = summary["confidence"]["pooled"]
        values |= {f"confidence_{name}": pooled[name] for name in ("ece", "auc", "brier")}
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def _key(conversation: Conversation) -> tuple[str, int]:
    return conversation.dataset, conversation.index
