"""What a config that was copied from the target's says of the target's layers, put as it holds for the draft's.

Our own configs are built for the draft, and stay as they are.
"""

from numbers import Real

from dspark_lightning.layouts.layout import Config

_PER_LAYER = ("indexer_types", "layer_types", "mlp_layer_types")


def settled(own: Config) -> Config:
    """Correct all that is known to be left over."""
    return _with_rotary_width(_with_global_heads(_without_lists_of_the_target(own)))


def _without_lists_of_the_target(own: Config) -> Config:
    """GLM's, with an entry for each of the target's layers: those of a draft are all of one kind."""
    layers = own.get("num_hidden_layers")
    left_over = {name for name in _PER_LAYER if isinstance(own.get(name), list) and len(own[name]) != layers}
    return {name: value for name, value in own.items() if name not in left_over}


def _with_global_heads(own: Config) -> Config:
    """Gemma4's: a draft's layers are all global ones, and the config may give the heads of windowed layers beside."""
    if "global_head_dim" not in own:
        return own
    heads = (own.get("attention_k_eq_v") and own.get("num_global_key_value_heads")) or own.get("num_key_value_heads")
    size = own["global_head_dim"] or own.get("head_dim")
    return own | {
        "head_dim": size,
        "global_head_dim": size,
        "num_key_value_heads": heads,
        "num_global_key_value_heads": heads,
        "num_kv_shared_layers": 0,
    }


def _with_rotary_width(own: Config) -> Config:
    """MiniMax's: how many channels turn may be given as their number alone, the rotary table goes by their share."""
    width, size, rope = own.get("rotary_dim"), own.get("head_dim"), own.get("rope_parameters")
    given = "partial_rotary_factor" in own or (isinstance(rope, dict) and "partial_rotary_factor" in rope)
    if given or not (isinstance(width, Real) and isinstance(size, Real) and size):
        return own
    share = {"partial_rotary_factor": width / size}
    return own | ({"rope_parameters": rope | share} if isinstance(rope, dict) else share)
