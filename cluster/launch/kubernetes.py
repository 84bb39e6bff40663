"""Kubernetes: a TrainJob of Kubeflow Trainer v2 with its own TrainingRuntime, or a plain JobSet.

Both are an indexed Job with one pod for each node of MAX. A pod that is lost is replaced, and joins
the launch. How a pod's container ends decides about the next one (``podFailurePolicy``): 2 and 3
end the job, 75 and a preempted node replace the pods without counting, and all else counts against
the limit of restarts.

The API has no limit of time for one start, so the spec's own ``train.time_limit_seconds`` is the
limit, and the pod's deadline comes a grace period later.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

from cluster.launch.job import (
    EXIT_BAD_INPUT,
    EXIT_HEALTH,
    EXIT_TRY_AGAIN,
    EngineJob,
    one_line,
)
from cluster.launch.node import (
    excluded_nodes,
    make_mark,
    node_script,
    run_launcher,
    status_since,
    torchrun_words,
)
from cluster.members import node_name

_TIMEOUT = 120.0
_NO_ANSWER = "kubectl did not answer"
_GRACE_SECONDS = 600
_PORT = 29400
_FILES = Path("/etc/convoy")
"""Where pods have the files of the ConfigMap."""
_SPEC, _JOB = "spec.json", "job.json"
_STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_HOST_LABEL = "kubernetes.io/hostname"

_WAIT_SECONDS = 5.0
"""How often a pod on an excluded node looks for the end of the run."""
_TRIES = 5
"""Seconds that a pod waits for what the node of rank 0 writes at the end of the run."""


class _Dumper(yaml.SafeDumper):
    """YAML for people: texts of several lines as blocks, and equal objects written out twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _block)


class Kubernetes:
    """Kubernetes, with Kubeflow Trainer or with JobSet alone; each node is a pod."""

    brings_spec = True
    tells_end = False
    container_workdir = "/data"

    def render(self, job: EngineJob) -> str:
        """The objects as documents of YAML."""
        head = "".join(f"{line}\n" for line in job.head())
        documents: str = yaml.dump_all(objects(job), Dumper=_Dumper, sort_keys=False)
        return head + documents

    def check(self, job: EngineJob) -> None:
        """Refuse what Kubernetes cannot start. Raises ValueError: one line."""
        if job.launch.image is None:
            raise ValueError(
                f"launch.image (none) must be an image with convoy-moe {job.version} for --on "
                f"kubernetes"
            )
        if job.launch.kubernetes.volume_claim is None and job.has_local_checkpoints:
            raise ValueError(
                f"checkpoint.path ({job.checkpoints}) is a folder of a pod, which is lost with the "
                f"pod: set launch.kubernetes.volume_claim, or give the URL of an object store"
            )
        if job.launch.kubernetes.volume_claim is not None and job.has_local_checkpoints:
            mount = Path(job.workdir)
            for field, path in (("run_dir", job.run_dir), ("checkpoint.path", job.checkpoints)):
                if not Path(path).is_relative_to(mount):
                    raise ValueError(
                        f"{field} ({path}) must be below launch.workdir ({mount}), which pods share"
                    )
        if shutil.which("kubectl") is None:
            raise ValueError(
                "--on kubernetes needs the program kubectl, which is not installed on this machine"
            )

    def submit(self, job: EngineJob, text: str) -> str:
        """Create the objects; returns the last one's name. Raises ValueError where the API refuses
        an object, and removes those that were created before it."""
        self.check(job)
        created: list[dict[str, Any]] = []
        wanted = objects(job)
        for item in wanted:
            refusal = _kubectl(["create", "--dry-run=server", "-f", "-"], item)
            # A TrainJob needs its runtime, which a dry run does not leave behind.
            if refusal and item["kind"] != "TrainJob":
                raise ValueError(f"Kubernetes refuses {item['kind']} {_name(job)}: {refusal}")
        for item in wanted:
            refusal = _kubectl(["create", "-f", "-"], item)
            if refusal:
                # The API may have made an object about which it has not answered in time.
                unsure = [item] if refusal.startswith(_NO_ANSWER) else []
                rest = _delete(list(reversed([*created, *unsure])))
                raise ValueError(f"Kubernetes refuses {item['kind']} {_name(job)}: {refusal}{rest}")
            created.append(item)
        return f"{created[-1]['kind'].lower()}/{_name(job)}"

    def submitted(self, job: EngineJob, number: str) -> list[str]:
        """Lines for people about a job that was created."""
        space = job.launch.kubernetes.namespace
        return [
            f"created {number} in namespace {space}",
            f"output       kubectl -n {space} logs -f -l convoy/run={_name(job)} --prefix",
            f"pods         kubectl -n {space} get pods -l convoy/run={_name(job)}",
            f"stop         kubectl -n {space} delete {number}",
        ]

    def on_node(self, job: EngineJob, *words: str) -> int:
        """What a pod's container does; it ends with the exit code of the run."""
        mark = make_mark(job, os.environ["HOSTNAME"])
        code = _wait_where_excluded(job, mark)
        if code is not None:
            return code
        # The pods have the spec with its overrides from the ConfigMap.
        in_pod = job.model_copy(update={"config": str(_FILES / _SPEC), "overrides": ()})
        command = torchrun_words(
            in_pod,
            endpoint(job),
            _name(job),
            is_host=os.environ["JOB_COMPLETION_INDEX"] == "0",
        )
        # The container's first process alone is told of a stop.
        if run_launcher(command, forward_stop=True) == 0:
            return 0
        for _ in range(_TRIES):
            code = _run_code(job, mark)
            if code is not None:
                return code
            time.sleep(1)
        return 1


