"""Several servers work on one queue: what one of them cannot do is taken over by the others.

A row that fails more than `retries` times has failed. When all servers are given up, what is left stays unanswered.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark_lightning.regeneration.dialogue import Dialogue, Keep, Unanswered
from dspark_lightning.regeneration.scripts import Script
from dspark_lightning.regeneration.server import Passing, Request, Server, ServerSettings


@dataclass
class _Job:
    dialogue: Dialogue
    failures: int = 0


@dataclass
class _Crew:
    """What servers work on: one queue of dialogues."""

    request: Request
    retries: int
    jobs: "asyncio.Queue[_Job]" = field(default_factory=asyncio.Queue)
    finished: "asyncio.Queue[Dialogue]" = field(default_factory=asyncio.Queue)

    async def work(self, server: Server) -> None:
        """Play dialogues on one server, one after the other, until it is given up."""
        while not server.given_up:
            await asyncio.sleep(server.pause)
            job = await self.jobs.get()
            if server.given_up or server.pause > 0:  # it failed elsewhere while this waited
                self._put_back(job)
                continue
            try:
                with job.dialogue.failing():
                    await self._play(job.dialogue, server)
            except Passing as error:
                job.failures += not error.busy
                if job.failures <= self.retries:
                    self._put_back(job)
                    continue
                with job.dialogue.failing():
                    raise Unanswered("server error", f"{server.url}, after {job.failures} attempts: {error}") from error
            self.finished.put_nowait(job.dialogue)
            self.jobs.task_done()

    async def _play(self, dialogue: Dialogue, server: Server) -> None:
        while not dialogue.finished:
            reply = await server.ask(self.request.arguments(dialogue))
            dialogue.answer(reply.message, reply.tokens, reply.truncated)

    def _put_back(self, job: _Job) -> None:
        self.jobs.put_nowait(job)
        self.jobs.task_done()

    def pass_on(self, keep: Keep) -> None:
        """Store the dialogues that have been finished, all at once."""
        dialogues = [self.finished.get_nowait() for _ in range(self.finished.qsize())]
        if dialogues:
            keep(dialogues)

    async def keep_finished(self, keep: Keep) -> None:
        """Store dialogues as they are finished."""
        while True:
            self.finished.put_nowait(await self.finished.get())
            self.pass_on(keep)


def answer_by_servers(scripts: Sequence[Script], request: Request, settings: ServerSettings, keep: Keep) -> list[str]:
    """Have servers answer scripts; a dialogue stays with one server as long as that does not fail.

    Args:
        scripts: to be answered.
        request: what is the same in all requests.
        settings: of the servers.
        keep: is given dialogues as they are finished.

    Returns:
        what is wrong with each server, if all were given up before the end; else nothing.

    Raises:
        ValueError: a server refuses all requests.
    """
    return asyncio.run(_answer(scripts, request, settings, keep))


async def _answer(scripts: Sequence[Script], request: Request, settings: ServerSettings, keep: Keep) -> list[str]:
    servers = [Server(url, settings) for url in settings.urls]
    crew = _Crew(request, settings.retries)
    for script in scripts:
        crew.jobs.put_nowait(_Job(Dialogue(script)))
    each = min(settings.concurrency, len(scripts))
    workers = [asyncio.create_task(crew.work(server)) for server in servers for _ in range(each)]
    working: asyncio.Future[Any] = asyncio.gather(*workers)
    done: asyncio.Future[Any] = asyncio.create_task(crew.jobs.join())
    keeping: asyncio.Future[Any] = asyncio.create_task(crew.keep_finished(keep))
    try:
        await asyncio.wait([working, done, keeping], return_when=asyncio.FIRST_COMPLETED)
        for future in (working, keeping):
            if future.done():
                future.result()  # raises what went wrong there
        return [] if done.done() else [f"{server.url}: {server.problem}" for server in servers]
    finally:
        tasks = [*workers, working, done, keeping]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        crew.pass_on(keep)
        for server in servers:
            await server.client.close()
