"""Folders with drafts, in every published layout: one file per layout, and one that tells them apart."""
