"""`dspark report`: what the page holds."""

import re
import warnings
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dspark_lightning import cli
from dspark_lightning.cli import main
from dspark_lightning.report.data import Curve, read_run, read_scalars
from dspark_lightning.report.drawing import INK, SERIES, chart_name, picture, position_color
from dspark_lightning.report.page import render
from dspark_lightning.report.training_charts import training_charts
from report_helpers import EVALUATION, FILES, SCHEDULE, SUMMARY, make_run, write_events, write_json

STYLE = Path(__file__).parent.parent / "dspark_lightning/report/page.css"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run with everything in it."""
    run = make_run(tmp_path_factory.mktemp("runs") / "version_3")
    main(["report", str(run)])
    return (run / "report.html").read_text()


class Reader(HTMLParser):
    """Text, tags and attributes of a page; fails on tags that are not closed."""

    VOID = ("meta",)

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())


def test_the_numbers_stand_on_top(page: str) -> None:
    texts = Reader(page).texts
    start = texts.index("Tokens per target pass (tau)")
    assert texts[start : start + 12] == [
        "Tokens per target pass (tau)",
        "2.27",
        "95 % interval 2.19 – 2.36; at most 3",  # noqa: RUF001
        "Speed-up",
        "1.46×",  # noqa: RUF001
        "spread 1.41 – 1.53; 141.6 tokens per second, 96.9 without a draft",  # noqa: RUF001
        "Acceptance at position 1",
        "0.75",
        "in 1,200 rounds that proposed a token",
        "Steps trained",
        "1,234",
        "tau on held-out answers after step 1,234: 2.44",
    ]


def rows_of(page: str, first: str) -> list[list[str]]:
    """The rows of all tables whose first cell is `first`."""
    rows = re.findall(r'<tr><th scope="row"><span>(.*?)</td></tr>', page)
    return [re.split(r"</span></th><td>|</td><td>", row) for row in rows if row.startswith(first)]


def test_the_tables_hold_the_values(page: str) -> None:
    speed = ["1.46×", "1.41 – 1.53", "141.6", "96.9"]  # noqa: RUF001
    counts = ["12", "17", "1,200", "2,724", "2,400", "2,391", "1,524"]
    by_set = ["chat", "1.94", "2.19 – 2.36", "0.75", *speed, *counts]  # noqa: RUF001
    assert by_set in rows_of(page, "chat")
    assert ["gsm8k", "conditional", "0.75", "0.69"] in rows_of(page, "gsm8k")
    assert rows_of(page, "temperature") == [["temperature", "1.24", "0.87"]]
    assert rows_of(page, "ECE") == [["ECE before", "0.071", "0.111"], ["ECE after", "0.018", "0.026"]]
    assert rows_of(page, "0.5<") == [["0.5", "2.08", "1.37", "–"]]  # noqa: RUF001
    assert ["scheduler", "8", "9,876.0", "1,234.5", "1.75", "1.25"] in rows_of(page, "scheduler")
    texts = Reader(page).texts
    assert "The temperatures, from 1,500 samples of chat rows" in texts
    assert (
        sum(text.endswith("Expected calibration error (ECE) 0.037, AUC 0.812, Brier score 0.163.") for text in texts)
        == 1
    )
    assert sum(text.endswith("Over all positions 0.091 before, 0.022 after.") for text in texts) == 1


def test_every_chart_is_there_and_can_be_read_out(page: str) -> None:
    reader = Reader(page)
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert titles == [
        "Loss and its parts",
        "Tokens per target pass (tau)",
        "Acceptance by position, on held-out rows",
        "Acceptance by position, in training",
        "Conditional acceptance",
        "Survival",
        "Accepted tokens per round",
        "Confidence against acceptance",
        "Calibration error by position",
        "Predicted against observed survival, by position",
        "What a threshold costs and saves",
        "How much of what is verified is accepted",
        "Throughput over load",
        "Throughput against speed per user",
        "Draft tokens verified per request",
    ]
    pictures = [attributes for tag, attributes in reader.tags if tag == "svg"]
    assert len(pictures) == len(titles) + 1  # one of the charts has a picture for each of two positions
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    assert page.count("<figcaption>") == page.count("<figure") == len(titles)
    assert {"gsm8k", "all data", "draft tokens verified per round", "position 2"} <= set(reader.texts)


def test_the_commands_are_those_of_the_files(page: str) -> None:
    texts = Reader(page).texts
    commands = dict(zip(texts[-15:-3:2], texts[-14:-3:2], strict=True))
    assert [*commands] == ["Train", "Evaluate", "Calibrate", "Schedule", "Export", "Serve"]
    assert commands["Train"].startswith("dspark fit --config /") and commands["Train"].endswith("/config.yaml")
    assert commands["Evaluate"] == "dspark evaluate --draft d-dspark"
    assert commands["Calibrate"] == "dspark calibrate --draft d-dspark"
    assert commands["Schedule"] == "dspark schedule --evaluation e"
    assert commands["Export"].endswith("/checkpoints/last.ckpt --output my-dspark")
    served = '{"model": "d-dspark", "num_speculative_tokens": 2}'
    assert commands["Serve"] == f"vllm serve models/my-target --speculative-config '{served}'"


def test_the_page_needs_nothing_beside_it(page: str) -> None:
    tags = Reader(page).tags
    links = [attributes.get(name) for _, attributes in tags for name in ("src", "href", "xlink:href")]
    assert all(link.startswith("#") for link in links if link is not None)
    assert set(re.findall(r"url\((.)", page)) == {"#"}
    assert not {tag for tag, _ in tags} & {"script", "link", "img", "iframe", "object"}
    assert "http" not in page and "@import" not in page
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {f"#{name}" for name in ids} >= {link for link in links if link is not None}


def luminance(color: str) -> float:
    """The relative luminance of WCAG 2."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_colours_can_be_seen_on_the_light_and_on_the_dark_page(page: str) -> None:
    assert "currentColor" in page and INK not in page
    grounds = re.findall(r"--page: (#\w{6});", STYLE.read_text())
    assert grounds == ["#ffffff", "#14171b"]
    for color in (*SERIES, *(position_color(i, 7) for i in range(7))):
        for ground in grounds:
            low, high = sorted((luminance(color), luminance(ground)))
            assert (high + 0.05) / (low + 0.05) >= 3, (color, ground)