def endpoint(job: EngineJob) -> str:
    """Where the pods of a job meet: at the first one, by the name that JobSet gives it."""
    return f"{_name(job)}-node-0-0.{_name(job)}:{_PORT}"


def _name(job: EngineJob) -> str:
    """The name of the objects: names of Kubernetes have no capitals, points or underscores."""
    return job.name.lower().replace("_", "-").replace(".", "-")


def _run_code(job: EngineJob, mark: Path) -> int | None:
    """What the run has ended with since the mark; None while it goes on."""
    status = status_since(job, mark)
    return None if status is None else status["exit_code"]


def _wait_where_excluded(job: EngineJob, mark: Path) -> int | None:
    """On an excluded node, wait for the end of the run, and return its exit code.

    A pod keeps to its node: one that failed there would come back there, until the job has failed
    too often. None where the node is not, or no longer, on the list.
    """
    name, said = node_name(), False
    while name in excluded_nodes(job):
        if not said:
            print(f"node {name} is on the exclude list: this pod only waits", flush=True)
            said = True
        code = _run_code(job, mark)
        if code in (0, EXIT_BAD_INPUT, EXIT_HEALTH):
            return code
        time.sleep(_WAIT_SECONDS)
    return None


def objects(job: EngineJob) -> list[dict[str, Any]]:
    """The objects of the API, in the order in which they are created."""
    name, kubeflow, most = _name(job), "trainer.kubeflow.org", job.nodes[1]

    def item(api: str, kind: str, own_name: str, labels: dict[str, Any], **more: Any) -> Any:
        space = job.launch.kubernetes.namespace
        metadata = _given(name=own_name, namespace=space, labels=labels)
        return {"apiVersion": api, "kind": kind, "metadata": metadata, **more}

    files = {_SPEC: job.config_text, _JOB: job.for_nodes()}
    spec_file = item("v1", "ConfigMap", f"{name}-spec", {}, data=files)
    queue = {_QUEUE_LABEL: job.launch.queue} if job.launch.queue else {}
    job_set = _job_set(job)
    if job.launch.kubernetes.kind == "JobSet":
        return [spec_file, item("jobset.x-k8s.io/v1alpha2", "JobSet", name, queue, spec=job_set)]
    version, framework = f"{kubeflow}/v1alpha1", {f"{kubeflow}/framework": "torch"}
    template = {"mlPolicy": {"numNodes": most}, "template": {"spec": job_set}}
    runtime = item(version, "TrainingRuntime", name, framework, spec=template)
    run = {
        "runtimeRef": {"apiGroup": kubeflow, "kind": "TrainingRuntime", "name": name},
        "trainer": {"numNodes": most},
    }
    return [spec_file, runtime, item(version, "TrainJob", name, queue, spec=run)]


