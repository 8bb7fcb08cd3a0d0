"""`dspark regenerate --server`: what servers are asked, and what happens when they fail."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_helpers import chat, datasets_cache, write_jsonl  # noqa: F401
from chat_server import Body, ChatServer, chat_server, closed_port, echo
from dspark_lightning.cli import main
from dspark_lightning.regeneration import server as server_module
from dspark_lightning.regeneration.server import Server, ServerSettings, served_model

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(server_module, "LONGEST_PAUSE", 0.05)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


def prompts(folder: Path, count: int) -> str:
    return write_jsonl(folder / "prompts.jsonl", [{"prompt": f"question {i}"} for i in range(count)])


def regenerate(data: str, output: Path, urls: list[str], *options: str) -> int:
    """Run the command; returns its exit code."""
    common = ["--data", data, "--output", str(output), "--server", f"[{','.join(urls)}]"]
    try:
        main(["regenerate", *common, *(() if "--target" in options else ("--target", "tiny")), *options])
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def answers(output: Path) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows(output)]


def failures(output: Path) -> list[dict[str, Any]]:
    return rows(output.with_name(f"{output.name}.failures.jsonl"))


def test_rows_are_answered_in_their_order(server: ChatServer, tmp_path: Path) -> None:
    assert regenerate(prompts(tmp_path, 20), tmp_path / "out.jsonl", [server.url]) == 0
    assert answers(tmp_path / "out.jsonl") == [f"answer 0 to question {i}" for i in range(20)]


def test_only_what_is_given_is_sent(server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    data = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "tools": [TOOL]}])
    regenerate(data, tmp_path / "1.jsonl", [server.url], "--target", "big")
    asked = [{"role": "user", "content": "a"}]
    assert server.requests == [{"key": "none", "model": "big", "messages": asked, "tools": [TOOL]}]

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    sampling = ["--temperature", "0.5", "--top_p", "0.9", "--top_k", "7", "--max_new_tokens", "11"]
    template = ["--chat_template_kwargs", '{"enable_thinking": false}']
    regenerate(data, tmp_path / "2.jsonl", [server.url], *sampling, *template)
    sent = {"key": "secret", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 11}
    assert sent.items() <= server.requests[1].items()
    assert server.requests[1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "secret" not in "".join(path.read_text() for path in tmp_path.iterdir())


def test_a_given_seed_is_another_for_each_answer(server: ChatServer, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [{"turns": ["a", "b"]}, {"turns": ["a", "b"]}])
    for name in ("1.jsonl", "2.jsonl"):
        regenerate(data, tmp_path / name, [server.url], "--seed", "3")
    seeds = [sorted(body["seed"] for body in part) for part in (server.requests[:4], server.requests[4:])]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 4


def test_each_turn_follows_the_new_answers(server: ChatServer, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [chat("a", "old", "b", "older")])
    regenerate(data, tmp_path / "out.jsonl", [server.url])
    (row,) = rows(tmp_path / "out.jsonl")
    assert row["messages"] == chat("a", "answer 0 to a", "b", "answer 1 to b")["messages"]
    assert server.requests[1]["messages"] == row["messages"][:3]


def test_reasoning_tool_calls_and_cut_answers_are_kept(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    replies: dict[str, Body] = {
        "a": {"content": "yes", "reasoning_content": "hm"},
        "b": {"content": "no", "reasoning": "well"},
        "c": {"content": "it is", "finish_reason": "length"},
        "d": {"content": None, "tool_calls": [call], "finish_reason": "tool_calls"},
    }
    data = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": name} for name in replies])
    with chat_server(lambda body: dict(replies[body["messages"][-1]["content"]])) as server:
        assert regenerate(data, tmp_path / "out.jsonl", [server.url]) == 0
    last = [row["messages"][-1] for row in rows(tmp_path / "out.jsonl")]
    parsed = {**call, "function": {"name": "look", "arguments": {"at": 1}}}  # as chat templates read it
    assert [{name: value for name, value in message.items() if name != "role"} for message in last] == [
        {"content": "yes", "reasoning_content": "hm"},
        {"content": "no", "reasoning_content": "well"},
        {"content": "it is"},
        {"content": "", "tool_calls": [parsed]},
    ]
    assert [row.get("truncated") for row in rows(tmp_path / "out.jsonl")] == [None, None, True, None]


def test_a_tool_call_before_the_last_answer_is_a_failure(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    data = write_jsonl(tmp_path / "rows.jsonl", [chat("a", "x", "b", "y")])
    with chat_server(lambda body: {"content": "", "tool_calls": [call]}) as server:
        assert regenerate(data, tmp_path / "out.jsonl", [server.url]) == 1
    assert [each["reason"] for each in failures(tmp_path / "out.jsonl")] == ["tool call"]
    assert not (tmp_path / "out.jsonl").exists()


def test_results_of_tools_go_to_the_server_as_the_protocol_has_them(server: ChatServer, tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "seen", "tool_call_id": "c1"},
        {"role": "assistant", "content": "old"},
    ]
    data = write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns}])
    assert regenerate(data, tmp_path / "out.jsonl", [server.url], "--turns", "last") == 0
    sent = server.requests[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent) == {"at": 1}
    assert rows(tmp_path / "out.jsonl")[0]["messages"] == [
        *turns[:3],
        {"role": "assistant", "content": "answer 1 to seen"},
    ]


@pytest.mark.parametrize("fault", [429, 500, 503, "drop", "junk"])
def test_what_passes_is_tried_again(fault: int | str, server: ChatServer, tmp_path: Path) -> None:
    server.faults = [fault] * 3
    assert regenerate(prompts(tmp_path, 4), tmp_path / "out.jsonl", [server.url], "--concurrency", "1") == 0
    assert answers(tmp_path / "out.jsonl") == [f"answer 0 to question {i}" for i in range(4)]
    assert len(server.requests) == 7


def test_a_row_is_not_blamed_for_a_busy_server(server: ChatServer, tmp_path: Path) -> None:
    server.faults = [429, 0.0, 429]  # question 0 twice, and question 1 in between
    options = ["--concurrency", "1", "--retries", "1"]
    assert regenerate(prompts(tmp_path, 2), tmp_path / "out.jsonl", [server.url], *options) == 0
    assert server.asked() == [f"question {i}" for i in (0, 1, 0, 0)]


def test_requests_under_way_fail_as_one(tmp_path: Path) -> None:
    """Six requests that fail together are one failure of the server: with one retry it is not given up."""
    together, waiting = threading.Barrier(6), iter(range(6))

    def answer(body: Body) -> Body:
        if next(waiting, None) is None:
            return echo(body)
        together.wait(5)
        return {"status": 503}

    with chat_server(answer) as server:
        options = ["--concurrency", "6", "--retries", "1"]
        assert regenerate(prompts(tmp_path, 6), tmp_path / "out.jsonl", [server.url], *options) == 0
    assert len(rows(tmp_path / "out.jsonl")) == 6


def test_an_answer_that_takes_too_long_is_asked_for_again(server: ChatServer, tmp_path: Path) -> None:
    server.faults = [5.0]
    began = time.monotonic()
    assert regenerate(prompts(tmp_path, 1), tmp_path / "out.jsonl", [server.url], "--timeout", "0.3") == 0
    assert time.monotonic() - began < 4
    assert server.asked() == ["question 0"] * 2


def test_others_take_over_from_a_server_that_is_down(server: ChatServer, tmp_path: Path) -> None:
    options = ["--retries", "2"]
    assert regenerate(prompts(tmp_path, 12), tmp_path / "out.jsonl", [closed_port(), server.url], *options) == 0
    assert answers(tmp_path / "out.jsonl") == [f"answer 0 to question {i}" for i in range(12)]


def test_several_servers_share_the_work(tmp_path: Path) -> None:
    def slowly(body: Body) -> Body:
        time.sleep(0.02)
        return echo(body)

    with chat_server(slowly) as one, chat_server(slowly) as other:
        options = ["--concurrency", "2"]
        assert regenerate(prompts(tmp_path, 16), tmp_path / "out.jsonl", [one.url, other.url], *options) == 0
        assert sorted(one.asked() + other.asked()) == sorted(f"question {i}" for i in range(16))
        assert min(len(one.requests), len(other.requests)) >= 4


def test_when_all_are_down_the_run_ends_and_can_go_on(
    server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = prompts(tmp_path, 6), tmp_path / "out.jsonl"
    options = ["--concurrency", "1", "--retries", "1"]
    server.faults, server.always = [0.0, 0.0], 503  # two answers, then nothing more
    assert regenerate(data, output, [server.url], *options) == 1
    assert "4 rows are left, but no server is" in capsys.readouterr().out
    assert not output.exists()
    assert [(each["place"], each["reason"]) for each in failures(output)] == [
        (f"{data}:{line}", "no server is left") for line in (3, 4, 5, 6)
    ]
    assert all("told to fail with 503" in each["detail"] for each in failures(output))
    server.always = None
    server.requests.clear()
    assert regenerate(data, output, [server.url], *options) == 0
    assert server.asked() == [f"question {i}" for i in (2, 3, 4, 5)]
    assert answers(output) == [f"answer 0 to question {i}" for i in range(6)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out.jsonl",
        "out.jsonl.settings.json",
        "prompts.jsonl",
    ]


def test_a_row_that_always_fails_is_listed_and_the_others_go_on(tmp_path: Path) -> None:
    broken = True

    def answer(body: Body) -> Body:
        if broken and body["messages"][-1]["content"] == "question 1":
            raise OSError  # closes the connection
        return echo(body)

    data, output = prompts(tmp_path, 8), tmp_path / "out.jsonl"
    with chat_server(answer) as server:
        options = ["--concurrency", "2", "--retries", "2"]
        assert regenerate(data, output, [server.url], *options) == 1
        assert answers(output) == [f"answer 0 to question {i}" for i in range(8) if i != 1]
        assert server.asked().count("question 1") == 3
        assert [(each["place"], each["reason"]) for each in failures(output)] == [(f"{data}:2", "server error")]
        broken = False
        assert regenerate(data, output, [server.url], *options) == 0
    assert answers(output) == [f"answer 0 to question {i}" for i in range(8)]
    assert not output.with_name("out.jsonl.failures.jsonl").exists()


@pytest.mark.parametrize(
    ("reply", "reason", "detail"),
    [
        ({"content": 5}, "server error", "the reply cannot be read: its text is of type int"),
        ({"content": "a", "reasoning_content": [1]}, "server error", "the reply cannot be read: its text is of type"),
        ({"content": None, "tool_calls": ["look"]}, "server error", "the reply cannot be read: "),
        ({"content": "half an", "finish_reason": "abort"}, "server error", "stopped in the middle of the answer"),
        ({"content": "half an", "finish_reason": "content_filter"}, "cut by a content filter", "has filtered"),
    ],
)
def test_an_answer_that_is_none_costs_its_row_alone(reply: Body, reason: str, detail: str, tmp_path: Path) -> None:
    def answer(body: Body) -> Body:
        return dict(reply) if body["messages"][-1]["content"] == "question 1" else echo(body)

    data, output = prompts(tmp_path, 3), tmp_path / "out.jsonl"
    with chat_server(answer) as server:
        assert regenerate(data, output, [server.url], "--retries", "1", "--concurrency", "1") == 1
    (failure,) = failures(output)
    assert (failure["place"], failure["reason"]) == (f"{data}:2", reason) and detail in failure["detail"]
    assert answers(output) == ["answer 0 to question 0", "answer 0 to question 2"]


def test_a_call_that_the_server_has_read_already_is_kept(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    with chat_server(lambda body: {"content": None, "tool_calls": [call]}) as server:
        assert regenerate(prompts(tmp_path, 1), tmp_path / "out.jsonl", [server.url]) == 0
    assert rows(tmp_path / "out.jsonl")[0]["messages"][-1]["tool_calls"] == [call]


def test_a_refused_row_is_not_asked_for_again(server: ChatServer, tmp_path: Path) -> None:
    server.faults = [400]
    output = tmp_path / "out.jsonl"
    assert regenerate(prompts(tmp_path, 3), output, [server.url], "--concurrency", "1") == 1
    assert len(server.requests) == 3 and len(rows(output)) == 2
    (failure,) = failures(output)
    assert (failure["reason"], failure["place"]) == ("refused by the server", f"{tmp_path / 'prompts.jsonl'}:1")
    assert "told to fail with 400" in failure["detail"]


def failure_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "dspark: error: " in line]
    return line.partition("dspark: error: ")[2]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--batch_size", "4"], "batch_size 4 is not for servers"),
        (["--chat_template", "x.jinja"], "chat_template 'x.jinja' is not for servers"),
        (["--devices", "2"], "devices 2 is not for servers"),
        (["--concurrency", "0"], "concurrency must be 1 or more, got 0"),
        (["--retries", "-1"], "retries must be 0 or more, got -1"),
        (["--timeout", "0"], "timeout must be above 0 seconds, got 0"),
        (["--temperature", "-1"], "temperature must be 0 (greedy) or at least 0.001, got -1"),
    ],
)
def test_wrong_options_are_one_line(
    options: list[str], error: str, server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert regenerate(prompts(tmp_path, 1), tmp_path / "out.jsonl", [server.url], *options) == 2
    assert failure_line(capsys).startswith(error)
    assert not server.requests and [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_a_refused_key_ends_the_run_at_once(
    server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.always = 401
    assert regenerate(prompts(tmp_path, 3), tmp_path / "out.jsonl", [server.url]) == 2
    error = failure_line(capsys)
    assert "refuses all requests" in error and error.endswith("the key is read from OPENAI_API_KEY")


def test_the_model_has_to_be_named_where_there_are_several(tmp_path: Path) -> None:
    with chat_server() as server:
        assert served_model(ServerSettings([server.url])) == "tiny"
    with pytest.raises(ValueError, match="does not tell its models"):
        served_model(ServerSettings([server.url]))  # gone
    with (
        chat_server(models=("one", "two")) as server,
        pytest.raises(ValueError, match=r"offers \['one', 'two'\]: give"),
    ):
        served_model(ServerSettings([server.url]))


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ValueError, match="server 'localhost:8000' is no address: must be like http"):
        ServerSettings(["localhost:8000"])


def test_pauses_grow_and_the_server_may_ask_for_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FIRST_PAUSE", 1.0)
    monkeypatch.setattr(server_module, "LONGEST_PAUSE", 30.0)
    failing = Server("http://localhost:1/v1", ServerSettings(["http://localhost:1/v1"], retries=9))
    for most in (1, 2, 4, 8, 16, 30, 30):
        failing.failed(time.monotonic(), "busy")
        assert most / 2 - 0.1 < failing.pause <= most
    failing.succeeded()
    failing.failed(time.monotonic(), "busy", wait=20)
    assert 19.9 < failing.pause <= 20
    failing.failed(time.monotonic(), "busy", wait=1e6)
    assert 29.9 < failing.pause <= 30
