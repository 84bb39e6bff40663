"""The pages of docs/ and README.md name what there is: options, metrics, events, errors, files."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from docs.images.draw import PICTURES
from docs.metrics_table import PAGE, metrics_page
from moe import MoEConfig
from parallel import Topology
from pretrain.observe import Metrics, RankMetrics
from pretrain.observe.events import (
    EVENTS,
)
from pretrain.spec import load_spec
from pretrain.spec.sections import MetricsConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md",
    ROOT / "bench" / "README.md", *sorted(DOCS.glob("*.md")),
]  # fmt: skip


def outside_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


# ------------------------------------------------------------------------------------------------
# Metrics, events, options.


def test_every_metric_is_on_its_page_and_no_other():
    registry = CollectorRegistry()
    spec = load_spec(ROOT / "tools" / "recipes" / "stdlib-tiny.toml")
    priced = spec.model_copy(update={"metrics": MetricsConfig(dollars_per_rank_hour=1.0)})
    Metrics(registry, priced, Topology(dp_shard=2, ep=2), "0").tokens_seen = 1
    RankMetrics(registry, rank=0, host="here", device="cpu")
    there = {
        metric.name + ("_total" if metric.type == "counter" else "")
        for metric in registry.collect()
    }
    # A gauge called *_info is one of prometheus_client's own types.
    page = (DOCS / "metrics.md").read_text()
    table = page[page.index("## Prometheus") : page.index("## log.jsonl")]
    cells = re.findall(r"^\| (`convoy_.*?) \|", table, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(convoy_\w+)", cell)} == there


def test_the_tables_of_metrics_are_what_the_events_declare():
    text = PAGE.read_text()
    assert text.count("make docs/metrics.md") == 2
    assert metrics_page(text) == text, "make docs/metrics.md"


@pytest.mark.parametrize("name", EVENTS)
def test_every_event_and_field_is_on_its_page(name):
    page = (DOCS / "metrics.md").read_text()
    log = page[page.index("## log.jsonl") : page.index("## summary.json")]
    heads = {
        each.strip(): body
        for head, body in re.findall(
            r"^### (.*?)\n(.*?)(?=^### |\Z)", log, re.DOTALL | re.MULTILINE
        )
        for each in head.split(",")
    }
    assert set(heads) == set(EVENTS)
    logged = {f.name for f in fields(EVENTS[name]) if f.metadata.get("log", True)} - {"step"}
    rows = re.findall(r"^\| (`.*?) \|", heads[name], re.MULTILINE)
    assert {field for row in rows for field in re.findall(r"`(\w+)`", row)} == logged


def test_every_option_of_the_layer_is_on_its_page():
    page = (DOCS / "layer.md").read_text()
    options = page[page.index("## Options") : page.index("## Load balancing over")]
    cells = [row.split("|")[1:3] for row in options.splitlines() if row.startswith("| ")]
    named = {name for row in cells for cell in row for name in re.findall(r"`(\w+)`", cell)}
    schema = MoEConfig.model_json_schema()
    variants = [d["properties"] for n, d in schema["$defs"].items() if "policy" in d["properties"]]
    assert len(variants) == 4, "three policies, and those from outside"
    wanted = set(schema["properties"]) - {"capacity"}
    for properties in variants:
        wanted |= set(properties) - {"policy"}
    assert wanted <= named


OF_PEERS = {"JAX_PLATFORMS", "DS_ACCELERATOR"}
"""Environment variables that benches set for others' packages."""


def test_every_environment_variable_is_on_its_page():
    page = (DOCS / "operations.md").read_text()
    table = page[page.index("## Environment variables") :]
    for top in ("ckpt", "cluster", "parallel", "corpus", "pretrain", "convoy", "bench"):
        for path in (ROOT / top).rglob("*.py"):
            read = re.findall(r'environ(?:\.get)?[\[(]"([A-Z_]+)"', path.read_text())
            for name in [*read, *re.findall(r'"(CONVOY_[A-Z_]+)"', path.read_text())]:
                assert f"`{name}`" in table or name in OF_PEERS, (path, name)


