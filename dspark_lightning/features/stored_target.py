"""What training needs of a target whose features are in a cache: its config, its embedding and its head."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, cast

import torch
from lightning.pytorch import Trainer
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from dspark_lightning.features.hashing import content_hash
from dspark_lightning.tensor_files import write_tensors

_FOLDER, _FILE = "target", "embedding_and_head.safetensors"


@dataclass(frozen=True)
class StoredTarget:
    """The parts of a target that a draft is built on.

    Attributes:
        config: of the target.
        embedding: [V, H].
        head: [V, H]; the embedding itself where the target ties the two.
        layer_ids: of the features in the cache.
        fingerprint: of the target's weights.
        folder: of the cache, for errors.
    """

    config: PretrainedConfig
    embedding: Tensor
    head: Tensor
    layer_ids: list[int]
    fingerprint: str
    folder: Path

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """The same on a device, in the dtype that the target would be loaded in."""
        embedding = self.embedding.to(device, dtype)
        head = embedding if self.head is self.embedding else self.head.to(device, dtype)
        return replace(self, embedding=embedding, head=head)

    @property
    def embed_tokens(self) -> nn.Module:
        """The embedding, as the draft takes it."""
        return cast(nn.Module, nn.Embedding.from_pretrained(self.embedding))

    @property
    def lm_head(self) -> nn.Module:
        """The output projection, as the draft takes it."""
        vocab_size, hidden_size = self.head.shape
        head = nn.Linear(hidden_size, vocab_size, bias=False, device="meta")
        head.weight = nn.Parameter(self.head, requires_grad=False)
        return head

    def check_layer_ids(self, layer_ids: list[int]) -> None:
        """Refuse a draft that reads other layers.

        Raises:
            ValueError: names both.
        """
        if list(layer_ids) != self.layer_ids:
            raise ValueError(
                f"the feature cache {str(self.folder)!r} was made with target_layer_ids {self.layer_ids}, this run has "
                f"{list(layer_ids)}: use the settings it was made with, or precompute into another folder"
            )


def stored_target(trainer: Trainer | None) -> StoredTarget | None:
    """The parts that the trainer's datamodule has from a cache; None where the target itself has to be loaded."""
    datamodule = None if trainer is None else trainer.datamodule  # type: ignore[attr-defined]
    return cast(StoredTarget | None, getattr(datamodule, "stored_target", None))


def save_target_parts(cache: Path, owner: str, config: PretrainedConfig, embedding: Tensor, head: Tensor) -> None:
    """Write what `load_target_parts` reads, each weight once.

    Args:
        cache: folder of the cache.
        owner: identifies the cache, so that parts strayed from another one are noticed.
        config: of the target.
        embedding: [V, H], whole.
        head: [V, H], whole.

    Raises:
        ValueError: it cannot be written.
    """
    folder = cache / _FOLDER
    tensors = {"embed_tokens.weight": embedding.detach().cpu().contiguous()}
    if not torch.equal(embedding, head):
        tensors["lm_head.weight"] = head.detach().cpu().contiguous()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        write_tensors(tensors, folder / _FILE, {"content_hash": _hash(folder, owner, tensors)})
    except OSError as error:
        raise ValueError(f"cannot write {str(folder)!r}: {error.strerror or error}") from error


def load_target_parts(
    cache: Path, owner: str, layer_ids: list[int], fingerprint: str, trust_remote_code: bool = False
) -> StoredTarget:
    """Read what `save_target_parts` wrote.

    Raises:
        ValueError: it cannot be read.
    """
    folder = cache / _FOLDER
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        with safe_open(folder / _FILE, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            written = (file.metadata() or {}).get("content_hash")
        embedding = tensors["embed_tokens.weight"]
        if (found := _hash(folder, owner, tensors)) != written:
            raise ValueError(f"{_FILE} has the content hash {written}, but it and config.json give {found}")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the feature cache {str(cache)!r} is damaged: {str(folder)!r}: {reason}") from error
    head = tensors.get("lm_head.weight", embedding)
    return StoredTarget(config, embedding, head, layer_ids, fingerprint, cache)


def _hash(folder: Path, owner: str, tensors: Mapping[str, Tensor]) -> str:
    config = (folder / "config.json").read_text(encoding="utf-8")
    return content_hash([owner, config, *(part for item in sorted(tensors.items()) for part in item)])
