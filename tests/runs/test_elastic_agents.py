"""Ranks and machines are lost and come back while a run trains; the run stays the same run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckpt
from cluster.members import exclude
from convoy.commands.pretrain import main
from tests.support.agents import agents
from tests.support.etcd import etcd, need_etcd
from tests.support.jobs import data_of, events, prepare_job, write_spec
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS, BATCH = 60, 4


def elastic_spec(folder: Path, job: Path, exact: bool = False, **sections) -> Path:
    """Experts are spread over the ranks, with biases and a capacity that moves tokens."""
    return write_spec(
        folder,
        data=data_of(job),
        # One MoE layer, and few tokens: another layout rounds sums otherwise, and each choice of an
        # expert between two nearly equal scores may then fall otherwise.
        model={"d_model": 48, "first_k_dense": 2},
        moe={
            "num_experts": 12, "top_k": 2, "d_ff": 48, "expert_bias": True,
            "score_func": "sigmoid", "bias_update_rate": 0.01,
            "capacity": {"policy": "fixed", "capacity_factor": 2.0, "drop_policy": "reroute"},
        },
        parallel=sections.pop("parallel", {"ep": 4}),
        batch={"global_batch_size": BATCH, "micro_batch_size": 1},
        optimizer={"lr": 0.001},
        train={
            "steps": STEPS, "timeout_seconds": 30.0, "log_interval_steps": 20, "exact": exact,
            **sections.pop("train", {}),
        },
        checkpoint={"interval_steps": 4},
        elastic={"enabled": True},
        **sections,
    )  # fmt: skip


def undisturbed(rank: int, spec: str) -> int:
    return main([spec])


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory, job) -> Path:
    """The run folder of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    spec = elastic_spec(folder, job)
    assert run_ranks(undisturbed, 4, str(spec), group=False, timeout=200) == [0] * 4
    return folder / "run"


@pytest.fixture(params=["c10d", "etcd-v2"])
def store(request) -> Iterator[dict[str, str]]:
    """Options of a launch whose rendezvous has this store."""
    if request.param == "c10d":
        yield {}
        return
    need_etcd()
    with etcd() as server:
        yield {"endpoint": server.endpoint, "backend": "etcd-v2"}


def last_records(run: Path) -> dict[int, dict]:
    """Each step as it was taken last."""
    return {event["step"]: event for event in events(run, "step")}


def assert_one_run(run: Path, reference: Path) -> None:
    """Samples, losses and final parameters are those of the undisturbed run."""
    found, expected = last_records(run), last_records(reference)
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    far = {}
    for record in events(run, "step"):  # those that were taken again, too
        assert record["consumed_samples"] == record["step"] * BATCH
        loss = expected[record["step"]]["loss"]
        if abs(record["loss"] - loss) > 1e-5 * loss:
            far[record["step"]] = record["loss"] / loss - 1
    print("steps whose loss differs by more than 1e-5:", far)
    # A choice between two nearly equal scores changes the loss of its step.
    assert len(far) <= 2, far
    assert all(abs(difference) < 1e-3 for difference in far.values()), far
    close = 1e-3 if far else 1e-4
    a, b = ckpt.open(run / "checkpoints"), ckpt.open(reference / "checkpoints")
    names = [name for name in b if name.startswith("model/")]
    assert names
    for name in names:
        np.testing.assert_allclose(a[name][...], b[name][...], rtol=close, atol=close)


def lose_ranks_and_machines(
    spec: Path, run: Path, store: dict[str, str], *, grows: bool = False
) -> list[int]:
    """Four machines, of which one rank is killed and two are lost, and two come in their place;
    if ``grows``, the run begins on one machine. Returns the ranks of each start."""
    with agents(spec, run, least=1 if grows else 2, most=4, **store) as launch:
        launch.start()
        if grows:
            launch.wait_for_step(3, starts=1)
        for _ in range(3):
            launch.start()
        launch.wait_for_step(6, starts=1 + grows)
        launch.kill_rank(1)
        launch.wait_for_step(12, starts=2 + grows)
        launch.lose(3)
        launch.wait_for_step(20, starts=3 + grows)
        launch.lose(2)
        launch.wait_for_step(28, starts=4 + grows)
        launch.start()
        launch.start()
        codes = launch.wait_for_end()
    assert codes == [0] * 4, launch.output()
    sizes = [event["world_size"] for event in events(run, "start")]
    print("ranks of each start:", sizes)
    assert sizes[0] == (1 if grows else 4)
    assert {2, 3, 4} <= set(sizes)
    resized = events(run, "resized")
    # Two resizes from one checkpoint have one epoch.
    epochs = [event["epoch"] for event in resized]
    assert epochs == sorted(epochs)
    assert set(epochs) == set(range(1, epochs[-1] + 1))
    return sizes


