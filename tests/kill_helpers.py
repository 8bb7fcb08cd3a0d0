"""Commands that are killed at some moment, and what is left of them.

It is also a process of its own, from which commands are forked: everything is imported once, so that one costs little
more than its work. It reads requests as lines of JSON and answers each with a line.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """How a command ended."""

    code: int  # negative where it was killed
    seconds: float
    output: str

    @property
    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1]


class Commands:
    """Runs `dspark` commands, each in a process of its own.

    Args:
        process: this file.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, folder: Path, arguments: list[str], **accident: Any) -> Ended:
        """Run a command in a folder, its log beside it, and wait for it; see `run_command` for the accidents."""
        folder.mkdir(exist_ok=True, parents=True)
        (folder.parent / "output.log").write_text("")  # it may be killed before it has one
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"folder": str(folder), "arguments": arguments, **accident}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process from which commands are forked has ended"
        return Ended(*json.loads(answer), (folder.parent / "output.log").read_text())

    def finish(self, folder: Path, arguments: list[str], **accident: Any) -> Ended:
        """Run a command that has to succeed."""
        ended = self.run(folder, arguments, **accident)
        assert ended.code == 0, ended.output[-3000:]
        return ended


@contextmanager
def commands() -> Iterator[Commands]:
    """The process from which commands are forked."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, __file__], env=environment, **pipes) as process:  # type: ignore[call-overload]
        yield Commands(process)
        process.stdin.close()


def moments(count: int, seconds: float, seed: object) -> list[float]:
    """Random moments, one in each of so many equal parts of a run, the first and the last seconds included."""
    rng = random.Random(str(seed))
    return [(part + rng.random()) / count * seconds for part in range(count)]


def run_command(request: Mapping[str, Any]) -> tuple[int, float]:
    """Fork a command and wait for it.

    Args:
        request: folder and arguments; of an accident, if there is one, `kill_after`: seconds until it is killed;
            or `kill_at`: a file that is there by then; `signal`: what it is sent, SIGKILL by default; `no_room`: bytes
            that no file may exceed.
    """
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os._exit(_child(request))
    waiting = "kill_after" in request or "kill_at" in request
    file = Path(request["folder"], request.get("kill_at", "."))
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG if waiting else 0)
        if ended:
            return os.waitstatus_to_exitcode(status), time.monotonic() - start
        if time.monotonic() - start > request.get("kill_after", 0) and file.exists():
            os.kill(pid, request.get("signal", signal.SIGKILL))
            waiting = False
        time.sleep(0.002)


def _child(request: Mapping[str, Any]) -> int:
    import datasets

    import dspark_lightning.features.writer as writer_file
    from dspark_lightning.cli import main

    os.chdir(request["folder"])
    log = os.open("../output.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    writer_file.SHARD_BYTES = 50_000  # several files for a few rows
    datasets.config.HF_DATASETS_CACHE = Path(request["folder"]).parent / "datasets"
    if "no_room" in request:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["no_room"], resource.RLIM_INFINITY))
    try:
        main(request["arguments"])
        return 0
    except SystemExit as stop:
        return int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _serve() -> None:
    import torch
    from transformers import AutoTokenizer

    import dspark_lightning.cli
    from dspark_lightning.embedded import embedded_path

    torch.set_num_threads(1)
    AutoTokenizer.from_pretrained(embedded_path())  # what it imports
    assert dspark_lightning.cli
    for line in sys.stdin:
        print(json.dumps(run_command(json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve()
