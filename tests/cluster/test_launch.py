"""Jobs as text: what each engine is told, without an engine."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from cluster.launch import (
    ENGINES,
    EngineJob,
    KubernetesConfig,
    LaunchConfig,
    job,
    kubernetes,
    local_file_system,
    slurm,
)
from cluster.launch.kubernetes import node_script
from cluster.launch.slurm import _gpus
from cluster.members.rendezvous import MembersHandler, convoy_rendezvous, natural
from pretrain import errors
from pretrain.observe import status

JOB = EngineJob(
    launch=LaunchConfig(
        nodes="2:4",
        ranks_per_node=8,
        gpus_per_node=8,
        walltime_minutes=90.5,
        queue="batch",
        image="registry/convoy:0.1.0",
        workdir="/shared",
        environment={"NCCL_DEBUG": "WARN", "TEXT": "a 'b' $c"},
        setup=["module load cuda"],
        burn_in="convoy-burn-in",
    ),
    name="run",
    version="0.1.0",
    program=("-m", "convoy", "pretrain"),
    config="/shared/spec.toml",
    overrides=("--set", 'data.source="a b"'),
    config_text='{"name": "run"}',
    run_dir="/shared/my runs/run",
    checkpoints="/shared/my runs/run/checkpoints",
    excluded=("bad-1", "bad-2"),
    metrics_port=9400,
)


def changed(job: EngineJob, **values: Any) -> EngineJob:
    """The job with other values of its own, of ``launch``, or of ``launch.kubernetes``."""
    launch = job.launch
    pods = {key: values.pop(key) for key in list(values) if key in KubernetesConfig.model_fields}
    asked = {key: values.pop(key) for key in list(values) if key in LaunchConfig.model_fields}
    asked["kubernetes"] = launch.kubernetes.model_copy(update=pods)
    values["launch"] = LaunchConfig.model_validate(dict(launch) | asked)
    return EngineJob.model_validate(dict(job) | values)


def test_engines_and_runs_mean_the_same_exit_codes_and_files():
    """``cluster`` may not import ``pretrain``, so each names these."""
    assert (job.EXIT_BAD_INPUT, job.EXIT_HEALTH, job.EXIT_TRY_AGAIN) == (
        errors.EXIT_BAD_INPUT, errors.EXIT_HEALTH, errors.EXIT_TRY_AGAIN
    )  # fmt: skip
    assert job.STATUS_FILE == status.STATUS_FILE
    found = subprocess.run(
        [sys.executable, "-c", job.PRINT_VERSION], capture_output=True, text=True
    )
    assert found.stdout.strip() == version("convoy-moe")


def bash_words(script: str, variables: dict[str, str]) -> list[str]:
    """The words of the line of ``script`` that starts torchrun, as bash reads them."""
    lines = script.replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if "torch.distributed.run" in line]
    line = line.removeprefix("exec ").removesuffix("&")
    shown = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {line}"],
        env=os.environ | variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return shown.stdout.splitlines()


VARIABLES = {
    "CONVOY_ENDPOINT": "n1:20017", "CONVOY_START": "17-0", "SLURM_NODEID": "0",
    "JOB_COMPLETION_INDEX": "1",
}  # fmt: skip


@pytest.mark.parametrize("engine", ["torchrun", "slurm", "kubernetes"])
def test_torchrun_gets_nodes_ranks_and_words_as_they_are(engine):
    text = node_script(JOB) if engine == "kubernetes" else ENGINES[engine].render(JOB)
    words = bash_words(text, VARIABLES)
    assert words[:3] == ["python3", "-m", "torch.distributed.run"]
    assert "--nnodes=2:4" in words
    assert "--nproc-per-node=8" in words
    conf = next(word for word in words if word.startswith("--rdzv-conf="))
    assert "run_dir=/shared/my runs/run," in conf
    pods = engine == "kubernetes"
    assert words[-1 if pods else -3] == ("/etc/convoy/spec.json" if pods else "/shared/spec.toml")
    if not pods:
        assert words[-1] == 'data.source="a b"'
    hosts = {"slurm": "is_host=1", "kubernetes": "is_host=0"}
    assert hosts.get(engine, "") in conf


@pytest.mark.parametrize("engine", ["torchrun", "slurm"])
def test_a_script_is_bash_and_sets_the_environment(engine, tmp_path):
    text = ENGINES[engine].render(JOB)
    path = tmp_path / "job"
    path.write_text(text)
    assert subprocess.run(["bash", "-n", path], capture_output=True).stderr == b""
    exported = [line for line in text.splitlines() if line.startswith("export ")]
    shown = subprocess.run(
        ["bash", "-c", "\n".join([*exported[:5], "env -0"])], capture_output=True, text=True
    ).stdout.split("\0")
    assert "TEXT=a 'b' $c" in shown
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in shown


def options(job: EngineJob) -> list[str]:
    lines = ENGINES["slurm"].render(job).splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def test_slurm_is_asked_for_what_the_job_says():
    found = options(changed(JOB, switches=1, options=["--account=mine"]))
    for option in (
        "--nodes=2-4", "--cpus-per-task=8", "--gpus-per-node=8", "--time=1:30:30", "--requeue",
        "--partition=batch", "--no-kill", "--exclude=bad-1,bad-2", "--switches=1", "--account=mine",
    ):  # fmt: skip
        assert option in found
    fixed = changed(JOB, nodes=4, walltime_minutes=None, queue=None, excluded=())
    assert "--nodes=4" in options(fixed)
    assert not {"--no-kill", "--partition", "--time", "--exclude"} & {
        option.partition("=")[0] for option in options(fixed)
    }


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [("(null)", 0), ("gpu:8", 8), ("gpu:h100:8(S:0-1),nic:2", 8), ("gpu:a:4,gpu:b:2", 6)],
)
def test_gpus_of_a_node_are_read_from_sinfo(resources, gpus):
    assert _gpus(resources) == gpus


def test_the_program_for_ray_is_python_and_has_the_spec():
    tree = ast.parse(ENGINES["ray"].render(JOB))
    (text,) = [
        node.value.args[0].value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "JOB"
    ]
    facts = json.loads(text)
    assert facts["workers"] == [16, 32]
    assert facts["resources"] == {"CPU": 1, "GPU": 1}
    assert facts["config"] == {"name": "run"}
    assert facts["environment"]["TEXT"] == "a 'b' $c"


def test_objects_of_kubernetes_survive_yaml():
    from cluster.launch.kubernetes import objects

    for kind in ("TrainJob", "JobSet"):
        job = changed(JOB, kind=kind, volume_claim="data", topology_label="rack")
        assert list(yaml.safe_load_all(ENGINES["kubernetes"].render(job))) == objects(job)


def test_a_local_file_system_is_told_from_a_shared_one(tmp_path):
    (tmp_path / "in memory").mkdir()
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/sda / ext4 rw 0 0\nserver:/a {tmp_path} nfs4 rw 0 0\n"
        f"tmpfs {tmp_path}/in\\040memory tmpfs rw 0 0\n"
    )
    assert local_file_system(tmp_path / "runs" / "new", mounts) is None
    assert local_file_system(tmp_path / "in memory" / "x", mounts) == "tmpfs"
    assert local_file_system(Path("/elsewhere/x"), mounts) == "ext4"


def test_numbers_in_the_places_of_nodes_are_numbers():
    places = ["rack10.n1", "rack2.n9", "rack2.n10", "", "n2", "n10"]
    ordered = ["", "n2", "n10", "rack2.n9", "rack2.n10", "rack10.n1"]
    assert sorted(places, key=natural) == ordered


class Joined:
    """A rendezvous in which machine ``rank`` has joined ``world`` machines."""

    def __init__(self, store: HashStore, rank: int, world: int) -> None:
        self.info = RendezvousInfo(store, rank, world, RendezvousStoreInfo("first", 1))

    def next_rendezvous(self) -> RendezvousInfo:
        return self.info


def test_machines_of_one_rack_get_ranks_that_follow_each_other(monkeypatch):
    """Six machines join in an order that mixes two racks."""
    places = ["rack2.n1", "rack1.n10", "rack2.n0", "rack1.n9", "rack1.n2", "rack2.n11"]
    store, found = HashStore(), {}
    # Each thread is a machine; the environment belongs to all threads.
    seen = threading.local()
    monkeypatch.setattr("cluster.members.rendezvous.node_place", lambda: seen.place, raising=True)

    def machine(rank: int) -> None:
        seen.place = places[rank]
        handler = MembersHandler(Joined(store, rank, 6), "at_once", local_addr=f"host-{rank}")
        found[rank] = handler.next_rendezvous()

    threads = [threading.Thread(target=machine, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [found[rank].rank for rank in range(6)] == [4, 2, 3, 1, 0, 5]
    # The machine of the first rank serves the store of the ranks.
    assert {info.bootstrap_store_info.master_addr for info in found.values()} == {"host-4"}
    assert len({info.bootstrap_store_info.master_port for info in found.values()}) == 1


def test_a_job_without_places_keeps_torchruns_order():
    store = HashStore()
    store.set("node-order/1", json.dumps(""))
    handler = MembersHandler(Joined(store, 0, 2), "at_once")
    info = handler.next_rendezvous()
    assert info.rank == 0
    assert info.bootstrap_store_info.master_addr == "first"


def test_the_head_says_where_the_log_is():
    for engine in ENGINES:
        head = ENGINES[engine].render(JOB).splitlines()[:8]
        assert any("my runs/run/log.jsonl" in line for line in head), engine
        assert any(f"convoy status {shlex.quote(JOB.run_dir)}" in line for line in head), engine


def test_a_container_has_every_folder_of_the_run_and_of_the_burn_in():
    job = changed(JOB, checkpoints="/lustre/ck", folders=("/data/corpus", "/shared/corpora"))
    text = ENGINES["slurm"].render(job).replace("\\\n", " ")
    steps = [line for line in text.splitlines() if line.startswith("srun ")]
    assert len(steps) == 2
    for line in steps:
        # /shared has the spec, the run and one corpus.
        mounts = "/data/corpus:/data/corpus,/lustre/ck:/lustre/ck,/shared:/shared"
        assert f"--container-mounts={mounts} " in line
        assert "--container-image=registry/convoy:0.1.0" in line
        assert "--cpus-per-task=8" in line
    assert "CONVOY_NODE_NAME=$SLURMD_NODENAME" in steps[0], "as the exclude list names nodes"
    in_store = ENGINES["slurm"].render(changed(JOB, checkpoints="s3://bucket/ck"))
    assert "s3://bucket/ck:" not in in_store


@pytest.mark.parametrize(("code", "found"), [(0, "0"), (75, "75"), (None, "1")])
@pytest.mark.parametrize("engine", ["slurm", "kubernetes"])
def test_the_exit_code_of_the_run_is_read_as_it_is(engine, code, found, tmp_path):
    """A run that is done has 0, which is no failure of the job; null is a run that goes on."""
    text = node_script(JOB) if engine == "kubernetes" else ENGINES["slurm"].render(JOB)
    program = re.search(r"python3 -c '(import json, sys\nfound = [^']*)'", text).group(1)
    (tmp_path / "status.json").write_text(json.dumps({"exit_code": code}))
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "status.json"], capture_output=True, text=True
    )
    unknown = "1" if engine == "slurm" else ""
    assert ended.stdout.strip() == (unknown if code is None else found)


def test_what_a_shell_has_from_another_job_does_not_go_into_a_job(monkeypatch):
    for name in ("SLURM_CPUS_PER_TASK", "SBATCH_PARTITION", "CONVOY_EXCLUDED"):
        monkeypatch.setenv(name, "other")
    monkeypatch.setenv("SLURM_CONF", "/etc/mine.conf")
    seen = slurm._run(["env"]).stdout.splitlines()
    names = {line.partition("=")[0] for line in seen}
    assert not names & {"SLURM_CPUS_PER_TASK", "SBATCH_PARTITION", "CONVOY_EXCLUDED"}
    assert {"SLURM_CONF=/etc/mine.conf", f"PATH={os.environ['PATH']}"} <= set(seen)


def test_what_the_api_may_have_made_is_deleted_too(monkeypatch):
    """The API has made the object, and kubectl has given up before the answer."""
    deleted = []

    def kubectl(words, one):
        if words[0] == "delete":
            deleted.append(one["kind"])
        late = words[0] == "create" and len(words) == 3 and one["kind"] == "TrainJob"
        return "kubectl did not answer within 120 s" if late else ""

    monkeypatch.setattr(kubernetes, "_kubectl", kubectl)
    monkeypatch.setattr(kubernetes, "check", lambda job: None)
    with pytest.raises(ValueError, match="did not answer within 120 s; nothing is left running"):
        kubernetes.submit(JOB, "")
    assert deleted == ["TrainJob", "TrainingRuntime", "ConfigMap"]


def test_machines_that_wait_for_a_checkpoint_need_a_folder_to_look_into():
    job = changed(JOB, checkpoints="s3://bucket/ck", rendezvous={"scale_up": "at_checkpoint"})
    words = bash_words(ENGINES["torchrun"].render(job), VARIABLES)
    (conf,) = [word.removeprefix("--rdzv-conf=") for word in words if "--rdzv-conf" in word]
    config = dict(each.split("=", 1) for each in conf.split(","))
    parameters = RendezvousParameters("convoy", "h:1", "run", 2, 4, **config)
    with pytest.raises(ValueError, match="must be at_once or never with checkpoints in an object"):
        convoy_rendezvous()(parameters)


def test_a_pod_on_an_excluded_node_waits_for_the_end_of_the_run(tmp_path):
    """A pod that failed there would come back there, until the job has failed too often."""
    excluded = {"excluded": [{"node": "bad-1", "reason": "slow", "time": ""}]}
    (tmp_path / "exclude.json").write_text(json.dumps(excluded))
    job = changed(
        JOB, run_dir=str(tmp_path), setup=[], burn_in=None, python=sys.executable,
        version=version("convoy-moe"),
    )  # fmt: skip
    environment = os.environ | {
        "JOB_COMPLETION_INDEX": "1", "HOSTNAME": "pod", "CONVOY_NODE_NAME": "bad-1",
    }  # fmt: skip
    with subprocess.Popen(
        ["bash", "-c", node_script(job)], env=environment, stdout=subprocess.PIPE, text=True
    ) as pod:
        assert "bad-1 is on the exclude list" in pod.stdout.readline()
        past = (tmp_path / "launch" / "start-pod").stat().st_mtime + 10
        (tmp_path / "status.json").write_text('{"exit_code": 0}')
        os.utime(tmp_path / "status.json", (past, past))
        assert pod.wait(timeout=60) == 0
