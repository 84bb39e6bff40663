"""Jobs as text: what each engine is told, without an engine."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import threading
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
    Engine,
    EngineJob,
    KubernetesConfig,
    LaunchConfig,
    engine_named,
    job,
    kubernetes,
    slurm,
)
from cluster.launch.node import torchrun_words
from cluster.launch.slurm import _gpus
from cluster.launch.slurm_job import step_flags
from cluster.launch.testing import EngineContract
from cluster.members.rendezvous import MembersHandler, convoy_rendezvous, natural
from convoy.commands.launch import local_file_system
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


def test_torchrun_gets_nodes_ranks_and_words_as_they_are():
    words = torchrun_words(JOB, "n1:29400", "17-0", is_host=True)
    assert words == [
        "python3", "-m", "torch.distributed.run", "--nnodes=2:4", "--nproc-per-node=8",
        "--max-restarts=100", "--rdzv-backend=convoy", "--rdzv-endpoint=n1:29400",
        "--rdzv-id=17-0",
        "--rdzv-conf=is_host=1,run_dir=/shared/my runs/run,"
        "checkpoints=/shared/my runs/run/checkpoints",
        "-m", "convoy", "pretrain", "/shared/spec.toml", "--set", 'data.source="a b"',
    ]  # fmt: skip
    job = changed(
        JOB, checkpoints="s3://bucket/ck", rendezvous={"endpoint": "n1:1", "last_call_timeout": "3"}
    )
    (conf,) = [word for word in torchrun_words(job, "n1:1", "a") if "conf=" in word]
    assert conf == "--rdzv-conf=run_dir=/shared/my runs/run,last_call_timeout=3"


@pytest.mark.parametrize("engine", ["torchrun", "slurm"])
def test_a_script_is_bash_and_sets_the_environment(engine, tmp_path):
    text = engine_named(engine).render(JOB)
    path = tmp_path / "job"
    path.write_text(text)
    assert subprocess.run(["bash", "-n", path], capture_output=True).stderr == b""
    exported = [line for line in text.splitlines() if line.startswith("export ")]
    shown = subprocess.run(
        ["bash", "-c", "\n".join([*exported[:5], "env -0"])], capture_output=True, text=True
    ).stdout.split("\0")
    assert "TEXT=a 'b' $c" in shown
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in shown


class TestTorchrun(EngineContract):
    def make_engine(self) -> Engine:
        return engine_named("torchrun")


class TestSlurm(EngineContract):
    def make_engine(self) -> Engine:
        return engine_named("slurm")


class TestRay(EngineContract):
    def make_engine(self) -> Engine:
        return engine_named("ray")


class TestKubernetes(EngineContract):
    def make_engine(self) -> Engine:
        return engine_named("kubernetes")


def options(job: EngineJob) -> list[str]:
    lines = engine_named("slurm").render(job).splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def test_slurm_is_asked_for_what_the_job_says():
    found = options(changed(JOB, options=["--switches=1", "--account=mine"]))
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


def test_the_program_for_ray_is_python_and_has_job_and_spec():
    job = changed(JOB, name='a "name"', config_text='{"name": "a \\"name\\"", "x": ""}')
    tree = ast.parse(engine_named("ray").render(job))
    texts = {
        ast.unparse(node.targets[0]): node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
    }
    assert json.loads(texts["SPEC"]) == {"name": 'a "name"', "x": ""}
    assert EngineJob.model_validate_json(texts["JOB"]).all_environment == job.all_environment


def test_objects_of_kubernetes_survive_yaml():
    from cluster.launch.kubernetes import objects

    for kind in ("TrainJob", "JobSet"):
        job = changed(JOB, kind=kind, volume_claim="data", topology_label="rack")
        assert list(yaml.safe_load_all(engine_named("kubernetes").render(job))) == objects(job)


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
    assert set(ENGINES) == {"torchrun", "slurm", "ray", "kubernetes"}
    for engine in ENGINES:
        head = engine_named(engine).render(JOB).splitlines()[:8]
        assert any("my runs/run/log.jsonl" in line for line in head), engine
        assert any(f"convoy status {shlex.quote(JOB.run_dir)}" in line for line in head), engine


def test_a_container_has_every_folder_of_the_run():
    job = changed(JOB, checkpoints="/lustre/ck", folders=("/data/corpus", "/shared/corpora"))
    # /shared has the spec, the run and one corpus.
    mounts = "/data/corpus:/data/corpus,/lustre/ck:/lustre/ck,/shared:/shared"
    assert step_flags(EngineJob.model_validate_json(job.for_nodes())) == [
        "--cpus-per-task=8", "--kill-on-bad-exit=0",
        "--container-image=registry/convoy:0.1.0", f"--container-mounts={mounts}",
    ]  # fmt: skip
    in_store = changed(JOB, checkpoints="s3://bucket/ck")
    assert not any("s3://" in flag for flag in step_flags(in_store))


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
    monkeypatch.setattr(kubernetes.Kubernetes, "check", lambda self, job: None)
    with pytest.raises(ValueError, match="did not answer within 120 s; nothing is left running"):
        kubernetes.Kubernetes().submit(JOB, "")
    assert deleted == ["TrainJob", "TrainingRuntime", "ConfigMap"]


def test_machines_that_wait_for_a_checkpoint_need_a_folder_to_look_into():
    job = changed(JOB, checkpoints="s3://bucket/ck", rendezvous={"scale_up": "at_checkpoint"})
    words = torchrun_words(job, "h:1", "run")
    (conf,) = [word.removeprefix("--rdzv-conf=") for word in words if "--rdzv-conf" in word]
    config = dict(each.split("=", 1) for each in conf.split(","))
    parameters = RendezvousParameters("convoy", "h:1", "run", 2, 4, **config)
    with pytest.raises(ValueError, match="must be at_once or never with checkpoints in an object"):
        convoy_rendezvous()(parameters)
