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
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from cluster.launch.job import (
    EXIT_BAD_INPUT,
    EXIT_HEALTH,
    EXIT_TRY_AGAIN,
    STATUS_FILE,
    EngineJob,
    one_line,
)
from cluster.launch.torchrun import continued, torchrun_words
from cluster.members import EXCLUDE_LIST

_TIMEOUT = 120.0
_NO_ANSWER = "kubectl did not answer"
_GRACE_SECONDS = 600
_PORT = 29400
_CONFIG = "/etc/convoy/spec.json"
_STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_HOST_LABEL = "kubernetes.io/hostname"

_SCRIPT = """\
run_dir=@RUN_DIR@
export CONVOY_NODE_ORDER=$JOB_COMPLETION_INDEX
mkdir -p "$run_dir/launch" && mark="$run_dir/launch/start-$HOSTNAME" && : > "$mark" || exit 2
run_code() {  # what the run has ended with since the mark; nothing while the run goes on
    [ "$run_dir/@STATUS_FILE@" -nt "$mark" ] && python3 -c 'import json, sys
found = json.load(open(sys.argv[1]))["exit_code"]; print("" if found is None else found)' \\
        "$run_dir/@STATUS_FILE@"
}
@SETUP@
@VERSION@
# A pod keeps to its node: on an excluded one the pod waits for the end, and fails nothing.
while [ -e "$run_dir/@EXCLUDE_LIST@" ] && python3 -c 'import json, sys
nodes = [one["node"] for one in json.load(open(sys.argv[1]))["excluded"]]
sys.exit(sys.argv[2] not in nodes)' "$run_dir/@EXCLUDE_LIST@" "$CONVOY_NODE_NAME"; do
    [ -n "$waits" ] || echo "node $CONVOY_NODE_NAME is on the exclude list: this pod only waits"
    waits=1
    case $(run_code) in 0 | @BAD_INPUT@ | @HEALTH@) exit "$(run_code)" ;; esac
    sleep 5
done
@TORCHRUN@ &
launcher=$!
trap 'kill -TERM $launcher' TERM
wait $launcher; code=$?
while kill -0 $launcher 2>/dev/null; do wait $launcher; code=$?; done
# torchrun hides the exit code of the run, which the node of rank 0 writes.
for try in 1 2 3 4 5; do
    [ $code = 0 ] && exit 0
    found=$(run_code)
    [ -n "$found" ] && exit "$found"
    sleep 1
done
exit 1
"""


