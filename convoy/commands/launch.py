"""``convoy launch``: a run on the engine of a cluster."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.commands.parsing import SPEC, Command, argument, flag, overrides
from pretrain.errors import InputError
from pretrain.observe import say

if TYPE_CHECKING:
    from cluster.launch import Engine, EngineJob
    from pretrain.spec import JobSpec

_FIRST_START_SECONDS, _FIRST_SAVE_SECONDS = 120.0, 60.0
"""For a start (images, imports, the corpus) and for a checkpoint, before one was measured; the
second as the run itself reserves."""

_LOCAL = {
    "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "rootfs", "squashfs", "tmpfs",
    "vfat", "xfs", "zfs",
}  # fmt: skip
"""File systems of one machine. The others are taken for shared: NFS, Lustre, GPFS, CephFS ..."""

_EPILOG = """\
examples:
  convoy launch spec.toml --on slurm                        # print the job
  convoy launch spec.toml --on slurm --submit               # print and submit it
  convoy launch spec.toml --on slurm --set launch.nodes=2:4 --set elastic.enabled=true
  convoy launch spec.toml --on kubernetes --output job.yaml
  convoy launch spec.toml --on torchrun --submit            # train on this machine

The section [launch] of the spec says what the engine is asked for. docs/cluster.md has each engine
from one machine to many. Nothing is submitted without --submit.

exit codes:
  0  the job was printed, or submitted. On torchrun and on Ray --submit becomes the launcher, which
     ends with its own exit code
  2  the spec cannot be used, the engine is not there, or the engine refuses; nothing runs
  75 stopped
