"""Evaluation: what a draft is worth, measured by decoding with it."""