def _job_set(job: EngineJob) -> dict[str, Any]:
    most = job.nodes[1]
    node_job = {
        "parallelism": most,
        "completions": most,
        "completionMode": "Indexed",
        "backoffLimit": job.launch.max_restarts,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": _codes(EXIT_BAD_INPUT, EXIT_HEALTH)},
                {"action": "Ignore", "onExitCodes": _codes(EXIT_TRY_AGAIN)},
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": _pod(job),
    }
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": job.launch.max_restarts,
            "rules": [
                {
                    "name": "needs-a-person",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [
            {
                "name": "node",
                "replicas": 1,
                "template": {
                    "metadata": {"labels": {_STEP_LABEL: "trainer"}},
                    "spec": node_job,
                },
            }
        ],
    }


def _codes(*values: int) -> dict[str, Any]:
    return {"containerName": "node", "operator": "In", "values": list(values)}


def _given(**entries: Any) -> dict[str, Any]:
    """The entries that have a value."""
    return {key: value for key, value in entries.items() if value}


def _pod(job: EngineJob) -> dict[str, Any]:
    pods, walltime = job.launch.kubernetes, job.launch.walltime_minutes
    annotations: dict[str, str] = {}
    if job.metrics_port:
        annotations |= {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(job.metrics_port),
            "prometheus.io/path": "/metrics",
        }
    if pods.topology_label and job.launch.queue:
        annotations["kueue.x-k8s.io/podset-preferred-topology"] = pods.topology_label
    volumes = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        {"name": "spec", "configMap": {"name": f"{_name(job)}-spec"}},
    ]
    if pods.volume_claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": pods.volume_claim}})
    deadline = None if walltime is None else math.ceil(walltime * 60) + _GRACE_SECONDS
    return {
        "metadata": _given(labels={"convoy/run": _name(job)}, annotations=annotations),
        "spec": _given(
            restartPolicy="Never",
            terminationGracePeriodSeconds=_GRACE_SECONDS,
            affinity=_affinity(job),
            containers=[_container(job)],
            volumes=volumes,
            activeDeadlineSeconds=deadline,
        ),
    }


def _container(job: EngineJob) -> dict[str, Any]:
    pods, gpus = job.launch.kubernetes, job.launch.gpus_per_node
    mounts = [
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "spec", "mountPath": str(_FILES)},
    ]
    if pods.volume_claim:
        mounts.append({"name": "data", "mountPath": job.workdir})
    environment: list[dict[str, Any]] = [
        {"name": key, "value": value} for key, value in job.all_environment.items()
    ]
    environment.append(
        {"name": "CONVOY_NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    )
    return _given(
        name="node",
        image=job.launch.image,
        command=["bash", "-c"],
        args=[_script(job)],
        workingDir=job.workdir,
        env=environment,
        resources=_given(
            requests={"cpu": str(job.cpus_per_node)},
            limits={"nvidia.com/gpu": str(gpus)} if gpus else None,
        ),
        volumeMounts=mounts,
        envFrom=[{"secretRef": {"name": pods.secret}}] if pods.secret else None,
        ports=[{"name": "metrics", "containerPort": job.metrics_port}]
        if job.metrics_port
        else None,
    )


def _script(job: EngineJob) -> str:
    """What the container of each pod runs, in bash."""
    order = "export CONVOY_NODE_ORDER=$JOB_COMPLETION_INDEX"
    words = ["kubernetes", str(_FILES / _JOB)]
    return node_script(job, words, before=[order], burn_in=True) + "\n"


def _affinity(job: EngineJob) -> dict[str, Any]:
    affinity: dict[str, Any] = {}
    if job.excluded:
        rule = {"key": _HOST_LABEL, "operator": "NotIn", "values": list(job.excluded)}
        affinity["nodeAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [rule]}]
            }
        }
    if job.launch.kubernetes.topology_label and not job.launch.queue:
        near = {
            "labelSelector": {"matchLabels": {"convoy/run": _name(job)}},
            "topologyKey": job.launch.kubernetes.topology_label,
        }
        affinity["podAffinity"] = {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 100, "podAffinityTerm": near}
            ]
        }
    return affinity


def _delete(items: list[dict[str, Any]]) -> str:
    """Delete objects; returns what to say about it, with those that are still there."""
    kept = [
        f"{item['kind']} {item['metadata']['name']}"
        for item in items
        if _kubectl(["delete", "--ignore-not-found", "-f", "-"], item)
    ]
    return f"; remove by hand: {', '.join(kept)}" if kept else "; nothing is left running"


def _kubectl(words: list[str], item: dict[str, Any]) -> str:
    """Run kubectl on an object; returns what it refuses, and nothing where it does not."""
    try:
        ended = subprocess.run(
            ["kubectl", *words], input=json.dumps(item), capture_output=True, text=True,
            timeout=_TIMEOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{_NO_ANSWER} within {_TIMEOUT:.0f} s"
    return one_line(ended.stderr or ended.stdout) if ended.returncode else ""