"""


def _launch(args: argparse.Namespace) -> int:
    from cluster.launch import engine_named
    from pretrain.spec import load_spec

    engine = engine_named(args.engine)
    spec = load_spec(args.spec, args.overrides)
    job = make_job(spec, args.spec, args.overrides, engine)
    text = engine.render(job)
    if args.submit:
        if not args.shared_folders:
            check_folders(job, engine)
        engine.check(job)
        check_prepared(spec, args.spec, engine)
    if args.output is not None:
        try:
            args.output.write_text(text)
        except OSError as error:
            raise InputError(f"--output ({args.output}): {error.strerror}") from None
    else:
        say(text.removesuffix("\n"))
    if args.submit:
        sys.stdout.flush()
        number = engine.submit(job, text)
        for line in engine.submitted(job, number):
            say(line)
    return 0


def make_job(spec: JobSpec, path: Path, overrides: Sequence[str], engine: Engine) -> EngineJob:
    """The job of a spec for an engine. Raises InputError where the spec does not allow it.

    Args:
        spec: read from ``path`` with ``overrides``.
        path: the file of the spec.
        overrides: ``SECTION.FIELD=VALUE``.
        engine: which starts it.
    """
    from cluster.launch import EngineJob
    from cluster.members import EXCLUDE_LIST, read_exclusions
    from parallel.version import VERSION
    from pretrain.spec import resolve_spec

    launch = spec.launch
    more = _engine_overrides(spec, engine)
    base = Path(launch.workdir or engine.container_workdir or Path.cwd())
    notes = [f"{spec.name}: {line}" for line in _layouts(spec)]
    run_dir = base / spec.run_path
    check_walltime(spec, run_dir)
    checkpoints = spec.checkpoint_path
    if isinstance(checkpoints, Path):
        checkpoints = base / checkpoints
    check_image(launch.image, VERSION)
    if not engine.brings_spec:
        check_same_file(path, base)
    return EngineJob(
        launch=launch.model_copy(
            update={
                "workdir": str(base),
                "python": launch.python or ("python3" if launch.image else sys.executable),
            }
        ),
        name=spec.name,
        version=VERSION,
        program=("-m", "convoy", "pretrain"),
        config=str(base / path),
        overrides=tuple(word for override in [*overrides, *more] for word in ("--set", override)),
        config_text=_table_lines(resolve_spec(spec.as_dict(), "[launch]", more).as_dict()),
        run_dir=str(run_dir),
        checkpoints=str(checkpoints),
        folders=tuple(sorted({str(folder) for folder in _data_folders(spec, base)})),
        excluded=tuple(exclusion.node for exclusion in read_exclusions(run_dir / EXCLUDE_LIST)),
        metrics_port=spec.metrics.port if spec.metrics.port > 0 else None,
        notes=tuple(notes),
    )


def _table_lines(tables: dict[str, Any]) -> str:
    """A spec as JSON with a line for each table."""
    lines = (f" {json.dumps(name)}: {json.dumps(table)}" for name, table in tables.items())
    return "{\n" + ",\n".join(lines) + "\n}"


def _data_folders(spec: JobSpec, base: Path) -> Iterator[Path]:
    """The folders of corpora, of the tokenizer and of initial weights, where they are folders."""
    from corpus.config import is_remote

    data = spec.data
    paths = [data.path, data.source]
    paths += [path for source in data.sources.values() for path in (source.path, source.source)]
    paths += [path for scored in data.validation.values() for path in (scored.path, scored.source)]
    files = [data.tokenizer, spec.init.checkpoint]
    for path in filter(None, paths):
        if not is_remote(path) and (base / path).is_dir():
            yield base / path
    for file in filter(None, files):
        if not is_remote(file) and (base / file).exists():
            yield (base / file).parent


def check_prepared(spec: JobSpec, path: Path, engine: Engine) -> None:
    """Refuse a job whose ranks would find no corpus: ranks prepare none.

    Raises InputError. Folders of containers, object stores, and folders that this machine does not
    see are not looked at. A launch of one process prepares the corpus itself.
    """
    from corpus.config import is_remote
    from corpus.manifest import MANIFEST

    launch = spec.launch
    if engine.container_workdir is not None or launch.image:
        return
    if launch.max_nodes * launch.ranks_per_node == 1:
        return
    data, base = spec.data, Path(spec.launch.workdir or Path.cwd())
    for corpus in (*data.each_source.values(), *data.each_validation.values()):
        if is_remote(corpus.path):
            continue
        folder = base / corpus.path
        # Whether this machine sees where the folder would be: its parent, or the launch's folder.
        is_seen = folder.parent.is_dir() or (folder.is_relative_to(base) and base.is_dir())
        if is_seen and not (folder / MANIFEST).exists():
            raise InputError(
                f"data.path ({corpus.path}) has no prepared corpus yet, and ranks prepare none: "
                f"run convoy prepare {path} first"
            )


def _engine_overrides(spec: JobSpec, engine: Engine) -> list[str]:
    """What the engine makes necessary: the run itself keeps to a walltime that the engine does not
    tell it, and containers are asked for metrics from outside."""
    more = []
    limit, walltime = spec.train.time_limit_seconds, spec.launch.walltime_minutes
    if engine.tells_end:
        walltime = None
    if walltime is not None and (limit is None or limit > walltime * 60):
        more.append(f"train.time_limit_seconds={walltime * 60}")
    outside = engine.container_workdir is not None
    if outside and spec.metrics.port > 0 and spec.metrics.host == "127.0.0.1":
        more.append("metrics.host=0.0.0.0")
    return more


def _layouts(spec: JobSpec) -> list[str]:
    """The layouts on the fewest and the most nodes, for people. Raises InputError where there is
    none, or where the number of nodes may change and the layout may not."""
    from parallel.layout import count_ranks
    from pretrain.elastic import choose_layout

    launch = spec.launch
    least, most = launch.min_nodes, launch.max_nodes
    if least < most and not spec.elastic.enabled:
        raise InputError(
            f"launch.nodes ({launch.nodes}) needs elastic.enabled = true: other nodes have another "
            f"layout"
        )
    lines = []
    if spec.plan.cluster is not None:
        from convoy.plan import automatic

        world = most * launch.ranks_per_node
        plan = automatic(spec, world, launch.ranks_per_node)[1]
        return [f"{count_ranks(world)}: {plan.describe()}, by plan.cluster"]
    for nodes in dict.fromkeys((least, most)):
        world = nodes * launch.ranks_per_node
        where = f"{nodes} node{'s' if nodes > 1 else ''}, {count_ranks(world)}"
        if spec.elastic.enabled:
            choice = choose_layout(spec, world, launch.ranks_per_node)
            spares = f", {choice.spares} spare" if choice.spares else ""
            lines.append(f"{where}: {choice.topology.describe()}{spares}")
            continue
        topology = spec.topology(world)
        spec.check_nodes(topology, min(launch.ranks_per_node, world))
        lines.append(f"{where}: {topology.describe()}")
    return lines


def check_same_file(path: Path, workdir: Path) -> None:
    """Refuse a spec that ranks would not read, because they look for it below ``launch.workdir``.
    Nothing is refused where this machine does not see that folder."""
    there = workdir / path
    if not workdir.is_dir() or (there.is_file() and there.read_bytes() == path.read_bytes()):
        return
    raise InputError(
        f"launch.workdir ({workdir}): ranks read {there}, which must be the spec {path.absolute()}"
    )


def check_walltime(spec: JobSpec, run_dir: Path) -> None:
    """Refuse a walltime in which no checkpoint can be made. Starts and checkpoints in the log of
    ``run_dir`` are a measure; before there is any, 120 s and 60 s are."""
    from pretrain.observe import CheckpointCommitted, RunStarted, read_former

    walltime = spec.launch.walltime_minutes
    if walltime is None:
        return
    start, saves = _FIRST_START_SECONDS, []
    for line in read_former(run_dir / "log.jsonl"):
        match line.event:
            case RunStarted(start_seconds=parts):
                start = max(start, sum(parts.values()))
            case CheckpointCommitted(tier="shared", seconds=seconds):
                saves.append(seconds)
    save = max(saves, default=_FIRST_SAVE_SECONDS)
    if walltime * 60 < start + save:
        raise InputError(
            f"launch.walltime_minutes ({walltime:g}) must be at least "
            f"{(start + save) / 60:.1f}: a start takes {start:.0f} s and a checkpoint "
            f"{save:.0f} s, as measured in this run, or taken for granted before"
        )


def check_image(image: str | None, version: str) -> None:
    """Refuse an image whose tag does not have Convoy's version: ``latest`` changes between two
    starts of a run."""
    if image is None:
        return
    folder, slash, last = image.rpartition("/")
    name, _, tag = last.partition(":")
    if version not in re.split("[-_@+]", tag.removeprefix("v")):
        raise InputError(
            f"launch.image ({image}) must have the version of Convoy, {version}, in its tag: "
            f"{folder}{slash}{name}:{version}"
        )


def local_file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The type of the file system of ``path`` where it belongs to this machine alone; otherwise
    None. A path that does not exist yet is judged by the nearest folder above that does.

    Args:
        path: an absolute path.
        mounts: the table of mounted file systems; what has none, a Mac, is not judged.
    """
    kind_there, length = None, -1
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    while not path.exists() and path != path.parent:
        path = path.parent
    path = path.resolve()
    for line in lines:
        _device, where, kind, *_ = line.split()
        mount = Path(where.encode().decode("unicode_escape"))
        if path.is_relative_to(mount) and len(mount.parts) >= length:
            kind_there, length = kind, len(mount.parts)
    return kind_there if kind_there in _LOCAL else None


