"""Slurm: a job of sbatch, whose step has a torchrun on each node.

How a start ends decides about the next one: 0, 2 and 3 end the job; 75 puts the job back into the
queue; and after a lost rank the job goes back where the start has committed a checkpoint, so that
a run that cannot begin does not begin for ever. torchrun hides the exit code of the run, which
``status.json`` has.

A job of MIN:MAX nodes is told to live on without lost nodes (``--no-kill``): torchrun goes on with
those that are left. A job of a fixed number of nodes is put back into the queue by Slurm when a
node is lost. Both begin only with all of (at least MIN) nodes.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from cluster.launch.job import (
    EXIT_BAD_INPUT,
    EXIT_HEALTH,
    EXIT_TRY_AGAIN,
    STATUS_FILE,
    EngineJob,
    one_line,
)
from cluster.launch.torchrun import continued, exports, torchrun_words
from cluster.members import EXCLUDE_LIST

_TIMEOUT = 60.0
_FIRST_PORT, _PORTS = 20000, 10000
"""The rendezvous listens on a port that the number of the job gives."""

_FUNCTIONS = """\
excluded() {  # the nodes of the exclude list, with commas between
    python3 -c 'import json, sys
try: print(",".join(one["node"] for one in json.load(open(sys.argv[1]))["excluded"]))
except FileNotFoundError: pass' "$run_dir/@EXCLUDE_LIST@"
}
lost() {  # the nodes of this job that are on the list
    comm -12 <(excluded | tr , '\\n' | sort -u) \\
        <(scontrol show hostnames "$SLURM_JOB_NODELIST" | sort)
}
newest() { ls "$checkpoints/manifests" 2>/dev/null | grep '^step-.*[.]json$' | sort | tail -n 1; }
requeue() {  # start again, without the nodes of the exclude list
    local list; list=$(excluded)
    echo "job $SLURM_JOB_ID starts again: $1${list:+; without $list}"
    if [ -n "$list" ] && [ "$list" != "$CONVOY_EXCLUDED" ]; then
        # Slurm takes excluded nodes for waiting jobs alone: another job takes this one's place.
        scontrol write batch_script "$SLURM_JOB_ID" "$mark.sbatch" >/dev/null &&
        ( for name in ${!SLURM_@}; do [ "$name" = SLURM_CONF ] || unset "$name"; done
          CONVOY_EXCLUDED=$list sbatch --exclude="$list" "$mark.sbatch" ) && exit 0
        exit 1
    fi
    scontrol requeue "$SLURM_JOB_ID" && sleep 300
    exit 1
}
"""

_NODE = """\
# Ranks are numbered by the place of their nodes in the network.
export CONVOY_NODE_NAME=$SLURMD_NODENAME CONVOY_NODE_ORDER=$SLURM_TOPOLOGY_ADDR
@SETUP@
[ -e "$CONVOY_MARK" ] || {
    echo "error: node $SLURMD_NODENAME does not see $CONVOY_MARK: all nodes must share run_dir" >&2
    exit 2
}
@VERSION@
@TORCHRUN@
code=$?
# The batch script is gone with its node, and Slurm lets the other nodes wait for ever.
if [ $code != 0 ]; then
    for try in 1 2 3; do
        timeout 5 bash -c "exec 3<>/dev/tcp/$SLURM_SRUN_COMM_HOST/$SLURM_SRUN_COMM_PORT" \\
            2>/dev/null && exit $code
        sleep 2
    done
    echo "node $SLURMD_NODENAME: the node of the batch script is lost; the job starts again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""

_BATCH = """\
# Slurm sets SLURM_JOB_END_TIME since some version after 22.05.
if [ -z "$SLURM_JOB_END_TIME" ]; then
    end=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null) &&
        export SLURM_JOB_END_TIME=$end
fi
export CONVOY_MARK=$mark
mkdir -p "$run_dir/launch" @CHECKPOINTS@&& : > "$mark" || exit 2
before=$(newest)
echo "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST"
"""

_STEP = """\
nodes=$SLURM_JOB_NUM_NODES
for name in $(lost); do
    echo "$name is on the exclude list $run_dir/@EXCLUDE_LIST@"
    nodes=$((nodes - 1))
    [ "$name" = "$SLURMD_NODENAME" ] && requeue "the batch script is on $name"
done
[ "$nodes" -ge @LEAST@ ] || requeue "fewer than @LEAST@ nodes are left"
out=$(lost | paste -sd ,)
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 ${out:+--exclude="$out"} \\
    @FLAGS@bash -c "$node_script"
code=$?
"""

