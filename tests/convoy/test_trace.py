"""``convoy trace``: the routing of a checkpoint is that of the training step after it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import ckpt
from convoy import tracing
from convoy.commands.command_line import main
from convoy.tracing import trace_routing
from moe import RoutingTrace, read_trace
from pretrain.data import Cursor
from pretrain.errors import InputError
from pretrain.job import build_job
from pretrain.runtime.ranks import start
from pretrain.spec import JobSpec
from pretrain.state import Progress
from tests.support.jobs import make_spec, prepare_job, save_checkpoint
from tests.support.ranks import run_ranks

STEP, SAMPLES = 3, 24


def _save(spec: JobSpec, rank: int) -> list[list[int]]:
    """Saves a checkpoint; returns the loads of the training step after it."""
    job = build_job(spec, start(spec.train.timeout_seconds))
    job.initialize()
    save_checkpoint(job, Progress(step=STEP, consumed_samples=SAMPLES))
    batches, _ = job.loader.step(Cursor(SAMPLES))
    result = job.forward_backward(batches, 256)
    job.runtime.close()
    return result.routing.tokens_per_expert_LE.tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[str, list[list[int]]]:
    """The checkpoints of a job, and the loads of its next step."""
    folder = prepare_job(tmp_path_factory.mktemp("trace"))
    (loads_LE,) = run_ranks(partial(_save, make_spec(folder)), 1, group=False)
    return str(folder / "run" / "checkpoints"), loads_LE


def test_a_trace_has_the_loads_of_the_step_that_training_would_take(saved, tmp_path, capsys):
    root, loads_LE = saved
    file = tmp_path / "trace.npz"
    words = [root, str(file), "--calls", "2", "--senders", "4", "--routes"]
    assert main("trace", words) == 0
    assert capsys.readouterr().out.startswith(
        f"{file}: step 3, 2 calls of 4 senders, 2 MoE layers, 4 experts; "
    )
    trace = read_trace(file)
    assert trace.counts_CLSE.shape == (2, 2, 4, 4)
    # A step has 8 sequences in micro-batches of 2: one for each of the 4 senders.
    assert trace.counts_CLSE[0].sum(1).tolist() == loads_LE
    assert trace.counts_CLSE[1].sum(1).tolist() != loads_LE
    assert (trace.counts_CLSE.sum(-1) == 2 * 32 * 2).all(), "sequences, tokens, experts of each"
    assert (trace.recipe, trace.top_k, trace.layers) == ("tiny", 2, (1, 2))
    assert trace.step_C.tolist() == [STEP, STEP]
    assert trace.notes["first_sample"] == SAMPLES
    for place in np.ndindex(2, 2, 4):
        routes_TK = trace.routes_of(*place)
        counts_E = np.bincount(routes_TK.ravel(), minlength=4)
        assert counts_E.tolist() == trace.counts_CLSE[place].tolist()
    assert main("trace", [root, str(tmp_path / "less.npz"), "--calls", "4", "--senders", "2"]) == 0
    less = read_trace(tmp_path / "less.npz")
    assert less.routes_NK is None
    by_micro_batch = [t.counts_CLSE.swapaxes(1, 2).reshape(8, 2, 4) for t in (trace, less)]
    assert (by_micro_batch[0] == by_micro_batch[1]).all()


def _on_rank(root: str, rank: int) -> RoutingTrace:
    return trace_routing(root, calls=2, senders=4, routes=True)


def test_ranks_that_share_the_experts_make_the_trace_of_one(saved):
    (alone,) = run_ranks(partial(_on_rank, saved[0]), 1, group=False)
    first, second = run_ranks(partial(_on_rank, saved[0]), 2, group=False)
    for trace in (first, second):
        assert (trace.counts_CLSE == alone.counts_CLSE).all()
        assert (trace.routes_NK == alone.routes_NK).all()


@pytest.mark.parametrize(
    ("senders", "overrides", "message"),
    [
        (3, [], r"senders \(3\) must be a multiple of the ranks \(2\)"),
        (4, ["parallel.tp=2", "parallel.ep=1"], r"cp \(1\) and tp \(2\) must be 1"),
    ],
)  # fmt: skip
def test_a_layout_that_splits_layers_or_sequences_is_refused(saved, senders, overrides, message):
    manifest = ckpt.read_manifest(saved[0], STEP)
    with pytest.raises(InputError, match=message):
        tracing._spec_of(manifest, overrides, senders, world=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--calls", "0"], "--calls (0) must be at least 1"),
        (["--step", "9"], "step 9"),
        (["--set", "parallel.tp=2"], "world size (1) must be a multiple of"),
        (["--set", "data.path=elsewhere"], "elsewhere"),
        (["THERE"], "must not exist: choose another name"),
        (["trace.txt"], "FILE (trace.txt) must end in .npz, by which a trace is known"),
        (["nowhere/trace.npz"], "its folder does not exist"),
    ],
)
def test_what_cannot_be_traced_is_told_in_a_line(saved, tmp_path, capsys, words, message):
    file = tmp_path / "trace.npz"
    if words == ["THERE"]:
        file.touch()
        words = []
    files = [] if words and not words[0].startswith("--") else [str(file)]
    try:
        code = main("trace", [saved[0], *files, *words])
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not file.exists() or not file.stat().st_size