def test_a_run_that_was_only_trained_says_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(tmp_path / "run", [0, 99], {"train/loss": 0.5, "val/tau": 1.8125})
    main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "pages/a.html")])
    texts = " ".join(Reader((tmp_path / "pages/a.html").read_text()).texts)
    assert "Tokens per target pass (tau) 1.81 on held-out answers after step 100;" in texts
    assert "Speed-up – dspark evaluate measures it" in texts  # noqa: RUF001
    run = tmp_path / "run"
    evaluate = f"dspark evaluate --draft {run}/dspark-draft --target TARGET --data FILE"
    assert texts.count(f"There is no evaluation/evaluation.json yet; {evaluate} writes it.") == 4
    records = f"--records {run}/evaluation/records.jsonl"
    assert f"There is no evaluation/calibration.json yet; dspark calibrate {records} writes it." in texts
    assert f"There is no evaluation/schedule.json yet; dspark schedule {records} --profile TARGET writes it." in texts
    assert "There is no config.yaml in this folder; dspark fit writes it." in texts
    assert "No file in this folder says how it was made; dspark fit saves its config.yaml." in texts
    assert "averaged" not in texts
    assert re.search(r"Report written to .*/pages/a\.html \(\d+ kB\)", capsys.readouterr().out)
    assert not (tmp_path / "run/report.html").exists()