_END = """\
# What the run itself ended with, where its rank 0 has said so in this start.
if [ $code != 0 ] && [ "$run_dir/@STATUS_FILE@" -nt "$mark" ]; then
    code=$(python3 -c 'import json, sys
found = json.load(open(sys.argv[1]))["exit_code"]; print(1 if found is None else found)' \
        "$run_dir/@STATUS_FILE@" || echo 1)
fi
echo "job $SLURM_JOB_ID ends with exit code $code"
case $code in
    0) exit 0 ;;
    @BAD_INPUT@ | @HEALTH@) exit $code ;;
    @TRY_AGAIN@) requeue "the run was stopped and has committed a checkpoint" ;;
esac
[ "$(newest)" != "$before" ] && requeue "a rank or node was lost after $(newest)"
[ @URL@ = 1 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ] && requeue "a rank or node was lost"
echo "error: the start has committed no checkpoint, so the job is not started again" >&2
exit $code
"""


def _filled(text: str, **values: object) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return text


def render(job: EngineJob) -> str:
    """The file that sbatch takes; standard output is in RUN_DIR/launch."""
    least = job.nodes[0]
    names = {
        "EXCLUDE_LIST": EXCLUDE_LIST, "STATUS_FILE": STATUS_FILE, "LEAST": least,
        "BAD_INPUT": EXIT_BAD_INPUT, "HEALTH": EXIT_HEALTH, "TRY_AGAIN": EXIT_TRY_AGAIN,
        "URL": int(not job.has_local_checkpoints),
    }  # fmt: skip
    node = _filled(
        _NODE,
        SETUP="\n".join(job.launch.setup),
        VERSION=job.version_check,
        TORCHRUN=continued(
            torchrun_words(
                job, '"$CONVOY_ENDPOINT"', '"$CONVOY_START"', {"is_host": "$((SLURM_NODEID == 0))"}
            )
        ),
    )
    flags = _step_flags(job)
    parts = [
        "\n".join(
            [
                "#!/bin/bash",
                *job.head(),
                f"# before sbatch   mkdir -p {shlex.quote(job.run_dir)}/launch",
                *(f"#SBATCH {option}" for option in _options(job)),
            ]
        ),
        "\n".join(
            [
                f"run_dir={shlex.quote(job.run_dir)} checkpoints={shlex.quote(job.checkpoints)}",
                "mark=$run_dir/launch/start-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}",
            ]
        ),
        _filled(_FUNCTIONS, **names).rstrip(),
        "\n".join(
            [
                *exports(job),
                *([f"cd {shlex.quote(job.workdir)} || exit 2"] if job.workdir else []),
                _filled(_BATCH, CHECKPOINTS='"$checkpoints" ' * job.has_local_checkpoints).rstrip(),
                f"port=$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))",
                'export CONVOY_ENDPOINT="$(hostname):$port"',
                'export CONVOY_START="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
            ]
        ),
        f"read -r -d '' node_script <<'END_OF_NODE_SCRIPT'\n{node}END_OF_NODE_SCRIPT",
        _burn_in(job, flags),
        _filled(
            _STEP, FLAGS=" ".join([*flags, *["--no-kill"] * job.is_elastic]) + " ", **names
        ).rstrip(),
        _filled(_END, **names),
    ]
    return "\n\n".join(part for part in parts if part)


def _step_flags(job: EngineJob) -> list[str]:
    """What srun is told for the burn-in and for the run: a step takes no cores from the job."""
    flags = [f"--cpus-per-task={job.cpus_per_node}", "--kill-on-bad-exit=0"]
    if job.launch.image is not None:
        # The scripts' folders are those of the nodes, in the container too.
        folders = {job.workdir, job.run_dir, str(Path(job.config).parent), *job.folders} - {""}
        if job.has_local_checkpoints:
            folders.add(job.checkpoints)
        mounts = [
            folder for folder in sorted(folders)
            if not folders.intersection(map(str, Path(folder).parents))
        ]  # fmt: skip
        flags += [
            f"--container-image={shlex.quote(job.launch.image)}",
            "--container-mounts=" + ",".join(f"{path}:{path}" for path in mounts),
        ]
    return flags


def _options(job: EngineJob) -> list[str]:
    least, most = job.nodes
    options = [
        f"--job-name={job.name}",
        # Without a number of tasks: Slurm would take it from MIN, and never give more nodes.
        f"--nodes={least}" if least == most else f"--nodes={least}-{most}",
        f"--cpus-per-task={job.cpus_per_node}",
        "--requeue",
        "--open-mode=append",
        f"--output={job.run_dir}/launch/slurm-%j.txt",
    ]
    if job.launch.gpus_per_node:
        options.append(f"--gpus-per-node={job.launch.gpus_per_node}")
    if job.is_elastic:
        options.append("--no-kill")
    if job.launch.walltime_minutes is not None:
        seconds = math.floor(job.launch.walltime_minutes * 60)
        options.append(f"--time={seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}")
    if job.launch.queue is not None:
        options.append(f"--partition={job.launch.queue}")
    if job.launch.switches is not None:
        options.append(f"--switches={job.launch.switches}")
    if job.launch.segment is not None:
        options.append(f"--segment={job.launch.segment}")
    if job.excluded:
        options.append("--exclude=" + ",".join(job.excluded))
    return options + list(job.launch.options)


