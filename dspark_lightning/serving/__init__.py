"""The folder that is served: its fields, its record, its model card, and what would go wrong with it."""