def test_an_evaluation_alone_with_all_that_may_be_null(tmp_path: Path) -> None:
    empty = {"speedup": None, "thresholds": None, "confidence": None}
    summary = SUMMARY | empty | {"survival": [0.75, None], "conditional_acceptance": [None, None]}
    write_json(tmp_path, {"evaluation": EVALUATION | {"overall": summary, "datasets": {"one set": summary}}})
    main(["report", "--run", str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    texts = " ".join(Reader(page).texts)
    assert "There are no TensorBoard events in this folder; dspark fit writes them." in texts
    assert "Steps trained – no training log in this folder" in texts  # noqa: RUF001
    assert "Speed-up – not timed in this evaluation" in texts  # noqa: RUF001
    for key in ("thresholds", "confidence"):
        lacking = f"evaluation/evaluation.json has no {key}; dspark evaluate measures them for a draft with a"
        assert lacking in texts
    assert ["one set", "survival", "0.75", "–"] in rows_of(page, "one set")  # noqa: RUF001
    assert rows_of(page, "all data") == []  # would say the same again


def test_what_was_made_from_other_records_is_left_out(tmp_path: Path) -> None:
    """An evaluation was repeated: the calibration and the schedule of the one before do not belong to it."""
    write_json(tmp_path, FILES | {"evaluation": EVALUATION | {"records_digest": "b2"}})
    texts = " ".join(Reader(render(read_run(tmp_path))).texts)
    for name in ("calibration", "schedule"):
        assert f"evaluation/{name}.json was made from other records than evaluation/evaluation.json" in texts
    assert "chat rows" not in texts and "1,234.5" not in texts


def test_names_of_the_user_stay_text(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script> $a_1$ & "'
    run = make_run(tmp_path / "run")
    content = EVALUATION | {"target": evil, "machine": {"cpu": evil}, "datasets": {evil: SUMMARY, "_$b^2$": SUMMARY}}
    results = [result | {"policy": evil} for result in SCHEDULE["results"]]
    write_json(run, {"evaluation": content, "schedule": SCHEDULE | {"results": results}})
    (run / "config.yaml").write_text(f"# {evil}\n")
    main(["report", str(run)])
    page = (run / "report.html").read_text()
    reader = Reader(page)
    assert "script" not in {tag for tag, _ in reader.tags} and "<script" not in page
    texts = Counter(reader.texts)
    assert texts[evil] >= 4  # the target, three rows by position, the row by set, the policies
    assert texts[f"# {evil}"] == 1 and texts[f"cpu {evil}"] == 1
    assert texts[chart_name(evil)] == 3 + 3  # the legends
    assert texts["_$b^2$"] == 3 + 3 + 1  # neither left out nor set as mathematics


def test_long_names_are_short_in_charts_only() -> None:
    assert chart_name("a" * 13 + "b" * 13) == "a" * 13 + "b" * 13
    assert chart_name("a" * 13 + "-" + "b" * 13) == "a" * 12 + "…" + "b" * 13
    assert chart_name("_hidden") == " _hidden"


def test_names_in_any_script_are_drawn_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svg = picture(lambda axes: axes.plot([1, 2], label="\N{CJK UNIFIED IDEOGRAPH-4E2D}"), "a line")
    assert ">\N{CJK UNIFIED IDEOGRAPH-4E2D}</text>" in svg


def test_several_event_files_become_one_curve(tmp_path: Path) -> None:
    write_events(tmp_path, [9, 19, 39], {"train/loss": 3.0}, suffix=".a")
    write_events(tmp_path, [19, 29], {"train/loss": 2.0, "val/tau": 1.5}, suffix=".b")
    assert read_scalars(tmp_path) == {
        "train/loss": Curve([10, 20, 30, 40], [3.0, 2.0, 2.0, 3.0]),
        "val/tau": Curve([20, 30], [1.5, 1.5]),
    }


def test_a_validation_after_the_fit_counts_as_its_last_step(tmp_path: Path) -> None:
    write_events(tmp_path, [0, 9], {"train/loss": 3.0, "val/tau": 1.5}, suffix=".fit")
    write_events(tmp_path, [10], {"val/tau": 1.75}, suffix=".validate")
    assert read_scalars(tmp_path)["val/tau"] == Curve([1, 10], [1.5, 1.75])


def test_a_long_curve_is_averaged_down_and_the_page_says_so() -> None:
    (chart,) = training_charts({"train/loss": Curve(list(range(1, 202)), [1.0] * 201)})
    assert chart.caption.endswith("lower is better. Neighbouring values are averaged to 200 points.")
    curve = Curve(list(range(1, 8)), [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0])
    assert curve.thinned(7) == curve
    assert curve.thinned(4) == Curve([2, 4, 6, 7], [2.0, 6.0, 10.0, 13.0])


@pytest.mark.parametrize(
    "args",
    [["a", "b"], ["a", "b", "--last=3"], ["--first=a", "--second=b"], ["--last", "3", "--second", "b", "--first", "a"]],
)
def test_tools_take_what_they_require_by_place_or_by_name(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def tool(first: Path, second: str, last: int = 3) -> None:
        calls.append((first, second, last))

    monkeypatch.setitem(cli.TOOLS, "tool", tool)
    main(["tool", *args])
    assert calls == [(Path("a"), "b", 3)]
