"""Ranks on two hosts that have names and addresses of their own, and a network between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.agents import ROOT
from tests.support.jobs import data_of, events, prepare_job, write_spec
from tests.support.launch import Launch, pretrain
from tests.support.netns import network, unavailable
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]


def one_process(rank: int, spec: str) -> int:
    from convoy.commands.pretrain import main

    return main([spec])


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(run, "step")}


def undisturbed(folder: Path, job: Path, **sections) -> dict[int, float]:
    """The losses of the same run as one process."""
    folder.mkdir()
    spec = write_spec(folder, data=data_of(job), **sections)
    assert run_ranks(one_process, 1, str(spec), group=False, timeout=300) == [0]
    return losses(folder / "run")


def test_two_hosts_train_as_one_process_does(tmp_path, job):
    """Two ranks on each host, each host's own name resolving to its loopback, as Debian has it."""
    spec = write_spec(
        tmp_path, data=data_of(job), parallel={"ep": 4}, moe={"dispatcher": "hierarchical"}
    )
    with network("host-a", "host-b", own_name_is_loopback=True) as hosts:
        launch = Launch(hosts, pretrain(spec), tmp_path / "run", nodes="2", ranks=2)
        launch.start("host-b")  # waits for the host of the rendezvous
        launch.start("host-a")
        assert launch.wait_for_end() == [0, 0], launch.output()
    (start,) = events(tmp_path / "run", "start")
    assert (start["world_size"], start["topology"]["ep"]) == (4, 4)
    found, expected = losses(tmp_path / "run"), undisturbed(tmp_path / "one", job)
    assert found == pytest.approx(expected, rel=1e-5)


_DISPATCHERS = """
    import json, os, sys
    import torch
    import torch.distributed as dist
    from moe import MoEConfig, MoELayer
    from parallel import ParallelDims, Topology, apply_expert_parallel

    def sent():
        line, = [line for line in open("/proc/net/dev") if line.strip().startswith("eth0:")]
        return int(line.split(":")[1].split()[8])

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    dims = ParallelDims.build(Topology(dp_shard=ranks, ep=ranks), "cpu", ranks_per_node=2)
    sizes = {"d_model": 128, "d_ff": 16, "num_experts": 8, "top_k": 4}
    bytes_sent, error = {}, 0.0
    for name in ("all_to_all", "hierarchical"):
        torch.manual_seed(0)
        layer = MoELayer(MoEConfig(dispatcher=name, **sizes))
        torch.manual_seed(1 + dist.get_rank())
        x = torch.randn(2048, 128)
        with torch.no_grad():
            expected = layer(x).hidden
            apply_expert_parallel(layer, dims.ep_mesh, dims.ep_node_meshes)
            dist.barrier()
            before = sent()
            for _ in range(4):
                hidden = layer(x).hidden
            dist.barrier()
        bytes_sent[name] = sent() - before
        error = max(error, float((hidden - expected).abs().max() / expected.abs().max()))
    if os.environ["LOCAL_RANK"] == "0":
        with open(f"{sys.argv[1]}/{os.uname().nodename}.json", "w") as file:
            json.dump({"bytes": bytes_sent, "error": error}, file)
    dist.destroy_process_group()
"""


def test_a_token_crosses_to_a_host_once(tmp_path):
    """Of 8 experts on 2 hosts with 2 ranks each, a token's 4 experts are on 1.57 ranks of the other
    host on average, and on 0.99 hosts: that is what goes over the wire, and back."""
    script = tmp_path / "dispatchers.py"
    script.write_text(textwrap.dedent(_DISPATCHERS))
    with network("host-a", "host-b") as hosts:
        launch = Launch(
            hosts, [str(script), str(tmp_path)], tmp_path / "run", nodes="2", ranks=2,
        )  # fmt: skip
        launch.start("host-a")
        launch.start("host-b")
        assert launch.wait_for_end() == [0, 0], launch.output()
    row = 128 * 4
    for name in ("host-a", "host-b"):
        found = json.loads((tmp_path / f"{name}.json").read_text())
        rows = {how: count / row / (4 * 4096) for how, count in found["bytes"].items()}
        print(f"{name}: rows of the wire for each token, there and back: {rows}")
        assert found["error"] < 1e-5
        # Twice the averages above, and what headers, expert numbers and weights add.
        assert 3.0 < rows["all_to_all"] < 3.6
        assert 1.9 < rows["hierarchical"] < 2.4


