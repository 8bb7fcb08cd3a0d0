"""The feature cache: what the target makes of each row, kept on disk, so that training need not run the target."""
