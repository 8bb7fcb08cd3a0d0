"""`dspark regenerate`: answers by the target, so that a drafter learns to speak as the target does."""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_lightning.delivery import all_or_none, gather_values, process_rank, world_size
from dspark_lightning.regeneration.dialogue import Keep
from dspark_lightning.regeneration.job import Job
from dspark_lightning.regeneration.local import LocalTarget
from dspark_lightning.regeneration.output import OutputFiles
from dspark_lightning.regeneration.sampling import Sampling, describe_sampling
from dspark_lightning.regeneration.scripts import Turns, load_scripts
from dspark_lightning.regeneration.tally import Tally
from dspark_lightning.target import HFDSparkTargetModel
from dspark_lightning.tools.command import command_line
from dspark_lightning.tools.target import Dtype, launch_processes, load_placed_target, load_renderer


def regenerate(
    data: str | list[str],
    output: Path,
    target: str | None = None,
    server: str | list[str] | None = None,
    gguf_file: str | None = None,
    turns: Turns = "all",
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    limit: int | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    batch_size: int | None = None,
    accelerator: str = "auto",
    devices: int = 1,
    dtype: Dtype | None = None,
    device_map: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    concurrency: int | None = None,
    retries: int | None = None,
    timeout: float | None = None,
) -> None:
    """Let the target answer prompts, or write the answers of chat rows anew: training data in its own words.

    The target runs in this process, or on servers that speak the OpenAI chat protocol. A run that was stopped goes on
    where it was when the same command is given again; rows that failed are then tried once more. An answer that is
    cut at the token limit ends its conversation and is marked `truncated`.

    Args:
        data: JSONL, JSON or parquet file, hub id or "embedded": rows with turns, prompt, messages or conversations;
            several as '[a.jsonl, b.jsonl]', or with further --data+.
        output: JSON Lines file to write. Beside it: its settings and, if there are any, the rows that failed.
        target: model folder, hub id, or "embedded"; with servers the name under which they offer it (default: the
            only one they have).
        server: address of a server, such as http://localhost:8000/v1, or several as '[http://a/v1, http://b/v1]'; the
            key is read from OPENAI_API_KEY.
        gguf_file: name of a GGUF file in the target's folder.
        turns: "all" writes every answer of a conversation anew, each behind the new ones before; "last" only the last
            one, behind the others as they are.
        temperature: 0 is greedy. Default of this and the next three: what the target's generation config recommends;
            from servers only what is given is asked for.
        top_p: the most probable tokens with this much probability together.
        top_k: so many of the most probable tokens; 0 takes all.
        max_new_tokens: of each answer; in process 1024 where the target recommends no number.
        seed: an answer's random numbers follow from it, the row's id and the turn. Default: 0; servers get none.
        limit: so many first rows of each file; default: all.
        chat_template: Jinja file in place of the tokenizer's template; servers are started with theirs.
        chat_template_kwargs: options of the template, such as enable_thinking.
        batch_size: rows answered together in this process (default 8).
        accelerator: auto, cpu, cuda or another that Lightning knows.
        devices: processes, each with a whole target.
        dtype: of the target; default: float32 on the CPU, bfloat16 elsewhere.
        device_map: "auto" spreads a target over the devices of one process.
        attn_implementation: how the target attends; default: as transformers chooses.
        trust_remote_code: whether code that comes with the target may run.
        concurrency: requests under way at a time on each server (default 32).
        retries: after so many failures more in a row a server, or a row, is given up (default 5).
        timeout: seconds that a server may take for one answer (default 600).
    """
    sampling = Sampling(temperature, top_p, top_k, max_new_tokens)
    asking = {"concurrency": concurrency, "retries": retries, "timeout": timeout}
    own: dict[str, Any] = {"gguf_file": gguf_file, "chat_template": chat_template, "batch_size": batch_size}
    own |= {"accelerator": accelerator if accelerator != "auto" else None, "devices": devices if devices != 1 else None}
    own |= {"dtype": dtype, "device_map": device_map, "attn_implementation": attn_implementation}
    own |= {"trust_remote_code": trust_remote_code or None}
    _refuse_given(asking if server is None else own, server)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
    job = Job(load_scripts(data, limit, turns), OutputFiles(output))
    settings = {"chat_template_kwargs": chat_template_kwargs, "turns": turns, "data": data, "limit": limit}
    if server is not None:
        urls = [server] if isinstance(server, str) else server
        given = {name: value for name, value in asking.items() if value is not None}
        code = _by_servers(job, urls, given, target, sampling, seed, settings)
    elif target is None:
        raise ValueError("there is no target: give --target FOLDER to answer in this process, or --server URL")
    else:
        fabric = launch_processes(accelerator, devices, device_map)
        model = load_placed_target(fabric, target, gguf_file, dtype, device_map, attn_implementation, trust_remote_code)
        renderer = load_renderer(target, gguf_file, trust_remote_code, chat_template, chat_template_kwargs)
        local = LocalTarget(model, renderer, sampling, seed or 0)
        settings = _identity(local, target) | {"gguf_file": gguf_file, "chat_template": chat_template} | settings
        code = _in_process(job, local, batch_size or 8, settings)
    if code:
        sys.exit(code)


