"""Decoding: from logits to proposed tokens."""
