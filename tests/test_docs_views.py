"""The pictures of what people see of a run: drawn from its log, and from a Prometheus' answers."""

from __future__ import annotations

import html
import json
import re
import shutil
import struct
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pretrain.errors import InputError
from pretrain.observe import read_log
from tests.convoy.report.test_report import write_run

pytest.importorskip("matplotlib")

from docs.images import views
from docs.images.dashboard import answers_of, draw

IMAGES = Path(views.__file__).parent
LOSSES = [[1000.0, "9"], [1001.0, "7.5"], [1016.0, "5"], [1017.0, "3.5"]]


def words_of(svg: str) -> str:
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    return re.sub(r"\s+", " ", html.unescape(" ".join(texts)).replace("\xa0", " "))


def test_the_console_shows_the_newest_start_at_three_quarters_of_its_steps(tmp_path):
    svg = views.console(read_log(write_run(tmp_path / "run") / "log.jsonl").lines)
    said = words_of(svg)
    for words in (
        "resized after step 3: dp_shard=2 ep=2 -> dp_shard=4 ep=4", "resuming after step 3",
        "step 4/6 loss 5.0000", "first step of this start", "step 5/6", "loss 4.0000",
        "500 tokens seen", "50 tokens/s", "busiest 2.00 x mean", "slowest 1.00 x mean time",
    ):  # fmt: skip
        assert words in said, (words, said)
    assert "lost" not in said, "that was another process"
    assert "step 6" not in said
    assert "@font-face" not in svg, "nothing is loaded from elsewhere"
    assert views.console(read_log(tmp_path / "run" / "log.jsonl").lines) == svg


def test_a_log_without_an_interval_cannot_be_drawn():
    with pytest.raises(InputError, match="no log interval"):
        views.console([])


@pytest.fixture
def prometheus() -> Iterator[str]:
    """The address of a server that knows a run's loss and its step, and nothing else."""
    asked: list[dict[str, list[str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query)
            asked.append(query)
            known = {
                'convoy_loss{run=~"a"}': LOSSES,
                'convoy_step{run=~"a"}': [[1020.0, "6"]],
            }.get(query["query"][0])
            result = [] if known is None else [{"metric": {"run": "a"}, "values": known}]
            body = json.dumps({"status": "success", "data": {"result": result}}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
    assert {(query["start"][0], query["end"][0]) for query in asked} == {("1000.0", "1020.0")}


def test_the_dashboard_has_the_lines_that_prometheus_answers(tmp_path, prometheus):
    lines = read_log(write_run(tmp_path / "run") / "log.jsonl").lines
    svg = draw(answers_of(prometheus, lines))
    (path,) = re.findall(r'<g id="Loss:a train">.*?<path d="([^"]*)"', svg, re.DOTALL)
    heights = [float(y) for _, y in re.findall(r"[ML] (\S+) (\S+)", path)]
    assert heights == sorted(heights), "the loss falls"
    scale = (heights[1] - heights[0]) / (9 - 7.5)
    assert heights[3] - heights[0] == pytest.approx(scale * (9 - 3.5), rel=1e-3)
    assert path.count("M") == 2, "no line crosses the time without answers"
    said = words_of(svg)
    assert said.startswith("6 Step ")
    panels = json.loads((IMAGES.parents[1] / "deploy/grafana/convoy.json").read_text())["panels"]
    assert said.count("No data") == sum(panel["type"] != "row" for panel in panels) - 2
    for panel in panels:
        assert panel["title"] in said


def test_what_is_no_prometheus_is_one_line(tmp_path):
    lines = read_log(write_run(tmp_path / "run") / "log.jsonl").lines
    with pytest.raises(InputError, match=r"--prometheus \(http://127.0.0.1:1\) does not answer"):
        answers_of("http://127.0.0.1:1", lines)
    with pytest.raises(InputError, match="no start with a time"):
        answers_of("http://127.0.0.1:1", [])


def test_a_run_without_a_log_and_a_machine_without_chromium_are_one_line(
    tmp_path, monkeypatch, capsys
):
    assert views.main(["nowhere", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "error: RUN (nowhere) has no log that can be read: No such file or directory\n"
    )
    run = write_run(tmp_path / "run")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert views.main([str(run), "--output", str(tmp_path)]) == 2
    assert "chromium is missing" in capsys.readouterr().err
    assert views.main(["--output", str(tmp_path)]) == 2
    assert "prometheus is missing" in capsys.readouterr().err
    assert views.main([str(run), "--output", str(tmp_path / "none")]) == 2
    assert "must be a folder that exists" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.engine
def test_the_command_writes_the_pictures_of_a_run(tmp_path, prometheus, capsys):
    if shutil.which("chromium") is None and shutil.which("google-chrome") is None:
        pytest.skip("chromium is missing: apt-get install chromium")
    run = write_run(tmp_path / "run")
    words = [str(run), "--prometheus", prometheus, "--output", str(tmp_path)]
    assert views.main(words) == 0, capsys.readouterr().err
    assert "step 5/6" in words_of((tmp_path / "console.svg").read_text())
    assert "Loss:a train" in (tmp_path / "dashboard.svg").read_text()
    png = (tmp_path / "report.png").read_bytes()
    assert struct.unpack(">II", png[16:24]) == (1160, 1480)
    assert len(png) > 30_000, "a page without pictures is smaller"


def test_the_pictures_of_the_pages_are_small():
    for path in IMAGES.glob("*.[sp][vn]g"):
        assert path.stat().st_size < 300 * 1024, path