def _in_process(job: Job, local: LocalTarget, batch_size: int, settings: Mapping[str, Any]) -> int:
    """Answer in this process and those beside it, each of which takes its share of the batches."""
    rank = process_rank()
    begun = all_or_none(lambda: set() if rank else job.begin(settings, {"command": command_line()}))
    job.done = gather_values(begun)[0]
    groups, refused = local.groups(job.rows.scripts, batch_size) if job.unanswered else ([], [])
    mine = groups[rank :: world_size()]
    total = sum(script.key not in job.done for group in mine for script in group)
    tally = all_or_none(lambda: job.collect(lambda keep: local.answer(mine, job.done, keep), rank, total))
    everything = Tally()
    for each in gather_values(tally):
        everything.include(each)
    return job.conclude(everything, refused) if rank == 0 else 0


def _by_servers(
    job: Job,
    urls: list[str],
    asking: Mapping[str, Any],
    model: str | None,
    sampling: Sampling,
    seed: int | None,
    settings: dict[str, Any],
) -> int:
    """Let servers answer."""
    try:
        from dspark_lightning.regeneration.crew import answer_by_servers
        from dspark_lightning.regeneration.server import Request, ServerSettings, served_model
    except ModuleNotFoundError as error:
        raise ValueError(f"--server needs the package {error.name}: pip install 'openai>=3'") from error
    servers = ServerSettings(urls, **asking)
    request = Request(model or served_model(servers), sampling, seed, settings["chat_template_kwargs"])
    identity = {"answered_by": "server", "target": request.model, **vars(sampling), "seed": seed}
    job.done = job.begin(identity | settings, {"command": command_line(), "servers": urls})
    left = job.unanswered
    given_up: list[str] = []

    def answer(keep: Keep) -> None:
        given_up.extend(answer_by_servers(left, request, servers, keep))

    return job.conclude(job.collect(answer, 0, len(left)), [], given_up)


def _identity(local: LocalTarget, target: str) -> dict[str, Any]:
    """What answers of a local target depend on."""
    weights = HFDSparkTargetModel(local.model, [0]).fingerprint()
    rendering = json.dumps(local.renderer.state(), sort_keys=True, default=str)
    return {
        "answered_by": "transformers",
        "target": target,
        "target_weights": weights,
        "dtype": str(local.model.dtype).removeprefix("torch."),
        **describe_sampling(local.settings),
        "seed": local.seed,
        "rendering": hashlib.blake2b(rendering.encode(), digest_size=8).hexdigest(),
    }


def _refuse_given(options: Mapping[str, Any], server: object) -> None:
    """Refuse options that would be passed over."""
    for name, value in options.items():
        if value is not None:
            where = "is for servers, but --server is not given" if server is None else f"is not for servers: {server!r}"
            raise ValueError(f"{name} {value!r} {where}")
