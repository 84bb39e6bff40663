"""docs/data.md, from a folder of files to a run, word for word."""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import pyarrow
import pyarrow.parquet

from convoy.commands.command_line import main
from tests.support.jobs import write_corpus
from tests.support.ranks import run_ranks

PAGE = (Path(__file__).parent.parent / "docs" / "data.md").read_text()


def block(language: str, number: int = 0) -> str:
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return pattern.findall(PAGE)[number]


def write_texts(folder: Path) -> None:
    """The files that the page speaks of: four that are read and one that is not."""
    texts = [path.read_text() for path in sorted(write_corpus(folder / "all", 46).iterdir())]
    (folder / "my-texts" / "more").mkdir(parents=True)
    mine = folder / "my-texts"
    for name, some in (("a.jsonl", texts[:20]), ("b.jsonl.gz", texts[20:30])):
        more = [texts[0], "too short"] if name == "a.jsonl" else []
        raw = b"".join(json.dumps({"text": t}).encode() + b"\n" for t in [*some, *more])
        (mine / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    table = pyarrow.table({"text": texts[30:45]})
    pyarrow.parquet.write_table(table, mine / "more" / "c.parquet")
    (mine / "more" / "d.txt").write_text(texts[45])
    (mine / "picture.png").write_bytes(b"\x89PNG\0\0")


def on_rank(rank: int, folder: Path, words: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    with chdir(folder), redirect_stdout(said), redirect_stderr(said):
        return main(arguments=words), said.getvalue()


def test_the_page_leads_from_files_to_a_run(tmp_path):
    write_texts(tmp_path)
    (tmp_path / "texts.toml").write_text(block("toml"))
    said = ""
    for line in block("sh").splitlines():
        command, *words = shlex.split(line)
        assert command == "convoy"
        if words[0] == "pretrain":  # in a process of its own: a run changes signal handlers
            ((code, out),) = run_ranks(on_rank, 1, tmp_path, words, group=False)
        else:
            code, out = on_rank(0, tmp_path, words)
        assert code == 0, (line, out)
        said += out
    for line in block("text").splitlines():
        pattern = ".*".join(re.escape(part) for part in line.split("…"))
        assert re.search(f"^{pattern}$", said, re.MULTILINE), (line, said)
    for name in re.findall(r"^runs/\S+", block("text", 1), re.MULTILINE):
        assert (tmp_path / name).exists(), name
    assert "each sample exactly once and in order" in said
    assert "tokens of 6 steps are those of the checksums in the log" in said
