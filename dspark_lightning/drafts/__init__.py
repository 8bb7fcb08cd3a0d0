"""Draft models: one file per target family."""
