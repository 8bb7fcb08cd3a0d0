"""Answers by the target for the rows that a drafter will be trained on."""
