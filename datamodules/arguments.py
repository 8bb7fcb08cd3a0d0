"""Checks of what a datamodule is given, before anything is read."""

from collections.abc import Sequence

from dspark_lightning.datamodules.rows import ROLES


def check_numbers(**numbers: tuple[int | None, int]) -> None:
    """Check that numbers are large enough.

    Args:
        **numbers: by name, each with the least that it may be; None is left out.

    Raises:
        ValueError: names the first that is too small.
    """
    for name, (value, least) in numbers.items():
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def check_supervision(supervise: str, roles: Sequence[str]) -> None:
    """Check which turns are to be supervised.

    Raises:
        ValueError: an unknown word or role, or two that exclude each other.
    """
    if supervise not in ("all", "last"):
        raise ValueError(f"supervise must be 'all' or 'last', got {supervise!r}")
    unknown = [role for role in roles if role not in ROLES]
    if "assistant" not in roles or unknown or isinstance(roles, str):
        raise ValueError(
            f"supervise_roles must hold assistant, and beside it only roles out of {', '.join(ROLES)}, got {roles!r}"
        )
    if supervise == "last" and set(roles) != {"assistant"}:
        raise ValueError(
            f"supervise 'last' takes the last answer alone, but supervise_roles is {list(roles)}: leave one of them out"
        )


def check_validation(val_data: str | None, val_split: str | None, val_fraction: float) -> None:
    """Check that validation rows are chosen in one way only.

    Raises:
        ValueError: val_fraction is out of range, or given beside val_data or val_split.
    """
    if not 0.0 <= val_fraction < 1.0:
        raise ValueError(f"val_fraction must be at least 0 and below 1, got {val_fraction}")
    if val_fraction and (val_data or val_split) is not None:
        raise ValueError(
            f"val_fraction {val_fraction} chooses the validation rows, but so does "
            f"{f'val_split {val_split!r}' if val_data is None else f'val_data {val_data!r}'}: give one of them"
        )


def check_stream(stream_rows: int, num_workers: int, val_fraction: float, train_split: str) -> None:
    """Refuse, beside a stream, what needs rows to be held together, or more than one reader.

    Raises:
        ValueError: names the argument.
    """
    reads = f"stream_rows {stream_rows} reads train_data as a stream"
    if val_fraction:
        raise ValueError(f"{reads}, from which val_fraction {val_fraction} cannot hold rows out: give val_data")
    if "[" in train_split:
        raise ValueError(f"{reads}, which has no slices, but train_split is {train_split!r}: name a whole split")
    if num_workers > 1:
        raise ValueError(f"{reads}, which has one reader on each rank: set num_workers to 0 or 1, got {num_workers}")
