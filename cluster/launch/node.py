"""What a node of a launch runs: ``python -m cluster.launch.node ENGINE JOB [WORDS]``.

JOB is an :class:`EngineJob` as JSON, or the path of a file with it. A node with another version of
Convoy is refused; then the node does what the engine does on its nodes (``Engine.on_node``). What
engines share there is below: the command line of torchrun, how torchrun is run and told of a stop,
the exclude list, and which exit code the run has left in ``status.json``.

Lines of bash start this program, because ``launch.setup`` may bring its interpreter.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from cluster.launch.engines import engine_named
from cluster.launch.job import EXIT_BAD_INPUT, STATUS_FILE, EngineJob, one_line
from cluster.members import EXCLUDE_LIST, node_name, read_exclusions
from parallel.version import VERSION


def node_script(
    job: EngineJob, words: Sequence[str], *, before: Sequence[str] = (), burn_in: bool = False
) -> str:
    """Lines of bash that end as this program.

    Args:
        job: its ``launch.setup`` comes first, and its interpreter runs the program.
        words: ENGINE, JOB and more, each as bash reads it: words may have variables.
        before: lines in front of the setup.
        burn_in: whether ``launch.burn_in`` is run here too, after the setup.
    """
    python = shlex.quote(job.python)
    refusal = shlex.quote(
        f"has no convoy-moe {job.version} for {job.python}: use an image, or an environment, of "
        f"that version"
    )
    lines = [
        *before,
        *job.launch.setup,
        f"{python} -c 'import cluster.launch.node' 2>/dev/null || {{",
        f'    echo "error: node $(hostname)" {refusal} >&2; exit {EXIT_BAD_INPUT}; }}',
        *([job.launch.burn_in] if burn_in and job.launch.burn_in else []),
        f"exec {python} -m cluster.launch.node {' '.join(words)}",
    ]
    return "\n".join(lines)


def job_variable(job: EngineJob) -> str:
    """Lines of bash that put the job, as this program reads it, into the variable ``job``."""
    return f"read -r -d '' job <<'END_OF_JOB'\n{job.for_nodes()}\nEND_OF_JOB"


def torchrun_words(
    job: EngineJob, endpoint: str, run_id: str, *, is_host: bool | None = None
) -> list[str]:
    """The command line of torchrun on one node.

    Args:
        job: what ranks run.
        endpoint: HOST:PORT of the rendezvous.
        run_id: equal on all nodes of one start, and of no other start.
        is_host: whether this node serves the rendezvous; None lets torchrun find out.
    """
    least, most = job.nodes
    launch = job.launch
    conf = {} if is_host is None else {"is_host": str(int(is_host))}
    conf["run_dir"] = job.run_dir
    if job.has_local_checkpoints or launch.rendezvous.get("scale_up") == "at_checkpoint":
        conf["checkpoints"] = job.checkpoints
    conf |= {key: value for key, value in launch.rendezvous.items() if key != "endpoint"}
    return [
        job.python, "-m", "torch.distributed.run", f"--nnodes={least}:{most}",
        f"--nproc-per-node={launch.ranks_per_node}", f"--max-restarts={launch.max_restarts}",
        "--rdzv-backend=convoy", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}",
        "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in conf.items()),
        *job.rank_words,
    ]  # fmt: skip


def say_start(words: Sequence[str]) -> None:
    """Say what this node starts, as a person would type it."""
    print(f"node {node_name()} starts {shlex.join(words)}", flush=True)


def run_launcher(words: Sequence[str], *, forward_stop: bool) -> int:
    """Run torchrun to its end; returns its exit code, as a shell counts it.

    SIGTERM does not end this process: torchrun lets ranks finish a step and commit a checkpoint.

    Args:
        words: the command line.
        forward_stop: pass SIGTERM on to torchrun. False where the engine signals every process of
            a node itself: torchrun takes a second signal as a reason to hurry.
    """
    launchers: list[subprocess.Popen[bytes]] = []
    stops: list[int] = []

    def on_stop(number: int, frame: FrameType | None) -> None:
        stops.append(number)
        if forward_stop and launchers:
            launchers[0].send_signal(number)

    former = signal.signal(signal.SIGTERM, on_stop)
    try:
        say_start(words)
        launchers.append(subprocess.Popen(words))
        if forward_stop and stops:  # it came before there was a process
            launchers[0].send_signal(stops[0])
        code = launchers[0].wait()
    finally:
        signal.signal(signal.SIGTERM, former)
    return code if code >= 0 else 128 - code


def make_mark(job: EngineJob, name: str) -> Path:
    """A new file in RUN_DIR/launch, which names the ``status.json`` of the moment: the run writes
    another one in this start. No clock is asked, which may have been set back meanwhile.

    Raises ValueError where the folder cannot be written.
    """
    mark = Path(job.run_dir, "launch", f"start-{name}")
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(_version(Path(job.run_dir, STATUS_FILE)))
    except OSError as error:
        raise ValueError(f"{mark} cannot be written: {error.strerror}") from None
    return mark


def _version(path: Path) -> str:
    """Differs for each file that was ever there; empty where none is there."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_ino} {status.st_mtime_ns} {status.st_size}"


def status_since(job: EngineJob, mark: Path) -> dict[str, Any] | None:
    """What rank 0 has written to ``status.json`` since the mark was made; None where it has not.

    Its ``exit_code`` is the run's, which torchrun hides behind 1; it is None while the run goes on.
    """
    path = Path(job.run_dir, STATUS_FILE)
    try:
        if _version(path) == mark.read_text():
            return None
        status: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:  # no JSON
        return {"exit_code": None}
    return status


def excluded_nodes(job: EngineJob) -> list[str]:
    """The nodes of the run's exclude list, as it is now. Raises ValueError where it is no list."""
    return [exclusion.node for exclusion in read_exclusions(Path(job.run_dir, EXCLUDE_LIST))]


def complain(text: str) -> None:
    """One line for people on standard error."""
    print(f"error: {text}", file=sys.stderr, flush=True)


def main(words: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    engine, text, *more = words
    if not text.lstrip().startswith("{"):
        text = Path(text).read_text()
    version = json.loads(text)["version"]  # before another version's fields are read
    if version != VERSION:
        complain(
            f"node {node_name()} has version {VERSION} of convoy-moe, and the launch is of "
            f"{version}: use an image, or an environment, of that version"
        )
        return EXIT_BAD_INPUT
    try:
        return engine_named(engine).on_node(EngineJob.model_validate_json(text), *more)
    except ValueError as error:
        complain(f"node {node_name()}: {one_line(str(error))}")
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
