"""A target that decodes with its cache and forgets what was rejected.

Shapes: n tokens, F feature layers, H hidden size, V vocabulary.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from dspark_lightning.decoding.growing import GrowingLayer
from dspark_lightning.target import HFDSparkTargetModel

# Layers whose cache can be cut at its end. Others hold states that already mix in what is to be forgotten.
_CROPPABLE_LAYERS = (
    "full_attention",
    "sliding_attention",
    "indexed_attention",
    "deepseek_sparse_attention",
    "minimax_m3_sparse",
)


class CachedTarget:
    """One row of a target, fed a few tokens at a time.

    Where the cache can be cut, rejected tokens are cut off. Where it cannot (compressed or recurrent states), the cache
    is copied before tokens that may be rejected, and those accepted are fed once more.

    Args:
        target: on the device where the tokens are.
    """

    def __init__(self, target: HFDSparkTargetModel) -> None:
        self.target = target
        target.model.eval()
        self._cache_name, self._cache = cache_argument(target.decoder), empty_cache(target)
        crops = can_crop(target.model.config.get_text_config())
        self._crops = crops and hasattr(self._cache, "activate_past_recording")
        if self._crops:
            layers = self._cache.layers
            self._cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in layers]
        self._before: Any = None
        self._fed: Tensor | None = None

    def feed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run tokens [n] behind those before.

        Returns:
            features [1, n, F*H] and states after the final norm [1, n, H].
        """
        return self.target.decode(tokens.unsqueeze(0), {self._cache_name: self._cache})

    def feed_on_trial(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """As `feed`, for tokens of which `keep` will tell how many stay."""
        if self._crops:
            self._cache.activate_past_recording()
        else:
            self._before = copy.deepcopy(self._cache)
        self._fed = tokens
        return self.feed(tokens)

    def keep(self, count: int) -> None:
        """Forget all but the first `count` tokens that were fed on trial."""
        if self._fed is None:
            raise RuntimeError("call feed_on_trial before keep")
        rejected, fed = len(self._fed) - count, self._fed
        if self._crops:
            self._cache.crop(-rejected)  # for sliding windows also where nothing was rejected
        elif rejected:
            self._cache = self._before
            self.feed(fed[:count])
        self._before = self._fed = None

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's own logits [..., V] of states [..., H]."""
        with torch.inference_mode():
            return self.target.compute_logits(hidden)


def empty_cache(target: HFDSparkTargetModel) -> Any:
    """A cache without tokens, of the kinds of layers that the target has."""
    return DynamicCache(config=target.model.config.get_text_config())


def cache_argument(model: nn.Module) -> str:
    """The argument that takes the cache, which versions of transformers name differently."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def can_crop(config: PretrainedConfig) -> bool:
    """Whether the caches of all layers of a text stack can be cut at their end."""
    kinds = getattr(config, "layer_types", None) or ()
    return all(kind in _CROPPABLE_LAYERS for kind in kinds)