def test_four_three_two_four_ranks(tmp_path, job, reference, store):
    spec, run = elastic_spec(tmp_path, job), tmp_path / "run"
    sizes = lose_ranks_and_machines(spec, run, store)
    assert sizes[-1] == 4
    assert events(run, "resized")[-1]["after"]["ep"] == 4
    assert_one_run(run, reference)


def test_an_exact_run_has_the_bits_of_one_process(tmp_path, job):
    """train.exact, 1 to 4 to 3 to 2 to 4 ranks, against one process that nothing happens to."""
    (tmp_path / "alone").mkdir()
    (tmp_path / "many").mkdir()
    alone = elastic_spec(tmp_path / "alone", job, exact=True, parallel={})
    assert run_ranks(undisturbed, 1, str(alone), group=False, timeout=200) == [0]
    # One machine would be done before three others have started.
    slow = {"kind": "slow", "step": 4, "rank": 0, "factor": 10.0, "duration_steps": 16}
    spec = elastic_spec(tmp_path / "many", job, exact=True, inject=[slow])
    run, reference = tmp_path / "many" / "run", tmp_path / "alone" / "run"
    lose_ranks_and_machines(spec, run, {}, grows=True)
    expected = last_records(reference)
    assert sorted(last_records(run)) == sorted(expected) == list(range(1, STEPS + 1))
    for record in events(run, "step"):  # those that were taken again, too
        one = expected[record["step"]]
        for field in ("loss", "grad_norm", "lr", "consumed_samples", "tokens_seen"):
            assert record[field] == one[field], (record["step"], field)
    a, b = ckpt.open(run / "checkpoints"), ckpt.open(reference / "checkpoints")
    names = [name for name in b if not name.startswith("rng/")]
    assert any(name.startswith("optimizer/exp_avg_sq/") for name in names)
    for name in names:
        assert a[name][...].tobytes() == b[name][...].tobytes(), name


def test_a_machine_of_the_exclude_list_does_not_come_back(tmp_path, job, store):
    """Two machines train and one is a spare, which takes the place of the excluded machine."""
    run = tmp_path / "run"
    spec = elastic_spec(tmp_path, job, parallel={"dp_shard": 2, "ep": 2})
    conf = {"run_dir": str(run), "store": store.get("backend", "c10d")}
    with agents(spec, run, least=2, most=3, conf=conf, **{**store, "backend": "convoy"}) as launch:
        for number in range(3):
            launch.start(f"machine-{number}")
        launch.wait_for_step(6, starts=1)
        exclude(run / "exclude.json", "machine-1", "for a test")
        launch.kill_rank(1)
        codes = launch.wait_for_end()
    assert [code == 0 for code in codes] == [True, False, True], launch.output()
    assert "machine-1 is on the exclude list" in (launch.logs / "machine-1.txt").read_text()
    starts = events(run, "start")
    assert [(start["world_size"], start["spares"]) for start in starts] == [(2, 1), (2, 0)]
    assert events(run, "step")[-1]["step"] == STEPS


@pytest.mark.parametrize("outage", ["frozen", "killed"])
def test_ranks_train_on_while_etcd_is_away(tmp_path, job, outage):
    """Two machines train, etcd is away until every heartbeat has expired, and once more; a third
    machine comes meanwhile, and joins the two when etcd is back."""
    need_etcd()
    run = tmp_path / "run"
    spec = elastic_spec(tmp_path, job, parallel={"ep": 2}, train={"steps": 100_000})
    with etcd() as server:
        options = {"endpoint": server.endpoint, "backend": "convoy"}
        # A machine that is busy is not lost, though its heartbeat is some seconds late.
        conf = {"store": "etcd-v2", "keep_alive_max_attempt": "10"}
        with agents(spec, run, least=1, most=3, conf=conf, **options) as launch:
            launch.start()
            launch.start()
            launch.wait_for_step(6, starts=1)
            if launch.events("start")[-1]["world_size"] == 1:
                launch.wait_for_step(6, starts=2)
            starts = len(launch.events("start"))
            for comes in (False, True):
                (server.freeze if outage == "frozen" else server.kill)()
                if comes:
                    launch.start()
                step = launch.events("step")[-1]["step"]
                time.sleep(25)  # more than twice as long as a heartbeat counts
                launch.wait_for_step(step + 2, starts=starts)
                if outage == "frozen":
                    server.thaw()
                else:
                    server.start()
                    assert server.answers()
            launch.wait_for_step(1, starts=starts + 1)
            launch.kill_rank(0)
            launch.wait_for_step(1, starts=starts + 2)
            assert all(process.poll() is None for process in launch.processes.values())
    assert [event["world_size"] for event in events(run, "start")[starts - 1 :]] == [2, 3, 3]
    printed = "".join(log.read_text() for log in launch.logs.iterdir())
    assert printed.count("answers again after") >= 2, printed[-4000:]