def check_folders(job: EngineJob, engine: Engine) -> None:
    """Refuse folders of this machine alone for a run on several."""
    if job.nodes[1] == 1 or engine.container_workdir:
        return
    folders = {"run_dir": job.run_dir}
    if job.has_local_checkpoints:
        folders["checkpoint.path"] = job.checkpoints
    for field, folder in folders.items():
        kind = local_file_system(Path(folder))
        if kind is not None:
            raise InputError(
                f"{field} ({folder}) is on {kind}, a file system of this machine alone: give a "
                f"folder that all nodes share, or --shared-folders where they do"
            )


main = Command(
    "convoy launch",
    "Render a run for Slurm, Ray, Kubernetes or torchrun, and submit it.",
    _EPILOG,
    [
        SPEC,
        overrides(),
        argument("--on", "ENGINE", "torchrun, slurm, ray, kubernetes, or package.module:Class for "
                 "an engine of your own", required=True, dest="engine"),
        flag("--submit", "submit the job too"),
        flag("--shared-folders", "say that all nodes share run_dir and checkpoint.path, where the "
             "type of their file system does not show it"),
        argument("--output", "FILE", "write the job to a file, and print nothing", type=Path),
    ],
    _launch,
    stopped="look whether the job was taken",
)  # fmt: skip
