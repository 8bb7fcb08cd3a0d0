"""The surroundings of every test: no hub, no network beyond this machine, one thread."""

import atexit
import os
import shutil
import tempfile

# Read when torch, transformers and matplotlib are imported, so set before any of them is.
os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", MPLBACKEND="Agg"
)

# Encoded rows are cached; the user's cache must neither be used nor filled.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="dspark-tests-")

import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from fault_kinds import Stage

torch.set_num_threads(1)
atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

LOOPBACK = ("127.", "::1", "localhost")


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Refuse every connection of this process that would leave the machine."""
    connect = socket.socket.connect

    def local_connect(self: socket.socket, address: tuple[str, int] | str) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not address[0].startswith(LOOPBACK):
            raise OSError(f"a test may not use the network, but tried to reach {address}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", local_connect)
        yield


@pytest.fixture(autouse=True)
def no_launcher_variables_left() -> Iterator[None]:
    """Lightning sets the launcher's variables in this process; a later test's own ranks would wait for each other."""
    before = dict(os.environ)
    yield
    for name in ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name in os.environ and name not in before:
            del os.environ[name]


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Stage"]:
    """Runs whole commands, to which things happen."""
    from fault_kinds import Stage
    from kill_helpers import commands

    with commands() as process:
        yield Stage(process, tmp_path_factory.mktemp("stage"))
