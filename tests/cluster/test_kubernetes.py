"""Objects for Kubernetes against the published models of Kubeflow Trainer and JobSet."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.launch import engine_named
from cluster.launch.kubernetes import endpoint, objects
from tests.cluster.test_launch import JOB, changed

ROOT = Path(__file__).parents[2]
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
JOBS = {
    "all": changed(JOB, volume_claim="data", secret="keys", topology_label="rack"),
    "few": changed(
        JOB, queue=None, excluded=(), metrics_port=None, walltime_minutes=None, gpus_per_node=0,
        checkpoints="s3://bucket/run", topology_label="rack",
    ),
}  # fmt: skip
CASES = [(name, kind) for name in JOBS for kind in ("TrainJob", "JobSet")]


def lost(given: Any, known: Any, path: str = "") -> list[str]:
    """Fields of ``given`` that the published models do not know, or hold with other values."""
    if isinstance(given, dict):
        if not isinstance(known, dict):
            return [path]
        missing = [f"{path}.{key}" for key in given if key not in known]
        inner = [lost(v, known[k], f"{path}.{k}") for k, v in given.items() if k in known]
        return [*missing, *(each for one in inner for each in one)]
    if isinstance(given, list):
        if not isinstance(known, list) or len(given) != len(known):
            return [path]
        pairs = enumerate(zip(given, known, strict=True))
        return [each for i, (a, b) in pairs for each in lost(a, b, f"{path}[{i}]")]
    return [] if given == known else [path]


@pytest.mark.engine
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_objects_are_those_of_the_published_models(name, kind):
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )
    job = changed(JOBS[name], kind=kind)
    known = {
        "ConfigMap": models.IoK8sApiCoreV1ConfigMap,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "JobSet": models.JobsetV1alpha2JobSet,
    }
    for one in yaml.safe_load_all(engine_named("kubernetes").render(job)):
        model = known[one["kind"]].from_dict(one)
        assert lost(one, model.to_dict()) == []


def parts(name: str, kind: str) -> dict[str, Any]:
    job = changed(JOBS[name], kind=kind)
    found = {one["kind"]: one for one in objects(job)}
    spec = (
        found["JobSet"]["spec"]
        if kind == "JobSet"
        else found["TrainingRuntime"]["spec"]["template"]["spec"]
    )
    (replicated,) = spec["replicatedJobs"]
    inner = replicated["template"]["spec"]
    pod = inner["template"]
    return {
        "objects": found, "set": spec, "job": inner, "pod": pod["spec"], "meta": pod["metadata"],
        "container": pod["spec"]["containers"][0], "replicated": replicated,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["TrainJob", "JobSet"])
def test_exit_codes_decide_about_the_next_start(kind):
    found = parts("all", kind)
    rules = found["job"]["podFailurePolicy"]["rules"]
    codes = {r["action"]: r["onExitCodes"]["values"] for r in rules if "onExitCodes" in r}
    assert codes == {"FailJob": [2, 3], "Ignore": [75]}
    assert all(r["onExitCodes"]["containerName"] == found["container"]["name"]
               for r in rules if "onExitCodes" in r)  # fmt: skip
    # The API accepts the policy with this restart policy alone.
    assert found["pod"]["restartPolicy"] == "Never"
    (rule,) = found["set"]["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert found["job"]["parallelism"] == found["job"]["completions"] == 4


def test_pods_meet_at_the_name_of_the_first_pod():
    """JobSet names a pod SET-JOB-REPLICA-INDEX, below a service with the name of the set."""
    found = parts("all", "JobSet")
    name = found["objects"]["JobSet"]["metadata"]["name"]
    host = f"{name}-{found['replicated']['name']}-0-0.{name}:29400"
    assert endpoint(JOBS["all"]) == host
    assert found["set"]["network"]["enableDNSHostnames"]


def test_options_of_the_job_are_in_the_pod():
    found = parts("all", "TrainJob")
    assert found["meta"]["annotations"]["prometheus.io/port"] == "9400"
    assert found["meta"]["annotations"]["kueue.x-k8s.io/podset-preferred-topology"] == "rack"
    assert (
        found["objects"]["TrainJob"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "batch"
    )
    terms = found["pod"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert terms[0]["matchExpressions"][0]["values"] == ["bad-1", "bad-2"]
    assert found["container"]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert found["pod"]["activeDeadlineSeconds"] == 90.5 * 60 + 600
    claims = [v["persistentVolumeClaim"] for v in found["pod"]["volumes"] if v["name"] == "data"]
    assert claims == [{"claimName": "data"}]
    assert found["container"]["envFrom"] == [{"secretRef": {"name": "keys"}}]
    few = parts("few", "TrainJob")
    assert "annotations" not in few["meta"]
    assert list(few["pod"]["affinity"]) == ["podAffinity"]
    assert "limits" not in few["container"]["resources"]


def test_the_containerfile_copies_what_the_wheel_ships():
    text = (ROOT / "deploy" / "Containerfile").read_text()
    copied = {line.split()[1] for line in text.splitlines() if line.startswith("COPY ")}
    assert {"router", "parallel", "moe", "ckpt", "cluster", "pretrain"} <= copied
    assert all((ROOT / name).exists() for name in copied)


def test_the_containerfile_installs_the_extras_that_a_run_can_use():
    text = (ROOT / "deploy" / "Containerfile").read_text()
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    assert set(extras.split(",")) == {"s3", "data", "plot", "nvml"}
    assert '-c constraints.txt ".[${EXTRAS}]"' in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = set(re.findall(r"^(.*)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for extra in extras.split(","):
        names = [
            re.split(r"[>=<]", wanted)[0] for wanted in project["optional-dependencies"][extra]
        ]
        assert set(names) <= pinned, "constraints.txt pins every version"


@pytest.mark.engine
@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_the_containerfile_passes_the_linter():
    path = str(ROOT / "deploy" / "Containerfile")
    ended = subprocess.run([str(HADOLINT), "--failure-threshold", "warning", path], timeout=60)
    assert ended.returncode == 0
