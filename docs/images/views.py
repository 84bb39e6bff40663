"""Pictures of what people see of a run: the live console, the report and the dashboard.

    python -m docs.images.views
    python -m docs.images.views RUN --prometheus URL --output FOLDER

Without RUN the tiny recipe is trained on 2 ranks, one of which is killed and started again, while a
Prometheus of this machine scrapes it. ``console.svg`` is what the live view makes of the run's log,
``report.png`` the first screen of ``convoy report`` in Chromium, and ``dashboard.svg`` the panels
of deploy/grafana/convoy.json: matplotlib draws what Prometheus answers to their queries. Without
``--prometheus`` there is no picture of the dashboard.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console as Terminal
from rich.text import Text

from convoy.report import write_report
from docs.images.dashboard import answers_of, draw
from pretrain.errors import InputError
from pretrain.observe import (
    IntervalEnded,
    Launched,
    LiveConsole,
    LoggedEvent,
    RunStarted,
    complain,
    read_log,
    say,
)

HERE = Path(__file__).resolve().parent
WIDTH = 120
_LINES = 8
"""Lines above the view."""
_PART = 0.75
"""The part of the run's steps after which the console is drawn."""
# Without the fonts that the picture would load from elsewhere.
_SVG = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
_SETTINGS = (
    "metrics.all_ranks=true", "metrics.dollars_per_rank_hour=2.0", "train.log_interval_steps=5",
    "eval.interval_steps=40", "checkpoint.interval_steps=50",
    'inject=[{kind="kill", step=110, rank=1}]',
)  # fmt: skip


def console(lines: Sequence[LoggedEvent]) -> str:
    """What the terminal of rank 0 shows in the newest start of a run, as SVG.

    The live view gets the events of the log, each at its time. Raises InputError where the start
    has no log interval.
    """
    starts = [at for at, line in enumerate(lines) if isinstance(line.event, Launched)]
    lines = lines[starts[-1] :] if starts else lines
    (steps,) = [line.event.steps for line in lines if isinstance(line.event, RunStarted)][:1] or [0]
    now = lines[0].time or 0.0 if lines else 0.0
    terminal = Terminal(file=io.StringIO())
    view = LiveConsole(steps, terminal=terminal, now=lambda: now, wall=lambda: now)
    said, drawn = io.StringIO(), False
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        for line in lines:
            now = line.time or now
            view(line.event)
            if isinstance(line.event, IntervalEnded):
                drawn = True
                if line.event.step >= _PART * steps:
                    break
    view.close()
    if not drawn:
        raise InputError("the newest start in the log has no log interval that could be drawn")
    terminal = Terminal(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    terminal.print(Text("\n".join(said.getvalue().splitlines()[-_LINES:])))
    terminal.print(view.view.drawing())
    return terminal.export_svg(title="convoy pretrain", code_format=_SVG, unique_id="convoy")


def report(run: Path, picture: Path) -> None:
    """The first screen of a run's report. Raises InputError where there is no Chromium."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise InputError("chromium is missing, which shows the report: apt-get install chromium")
    with TemporaryDirectory() as name:
        page = Path(name) / "report.html"
        for note in write_report([run], page):
            complain(note)
        done = subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--user-data-dir={name}/profile", "--window-size=1160,1480",
                f"--screenshot={name}/page.png", page.as_uri(),
            ],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        if not (Path(name) / "page.png").exists():
            raise InputError(f"{browser} has made no picture: {done.stderr.strip()[-300:]}")
        shutil.copyfile(Path(name) / "page.png", picture)


@contextlib.contextmanager
def recorded() -> Iterator[tuple[Path, str]]:
    """A run of the tiny recipe, and the address of a Prometheus that has scraped it."""
    from bench.recipe_runs import RECIPE, prepare_corpus, torchrun, words
    from tests.support.prometheus import prometheus

    if shutil.which("prometheus") is None:
        raise InputError("prometheus is missing, which scrapes the run: apt-get install prometheus")
    with TemporaryDirectory() as name, contextlib.chdir(name):
        folder, run = Path(name), Path("runs", "stdlib-tiny")
        corpus = prepare_corpus(folder)
        with prometheus(folder, folder / run / "metrics") as server:
            settings = (*_SETTINGS, f"run_dir={folder / run}", f"data.path={corpus}")
            torchrun("--max-restarts=1", "tools/pretrain.py", str(RECIPE), *words(settings))
            yield run, server.url


def draw_all(run: Path, url: str | None, output: Path) -> None:
    """Write the pictures of a run. Raises InputError where one of them cannot be made."""
    try:
        log = read_log(run / "log.jsonl")
    except OSError as error:
        raise InputError(f"RUN ({run}) has no log that can be read: {error.strerror}") from None
    pictures = {"console.svg": console(log.lines)}
    report(run, output / "report.png")
    if url is not None:
        pictures["dashboard.svg"] = draw(answers_of(url, log.lines))
    for name, text in pictures.items():
        (output / name).write_text(text)
    for name in (*pictures, "report.png"):
        say(f"{output / name}: {(output / name).stat().st_size / 1024:,.0f} KiB")


def main(arguments: Sequence[str]) -> int:
    """Draw; returns the exit code: 2 where something is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="the folder of a run")
    parser.add_argument("--prometheus", metavar="URL", help="of a server that has scraped the run")
    parser.add_argument("--output", type=Path, default=HERE, metavar="FOLDER")
    args = parser.parse_args(arguments)
    output = args.output.resolve()
    try:
        if not output.is_dir():
            raise InputError(f"--output ({args.output}) must be a folder that exists")
        if args.run is not None:
            draw_all(args.run, args.prometheus, output)
        else:
            with recorded() as (run, url):
                draw_all(run, url, output)
    except InputError as error:
        complain(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
