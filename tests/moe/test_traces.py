"""Traces of routing: written, read, merged over senders, and never half a trace."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe import MoEConfig, MoELayer, RoutingRecorder, RoutingTrace, read_trace, write_trace


def layers(num_layers=2, experts=4, seed=0):
    torch.manual_seed(seed)
    config = MoEConfig(d_model=8, d_ff=8, num_experts=experts, top_k=2)
    return [MoELayer(config) for _ in range(num_layers)]


def record(folder, model, calls, *, sender=0, **options):
    """Records calls with 3, 4, 5 ... tokens; returns what the layers gave, call by call."""
    outputs = []
    torch.manual_seed(100 + sender)
    with RoutingRecorder(folder, recipe="small", seed=7, sender=sender, **options) as recorder:
        for call in range(calls):
            x_TD = torch.randn(3 + call + sender, 8)
            outputs.append([layer(x_TD).aux for layer in model])
            recorder.add(outputs[-1], step=10 + call // 2)
    return outputs


def test_a_recording_is_read_with_the_layers_own_numbers(tmp_path):
    model = layers()
    by_sender = [
        record(tmp_path, model, 5, sender=sender, routes=True, calls_per_file=2, layers=(1, 3),
               notes={"text": "random"})
        for sender in (1, 0)
    ]  # fmt: skip
    trace = read_trace(tmp_path)
    assert trace.counts_CLSE.shape == (5, 2, 2, 4)
    assert trace.counts_CLSE.dtype == trace.step_C.dtype == np.int64
    assert trace.step_C.tolist() == [10, 10, 11, 11, 12]
    assert (trace.top_k, trace.layers, trace.senders, trace.num_experts) == (2, (1, 3), (0, 1), 4)
    assert (trace.recipe, trace.seed, trace.notes) == ("small", 7, {"text": "random"})
    for sender, outputs in zip((1, 0), by_sender, strict=True):
        for call, auxes in enumerate(outputs):
            for layer, aux in enumerate(auxes):
                counts_E = trace.counts_CLSE[call, layer, sender]
                assert counts_E.tolist() == aux.tokens_per_expert_E.tolist()
                routes_TK = trace.routes_of(call, layer, sender)
                assert routes_TK.dtype == np.int16
                assert routes_TK.tolist() == aux.topk_indices_TK.tolist()
                assert np.bincount(routes_TK.ravel(), minlength=4).tolist() == counts_E.tolist()
    assert len(list(tmp_path.glob("*.npz"))) == 6


def test_one_file_holds_all_senders_and_is_small(tmp_path):
    counts = np.arange(3 * 2 * 2 * 4).reshape(3, 2, 2, 4) * 10
    trace = RoutingTrace(
        counts_CLSE=counts, step_C=np.array([1, 1, 2]), top_k=2, layers=(0, 1), senders=(0, 1)
    )
    write_trace(tmp_path / "trace.npz", trace)
    again = read_trace(tmp_path / "trace.npz")
    assert again.counts_CLSE.dtype == np.int64
    assert (again.counts_CLSE == counts).all()
    assert np.load(tmp_path / "trace.npz")["counts"].dtype == np.uint16
    with pytest.raises(ValueError, match="routes=True"):
        again.routes_of(0, 0, 0)
    with pytest.raises(FileExistsError, match="must not exist"):
        write_trace(tmp_path / "trace.npz", trace)


def test_a_recording_without_layers_or_calls_leaves_no_file(tmp_path):
    with RoutingRecorder(tmp_path) as recorder:
        pass
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match="must have a file of a routing trace"):
        read_trace(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.npz")
    with pytest.raises(ValueError, match=r"layers \(with experts and top_k \[\]\)"):
        recorder.add([], step=1)


def test_calls_that_a_killed_sender_has_not_written_are_left_out(tmp_path):
    model = layers()
    record(tmp_path, model, 5, sender=0, routes=True, calls_per_file=2)
    record(tmp_path, model, 5, sender=1, routes=True, calls_per_file=2)
    (tmp_path / "sender-00001-000000004.npz").unlink()
    trace = read_trace(tmp_path)
    assert trace.counts_CLSE.shape[0] == len(trace.step_C) == 4
    assert len(trace.routes_NK) == trace.tokens_CLS.sum() == 2 * (3 + 4 + 5 + 6 + 4 + 5 + 6 + 7)
    (tmp_path / "sender-00001-000000000.npz").unlink()
    with pytest.raises(ValueError, match="must begin with call 0, the next one begins with 2"):
        read_trace(tmp_path)


def test_half_a_file_is_no_trace(tmp_path):
    record(tmp_path, layers(), 2, routes=True)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    for size in (0, 1, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(ValueError, match="must be a whole routing trace"):
            read_trace(tmp_path)
    with file.open("wb") as other:
        np.save(other, np.zeros(3))
    with pytest.raises(ValueError, match="must be a whole routing trace"):
        read_trace(tmp_path)
    middle = len(content) // 3
    file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(ValueError, match="must be a whole routing trace"):
        read_trace(tmp_path)


def test_a_file_takes_its_name_when_it_is_whole(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr("os.fsync", lambda handle: names.append(sorted(tmp_path.glob("*.npz"))))
    record(tmp_path, layers(), 1)
    assert names[0] == []
    assert len(names[1]) == 1

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        record(tmp_path / "other", layers(), 1)
    assert not list((tmp_path / "other").iterdir()), "neither a file nor what was begun"


def test_routes_that_were_not_counted_are_refused(tmp_path):
    record(tmp_path, layers(), 2, routes=True)
    trace = read_trace(tmp_path)
    experts = trace.num_experts
    for name, change, text in (
        ("other", (trace.routes_NK[0, 0] + 1) % experts, "counts must be those of the experts"),
        ("none", experts, "counts must be those of the experts"),
        ("beyond", experts + 1, rf"in routes \({experts + 1}\) must be at most {experts}"),
    ):
        routes_NK = trace.routes_NK.copy()
        routes_NK[0, 0] = change
        file = tmp_path / name / "trace.npz"
        file.parent.mkdir()
        write_trace(file, replace(trace, routes_NK=routes_NK))
        with pytest.raises(ValueError, match=text):
            read_trace(file)


def test_files_that_do_not_go_together_are_refused(tmp_path):
    record(tmp_path / "a", layers(), 3)
    with pytest.raises(FileExistsError, match="no trace of sender 0"):
        RoutingRecorder(tmp_path / "a")
    trace = read_trace(tmp_path / "a")
    for change, text in (
        ({"recipe": "big"}, "recipe .*must be equal in all files"),
        ({"step_C": trace.step_C + 1}, "steps of senders"),
        ({"senders": (0,)}, "must begin with call 3"),
        ({"senders": (0, 1), "counts_CLSE": trace.counts_CLSE.repeat(2, 2)}, "must differ"),
    ):
        other = tmp_path / f"a/{len(text)}.npz"
        write_trace(other, replace(trace, **{"senders": (1,), **change}))
        with pytest.raises(ValueError, match=text):
            read_trace(tmp_path / "a")
        other.unlink()
    with pytest.raises(ValueError, match="must have the lengths of step_C"):
        replace(trace, senders=(0, 1))
    with pytest.raises(ValueError, match="both"):
        replace(trace, routes_NK=np.zeros((1, 2), np.int16))


def test_a_recorder_refuses_calls_of_another_model(tmp_path):
    recorder = RoutingRecorder(tmp_path, routes=True)
    x_TD = torch.randn(3, 8)
    recorder.add([layer(x_TD).aux for layer in layers()], step=1)
    with pytest.raises(ValueError, match=r"\[1, 4, 2\] must be those .*\[2, 4, 2\]"):
        recorder.add([layer(x_TD).aux for layer in layers(1)], step=1)

    class Many:
        tokens_per_expert_E = torch.zeros(40_000, dtype=torch.int64)
        topk_indices_TK = torch.zeros(1, 2, dtype=torch.int64)

    with pytest.raises(ValueError, match=r"experts \(40000\) .* at most 32767"):
        RoutingRecorder(tmp_path / "b", routes=True).add([Many()], step=1)


def test_a_newer_version_is_named(tmp_path):
    record(tmp_path, layers(), 1)
    (file,) = tmp_path.iterdir()
    arrays = dict(np.load(file))
    arrays["meta"] = np.array(json.dumps(json.loads(str(arrays["meta"])) | {"version": 2}))
    np.savez(file, **arrays)
    with pytest.raises(ValueError, match=r"version \(2\) must be at most 1"):
        read_trace(tmp_path)


def test_a_trace_is_read_without_torch(tmp_path):
    record(tmp_path, layers(), 1)
    text = "import sys, moe; moe.read_trace(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", text, str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda arrays: arrays.pop("counts"), "must be a whole routing trace: counts is missing"),
        (
            lambda arrays: arrays.update(counts=arrays["counts"].astype(int) - 2),
            r"counts \(-1\) must be at least 0",
        ),
    ],
)
def test_counts_that_cannot_be_are_refused(change, said, tmp_path):
    counts = np.ones((1, 1, 1, 4), np.int64)
    trace = RoutingTrace(counts_CLSE=counts, step_C=np.array([1]), top_k=2, layers=(0,),
                         senders=(0,))  # fmt: skip
    write_trace(tmp_path / "good.npz", trace)
    with np.load(tmp_path / "good.npz") as file:
        arrays = {name: file[name].copy() for name in file.files}
    change(arrays)
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=said):
        read_trace(tmp_path / "bad.npz")