class _Dumper(yaml.SafeDumper):
    """YAML for people: texts of several lines as blocks, and equal objects written out twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _block)


def objects(job: EngineJob) -> list[dict[str, Any]]:
    """The objects of the API, in the order in which they are created."""
    name, space = job.name, job.launch.kubernetes.namespace
    about = {"name": name, "namespace": space}
    spec_file = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-spec", "namespace": space},
        "data": {"spec.json": job.config_text},
    }
    labels = {"labels": {_QUEUE_LABEL: job.launch.queue}} if job.launch.queue else {}
    if job.launch.kubernetes.kind == "JobSet":
        job_set = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": about | labels,
            "spec": _job_set(job),
        }
        return [spec_file, job_set]
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": about | {"labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": job.nodes[1]}, "template": {"spec": _job_set(job)}},
    }
    train_job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": about | labels,
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name,
            },
            "trainer": {"numNodes": job.nodes[1]},
        },
    }  # fmt: skip
    return [spec_file, runtime, train_job]


def render(job: EngineJob) -> str:
    """The objects as documents of YAML."""
    head = "".join(f"{line}\n" for line in job.head())
    return head + yaml.dump_all(objects(job), Dumper=_Dumper, sort_keys=False)


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


def _pod(job: EngineJob) -> dict[str, Any]:
    pods = job.launch.kubernetes
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
        {"name": "spec", "configMap": {"name": f"{job.name}-spec"}},
    ]
    if pods.volume_claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": pods.volume_claim}})
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        **({"affinity": affinity} if (affinity := _affinity(job)) else {}),
        "containers": [_container(job)],
        "volumes": volumes,
    }
    if job.launch.walltime_minutes is not None:
        spec["activeDeadlineSeconds"] = math.ceil(job.launch.walltime_minutes * 60) + _GRACE_SECONDS
    metadata: dict[str, Any] = {"labels": {"convoy/run": job.name}}
    if annotations:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": spec}


def _container(job: EngineJob) -> dict[str, Any]:
    pods = job.launch.kubernetes
    mounts = [
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "spec", "mountPath": str(Path(_CONFIG).parent)},
    ]
    if pods.volume_claim:
        mounts.append({"name": "data", "mountPath": pods.mount_path})
    asked = {"cpu": str(job.cpus_per_node)}
    resources: dict[str, Any] = {"requests": asked}
    if job.launch.gpus_per_node:
        resources["limits"] = {"nvidia.com/gpu": str(job.launch.gpus_per_node)}
    environment: list[dict[str, Any]] = [
        {"name": key, "value": value} for key, value in job.all_environment.items()
    ]
    environment.append(
        {"name": "CONVOY_NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    )
    container: dict[str, Any] = {
        "name": "node",
        "image": job.launch.image,
        "command": ["bash", "-c"],
        "args": [node_script(job)],
        "workingDir": job.workdir or pods.mount_path,
        "env": environment,
        "resources": resources,
        "volumeMounts": mounts,
    }
    if pods.secret:
        container["envFrom"] = [{"secretRef": {"name": pods.secret}}]
    if job.metrics_port:
        container["ports"] = [{"name": "metrics", "containerPort": job.metrics_port}]
    return container


def node_script(job: EngineJob) -> str:
    """What the container of each pod runs, in bash; it ends with the exit code of the run."""
    # The pods have the spec with its overrides from the ConfigMap.
    in_pod = job.model_copy(update={"config": _CONFIG, "overrides": ()})
    words = torchrun_words(
        in_pod,
        f"{job.name}-node-0-0.{job.name}:{_PORT}",
        job.name,
        {"is_host": "$((JOB_COMPLETION_INDEX == 0))"},
    )
    text = _SCRIPT
    for key, value in {
        "RUN_DIR": shlex.quote(job.run_dir),
        "SETUP": "\n".join(
            [*job.launch.setup, *([job.launch.burn_in] if job.launch.burn_in else [])]
        ),
        "VERSION": job.version_check,
        "TORCHRUN": continued(words),
        "STATUS_FILE": STATUS_FILE,
        "EXCLUDE_LIST": EXCLUDE_LIST,
        "BAD_INPUT": str(EXIT_BAD_INPUT),
        "HEALTH": str(EXIT_HEALTH),
    }.items():
        text = text.replace(f"@{key}@", value)
    return text


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
            "labelSelector": {"matchLabels": {"convoy/run": job.name}},
            "topologyKey": job.launch.kubernetes.topology_label,
        }
        affinity["podAffinity"] = {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 100, "podAffinityTerm": near}
            ]
        }
    return affinity


def check(job: EngineJob) -> None:
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
        mount = Path(job.launch.kubernetes.mount_path)
        for field, path in (("run_dir", job.run_dir), ("checkpoint.path", job.checkpoints)):
            if not Path(path).is_relative_to(mount):
                raise ValueError(
                    f"{field} ({path}) must be below launch.kubernetes.mount_path ({mount}), which "
                    f"pods share"
                )
    if shutil.which("kubectl") is None:
        raise ValueError(
            "--on kubernetes needs the program kubectl, which is not installed on this machine"
        )


def submit(job: EngineJob, text: str) -> str:
    """Create the objects; returns their names. Raises ValueError where the API refuses one of them,
    and removes those that were created before it."""
    check(job)
    made: list[dict[str, Any]] = []
    wanted = objects(job)
    for one in wanted:
        refused = _kubectl(["create", "--dry-run=server", "-f", "-"], one)
        # A TrainJob needs its runtime, which a dry run does not leave behind.
        if refused and one["kind"] != "TrainJob":
            raise ValueError(f"Kubernetes refuses {one['kind']} {job.name}: {refused}")
    for one in wanted:
        refused = _kubectl(["create", "-f", "-"], one)
        if refused:
            # The API may have made an object about which it has not answered in time.
            unsure = [one] if refused.startswith(_NO_ANSWER) else []
            left = [
                f"{each['kind']} {each['metadata']['name']}"
                for each in reversed([*made, *unsure])
                if _kubectl(["delete", "--ignore-not-found", "-f", "-"], each)
            ]
            more = f"; remove by hand: {', '.join(left)}" if left else "; nothing is left running"
            raise ValueError(f"Kubernetes refuses {one['kind']} {job.name}: {refused}{more}")
        made.append(one)
    return f"{made[-1]['kind'].lower()}/{job.name}"


def submitted(job: EngineJob, number: str) -> list[str]:
    """Lines for people about a job that was created."""
    space = job.launch.kubernetes.namespace
    return [
        f"created {number} in namespace {space}",
        f"output       kubectl -n {space} logs -f -l convoy/run={job.name} --prefix",
        f"pods         kubectl -n {space} get pods -l convoy/run={job.name}",
        f"stop         kubectl -n {space} delete {number}",
    ]


def _kubectl(words: list[str], one: dict[str, Any]) -> str:
    """Run kubectl on an object; returns what it refuses, and nothing where it does not."""
    try:
        ended = subprocess.run(
            ["kubectl", *words], input=json.dumps(one), capture_output=True, text=True,
            timeout=_TIMEOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{_NO_ANSWER} within {_TIMEOUT:.0f} s"
    return one_line(ended.stderr or ended.stdout) if ended.returncode else ""