def test_a_host_that_is_replaced_resumes_from_its_peers_memory(tmp_path, job):
    """One host loses its power, and another takes its name: of the steps since the start only the
    other host's memory has the lost host's part."""
    tiers = {"memory": True, "replicate_to_peer": True, "shared_interval": 1000}
    spec = write_spec(
        tmp_path,
        data=data_of(job),
        parallel={"ep": 2},
        train={"steps": 40, "timeout_seconds": 10.0},
        checkpoint={"interval_steps": 6, "tiers": tiers},
    )
    run = tmp_path / "run"
    with network("host-a", "host-b", own_name_is_loopback=True) as hosts:
        launch = Launch(hosts, pretrain(spec), run, nodes="2")
        launch.start("host-a")
        launch.start("host-b")
        in_peers = lambda: [e for e in launch.events("checkpoint") if e["tier"] == "peer"]  # noqa: E731
        launch.wait(in_peers)
        hosts.start("host-b")
        launch.start("host-b")
        assert launch.wait_for_end() == [0, 0], launch.output()
    starts, restored = events(run, "start"), events(run, "restored")
    assert [start["world_size"] for start in starts] == [2] * len(starts)
    assert restored, launch.output()
    assert restored[-1]["step"] >= 6
    assert restored[-1]["tier"] == "memory"  # of rank 0, which was not lost
    taken: dict[int, set[float]] = {}
    for event in events(run, "step"):
        taken.setdefault(event["step"], set()).add(event["loss"])
    assert sorted(taken) == list(range(1, 41))
    assert all(len(values) == 1 for values in taken.values()), "a step again has equal bits"


@pytest.mark.parametrize("way", ["unplug", "silence"])
def test_a_host_that_is_cut_off_comes_back(tmp_path, job, way):
    """A host whose cable is out, or whose frames get lost without a sign, is left behind by the
    other, which trains on; later both train again."""
    sections = {
        "moe": {"top_k": 2, "capacity": {"policy": "dropless"}},
        "train": {"steps": 60, "timeout_seconds": 10.0},
        "checkpoint": {"interval_steps": 2},
    }
    spec = write_spec(
        tmp_path, data=data_of(job), parallel={"ep": 2}, elastic={"enabled": True}, **sections
    )
    run = tmp_path / "run"
    with network("host-a", "host-b") as hosts:
        launch = Launch(hosts, pretrain(spec), run, nodes="1:2")
        launch.start("host-a")
        launch.start("host-b")
        launch.wait_for_step(6, starts=1)
        getattr(hosts.hosts["host-b"], way)()
        launch.wait_for_step(20, starts=2)
        getattr(hosts.hosts["host-b"], {"unplug": "plug_in", "silence": "hear"}[way])()
        lost = launch.processes["host-b"]
        launch.wait(lambda: lost.poll() is not None or len(launch.events("start")) > 2)
        if lost.poll() is not None:
            launch.start("host-b")  # as a service manager does
        codes = launch.wait_for_end()
    assert codes == [0, 0], launch.output()
    starts = events(run, "start")
    assert starts[0]["world_size"] == starts[-1]["world_size"] == 2
    assert 1 in {start["world_size"] for start in starts}
    found = losses(run)
    expected = undisturbed(tmp_path / "one", job, **sections)
    far = {s: v / expected[s] - 1 for s, v in found.items() if abs(v / expected[s] - 1) > 1e-5}
    print("steps whose loss differs by more than 1e-5:", far)
    assert sorted(found) == sorted(expected)
    assert all(abs(value) < 1e-3 for value in far.values()), far


_OWNER = """
    import sys, time
    from pathlib import Path
    from tests.support.netns import network
    with network("one", "two") as hosts:
        host = hosts.hosts["one"]
        host.start(["sh", "-c", "sleep 1000 & sleep 1000"], Path(sys.argv[1]))
        print(host.first, hosts.switch.first, flush=True)
        time.sleep(1000)
"""


def test_nothing_is_left_of_a_killed_test(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_OWNER), str(tmp_path / "log")],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert owner.stdout is not None
    first = [int(word) for word in owner.stdout.readline().split()]
    inside = {str(Path(f"/proc/{pid}/ns/net").readlink()) for pid in first}
    until = time.monotonic() + 20
    while len(living(inside)) < 5:  # two hosts and a switch, the shell, its child
        assert time.monotonic() < until
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    while living(inside):
        assert time.monotonic() < until, living(inside)
        time.sleep(0.01)


def living(namespaces: set[str]) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str((process / "ns/net").readlink()) in namespaces:
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.parametrize("way", ["unplug", "silence"])
def test_the_replica_of_another_host_goes_on_when_a_link_is_cut(tmp_path, job, way):
    """No connection is reset where a link is cut: heartbeats tell that the replica is gone."""
    spec = write_spec(
        tmp_path,
        data=data_of(job),
        parallel={"dp_replicate": 2, "dp_shard": 1},
        train={"steps": 100_000, "exact": True, "timeout_seconds": 30.0, "log_interval_steps": 1},
        detection={"stuck_seconds": 4.0},
        elastic={"enabled": True, "recovery": "heal"},
    )
    run = tmp_path / "run"
    with network("host-a", "host-b") as hosts:
        launch = Launch(hosts, pretrain(spec), run, nodes="2")
        launch.start("host-a")
        launch.start("host-b")
        launch.wait_for_step(12, starts=1)
        getattr(hosts.hosts["host-b"], way)()
        launch.wait(lambda: any(e["left"] for e in launch.events("regrouped")))
        step = launch.events("step")[-1]["step"]
        launch.wait_for_step(step + 20, starts=1)
    assert len(events(run, "start")) == 1
    (change,) = [e for e in events(run, "regrouped") if e["left"]]
    assert (change["left"][0]["replica"], change["replicas"]) == (1, 1)
