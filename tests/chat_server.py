"""A server that speaks as much of the OpenAI chat protocol as the tests need, and fails when it is told to."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


def echo(body: Body) -> Body:
    """What the server answers by default: which turn it is, and what was asked."""
    messages = body["messages"]
    turn = sum(message["role"] == "assistant" for message in messages)
    return {"content": f"answer {turn} to {messages[-1]['content']}"}


class ChatServer:
    """The server's side of the tests.

    Attributes:
        url: of its API.
        answer: from a request to the fields of the answer's message, `finish_reason`, or a `status` to fail with.
        requests: bodies of the requests, and `key`, the key that was sent.
        faults: what the next requests get in place of an answer: a status code, "drop" (the connection is closed),
            "junk" (no JSON), or a number of seconds as float, after which they are answered.
        always: what all further requests get, likewise; None answers them.
    """

    def __init__(self, port: int, answer: Callable[[Body], Body], models: list[str]) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.requests: list[Body] = []
        self.faults: list[int | float | str] = []
        self.always: int | float | str | None = None
        self.answer, self.models = answer, models
        self.lock = threading.Lock()

    def asked(self) -> list[str]:
        """The last turn of each request."""
        return [body["messages"][-1]["content"] for body in self.requests]

    def reply(self, body: Body) -> tuple[int, Body] | str:
        with self.lock:
            self.requests.append(body)
            fault = self.faults.pop(0) if self.faults else self.always
        if isinstance(fault, str):
            return fault
        if isinstance(fault, int):
            return fault, {"error": {"message": f"told to fail with {fault}"}}
        time.sleep(fault or 0)
        message = {"role": "assistant", **self.answer(body)}
        if "status" in message:
            return message["status"], {"error": {"message": "busy"}}
        reason = message.pop("finish_reason", "stop")
        choice = {"index": 0, "finish_reason": reason, "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
        about = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
        return 200, {**about, "choices": [choice], "usage": usage}


@contextmanager
def chat_server(answer: Callable[[Body], Body] = echo, models: tuple[str, ...] = ("tiny",)) -> Iterator[ChatServer]:
    """Run a server on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in server.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = server.reply({**body, "key": self.headers["Authorization"].removeprefix("Bearer ")})
            if reply == "drop":
                self.close_connection = True
            elif isinstance(reply, str):
                self._send(200, reply)
            else:
                self._send(*reply)

        def _send(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode() if not isinstance(content, str) else content.encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:  # the client waits no longer
                self.close_connection = True

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = ChatServer(http.server_address[1], answer, list(models))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def closed_port() -> str:
    """Address of a server that is not there."""
    with chat_server() as server:
        return server.url
