"""A real Prometheus on a free port, for as long as a context lasts."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

RULES = Path(__file__).parent.parent.parent / "deploy" / "prometheus" / "convoy.rules.yml"


def need(program: str) -> None:
    """Skip a test without a program of Debian's package prometheus."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is missing: apt-get install prometheus")


@dataclass(frozen=True)
class Prometheus:
    """A server that runs."""

    url: str
    log: Path

    def get(self, path: str, **parameters: str) -> Any:
        """The ``data`` of an answer of the API. Raises HTTPError for a query that is wrong."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as response:
            answer = json.loads(response.read())
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an expression gives now: a list of ``{"metric": labels, "value": [time, text]}``."""
        return self.get("query", query=expression)["result"]

    def value(self, expression: str) -> float:
        """The one number that an expression gives now."""
        (one,) = self.query(expression)
        return float(one["value"][1])

    def firing(self) -> set[str]:
        """The names of the alerts that fire."""
        alerts = self.get("alerts")["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    def until(self, true: Callable[[], Any], what: str, seconds: float = 120) -> Any:
        """Wait for something, which must come; its value."""
        end = time.monotonic() + seconds
        while not (found := true()):
            assert time.monotonic() < end, f"{what}: {self.log.read_text()[-2000:]}"
            time.sleep(0.2)
        return found


@contextmanager
def prometheus(folder: Path, targets: Path) -> Iterator[Prometheus]:
    """A server that finds targets by the files in ``targets``, with the rules of deploy/."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "convoy",
                "file_sd_configs": [
                    {"files": [f"{targets}/*.json"], "refresh_interval": "1s"}
                ],
            }
        ],
    }  # fmt: skip
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    log = folder / "prometheus.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                "prometheus", f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=output, stderr=output,
        )  # fmt: skip
    server = Prometheus(f"http://127.0.0.1:{port}", log)

    def ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{server.url}/-/ready", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    try:
        server.until(ready, "Prometheus is not ready")
        yield server
    finally:
        process.kill()
        process.wait()