def _burn_in(job: EngineJob, flags: list[str]) -> str:
    """Every node runs the line once; a node whose line fails is put on the exclude list by it."""
    if job.launch.burn_in is None:
        return ""
    named = "export CONVOY_NODE_NAME=$SLURMD_NODENAME"  # as Slurm and the exclude list name nodes
    quoted = shlex.quote("\n".join([named, *job.launch.setup, job.launch.burn_in]))
    return (
        "# Burn-in: each node runs this line once, and may put itself on the exclude list.\n"
        f"srun --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 {' '.join(flags)} \\\n"
        f"    bash -c {quoted}"
    )


def check(job: EngineJob) -> None:
    """Refuse what Slurm cannot start. Raises ValueError: one line."""
    for program in ("sbatch", "sinfo", "srun"):
        if shutil.which(program) is None:
            raise ValueError(
                f"--on slurm needs the program {program}, which is not installed on this machine: "
                f"run convoy launch on a login node"
            )
    launch = job.launch
    if launch.image is not None and "--container-image" not in _run(["srun", "--help"]).stdout:
        raise ValueError(
            f"launch.image ({launch.image}) needs pyxis, which this Slurm lacks: srun has no option "
            f"--container-image"
        )
    # %D nodes, %c CPUs of a node, %G generic resources, %l longest time of the partition.
    words = ["sinfo", "--noheader", "--format=%R|%D|%c|%G"]
    if job.launch.queue is not None:
        words.append(f"--partition={job.launch.queue}")
    ended = _run(words)
    if ended.returncode:
        raise ValueError(f"sinfo failed: {one_line(ended.stderr or ended.stdout)}")
    rows = [line.split("|") for line in ended.stdout.splitlines() if line]
    if not rows:
        raise ValueError(f"launch.queue ({job.launch.queue}): Slurm has no such partition")
    job.check_cpus(max(int(row[2].rstrip("+")) for row in rows), "a node")
    gpus = max((_gpus(row[3]) for row in rows), default=0)
    if launch.gpus_per_node > gpus:
        raise ValueError(
            f"launch.gpus_per_node ({launch.gpus_per_node}) must not be above the {gpus} GPUs of a "
            f"node"
        )


def _gpus(resources: str) -> int:
    """The GPUs in what sinfo says of a node: ``gpu:h100:8(S:0-1),nic:2``."""
    found = re.findall(r"gpu(?::[^:,(]+)*?:(\d+)", resources)
    return sum(map(int, found))


def submit(job: EngineJob, text: str) -> str:
    """Give the file to sbatch; returns the number of the job. Raises ValueError where Slurm refuses
    it; nothing runs then: sbatch takes a job as a whole or not at all."""
    check(job)
    folder = Path(job.run_dir, "launch")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.sbatch"
    path.write_text(text)
    asked = _run(["sbatch", "--test-only", str(path)])
    if asked.returncode:
        raise ValueError(f"Slurm refuses the job: {_refusal(asked.stderr)}")
    ended = _run(["sbatch", "--parsable", str(path)])
    if ended.returncode:
        raise ValueError(f"Slurm refuses the job: {_refusal(ended.stderr)}")
    return ended.stdout.strip().partition(";")[0]


def _refusal(text: str) -> str:
    return one_line(text).removeprefix("sbatch: ").removeprefix("error: ").removeprefix(
        "allocation failure: "
    )  # fmt: skip


def submitted(job: EngineJob, number: str) -> list[str]:
    """Lines for people about a job that waits or runs."""
    return [
        f"submitted job {number}",
        f"output       {job.run_dir}/launch/slurm-{number}.txt",
        f"queue        squeue -j {number}",
        f"stop         scancel {number}",
    ]


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    # sbatch gives its environment to the job, and Slurm's own names may be of another job.
    foreign = ("SLURM_", "SBATCH_", "SRUN_", "CONVOY_")
    own = {k: v for k, v in os.environ.items() if not k.startswith(foreign) or k == "SLURM_CONF"}
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT, env=own)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{words[0]} did not answer within {_TIMEOUT:.0f} s: is slurmctld up?"
        ) from None
