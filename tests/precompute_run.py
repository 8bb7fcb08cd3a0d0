"""Fill a feature cache in files of a few rows; test_precompute.py also runs it as a process that is killed.

python tests/precompute_run.py CACHE
"""

import sys
from pathlib import Path

import torch

import dspark_lightning.features.writer as writer_file
from feature_helpers import fill, new_source


def run(cache: Path) -> None:
    torch.set_num_threads(1)
    writer_file.SHARD_BYTES = 50_000
    fill(cache, new_source(batch_size=1))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