# ------------------------------------------------------------------------------------------------
# Errors.


@cache
def templates() -> list[str]:
    """Every string of the code, the parts of a literal joined, with … for what is filled in."""
    found = []
    for top in ("moe", "router", "parallel", "ckpt", "cluster", "corpus", "pretrain", "convoy"):
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [
                        str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values
                    ]
                    found.append("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def errors() -> list[str]:
    page = (DOCS / "troubleshooting.md").read_text()
    return list(re.findall(r"^\| `([^`]*)` \|", page, re.MULTILINE))


PYDANTICS = {"… Input should be a valid integer"}


@pytest.mark.parametrize("error", errors())
def test_an_error_of_the_troubleshooting_page_is_in_the_code(error):
    if error in PYDANTICS:
        return
    parts = [re.escape(part.strip()) for part in re.split(r"…", error) if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    assert any(pattern.search(template) for template in templates()), error


# ------------------------------------------------------------------------------------------------
# Installs, dates.


def test_extras_are_installed_from_a_checkout():
    """No index has the package, so ``pip install convoy-moe`` finds nothing, or a stranger's."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    tops = (
        "moe", "router", "parallel", "ckpt", "cluster", "corpus", "pretrain", "convoy", "tools",
        "bench", "deploy",
    )  # fmt: skip
    files = [p for top in (*tops, "examples") for p in (ROOT / top).rglob("*") if p.is_file()]
    named = set()
    for path in (file for file in (*PAGES, *files) if file.suffix not in (".pyc", ".json", ".npz")):
        text = path.read_text()
        assert not re.search(r"pip install[^\n]*[\"' ]convoy-moe", text), path
        # A message may be cut into two literals.
        found = re.findall(r"""pip install -e[\s"]*['"]\.\[([^\]{]*)\]""", text)
        named |= {extra for extras in found for extra in extras.split(",")}
    assert {"s3", "data", "plot", "nvml", "etcd", "ray"} <= named <= set(extras)


def test_dates_of_benchmarks_are_those_of_their_rows():
    rows = r"`bench/results/([\w-]+\.json)`(?:,\s+(\d{4}-\d\d-\d\d))?"
    for page in PAGES:
        for name, date in re.findall(rows, page.read_text()):
            measured = json.loads((ROOT / "bench" / "results" / name).read_text())["date"][:10]
            assert date == measured or (not date and page.name != "benchmarks.md"), (page, name)
    text = (DOCS / "benchmarks.md").read_text()
    assert len(re.findall(r"\d{4}-\d\d-\d\d", text)) == len(re.findall(rows, text))


# ------------------------------------------------------------------------------------------------
# Links, files, form.


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", outside_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", outside_code(page.read_text())):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text()), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page):
    if page.name == "CHANGELOG.md":
        return  # it names what is no more
    tops = "router|parallel|moe|ckpt|cluster|pretrain|tools|bench|tests|docs"
    for name in re.findall(rf"`((?:{tops})/[\w./-]+\.\w+)`", page.read_text()):
        assert (ROOT / name).exists(), name


def test_every_page_can_be_reached_from_the_readme():
    text = (ROOT / "README.md").read_text()
    for path in DOCS.glob("*.md"):
        assert f"docs/{path.name}" in text, path.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_not_too_wide(page):
    if page.name == "spec.md":
        return  # generated from docstrings
    for number, line in enumerate(outside_code(page.read_text()).splitlines(), 1):
        if not line.startswith("|"):
            assert len(line) <= 105, (number, line)


def test_every_public_function_and_class_says_what_it_does():
    for package in ("moe", "router", "parallel", "ckpt"):
        module = importlib.import_module(package)
        for name in dir(module):
            value = getattr(module, name)
            if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
                assert value.__doc__, f"{package}.{name}"


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) < 180


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_are_those_that_the_script_draws(name):
    assert (DOCS / "images" / name).read_text() == PICTURES[name], "python -m docs.images.draw"
