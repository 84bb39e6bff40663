"""Supervised tuning: runs on conversations, whose answers alone are learnt, with adapters."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import ckpt
from ckpt.rewrite import CheckpointSource
from convoy.commands.command_line import main
from convoy.commands.prepare import main as prepare
from corpus.config import DataConfig
from corpus.manifest import read_manifest
from pretrain.data.best_fit import read_packing
from pretrain.data.corpora import open_corpora
from pretrain.model import meta_decoder
from tests.runs.test_runs import launch
from tests.support.jobs import events, make_spec, write_spec

SUMS = [
    [
        {"role": "user", "content": f"What is {a} + {b}?"},
        {"role": "assistant", "content": f"{a} + {b} = {a + b}."},
    ]
    for a in range(9)
    for b in range(9)
]


def write_talks(folder: Path) -> dict[str, Any]:
    """The conversations, and ``[data]`` of a run on them."""
    folder.mkdir()
    raw = "".join(json.dumps({"messages": talk}) + "\n" for talk in SUMS)
    (folder / "talks.jsonl").write_text(raw)
    return {
        "source": str(folder / "talks.jsonl"), "path": str(folder / "corpus"), "seq_len": 128,
        "text_field": "messages", "chat": {}, "packing": "best_fit", "document_mask": True,
    }  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tuning")
    fields = write_talks(folder / "talks")
    assert prepare([str(write_spec(folder, data=fields))]) == 0
    return fields


def test_a_run_learns_answers_on_any_number_of_ranks(data, tmp_path):
    manifest = read_manifest(data["path"])
    epoch = read_packing(DataConfig.model_validate(data), manifest).sequences
    logs = []
    for world, parallel in ((1, {}), (2, {"ep": 2})):
        folder = tmp_path / str(world)
        folder.mkdir()
        batch, train = {"global_batch_size": epoch, "micro_batch_size": 4}, {"steps": 2}
        spec = write_spec(folder, data=data, parallel=parallel, train=train, batch=batch)
        code, _, err = launch(spec, world)
        assert code == 0, err
        logs.append(events(folder / "run", "step"))
    tokens = [np.fromfile(Path(data["path"]) / shard.file, "<i4") for shard in manifest.train]
    for alone, together in zip(*logs, strict=True):
        assert alone["loss"] == pytest.approx(together["loss"], rel=1e-5)
        # A step is an epoch: each token of an answer once.
        for step in (alone, together):
            assert step["target_tokens"] == int((np.concatenate(tokens) >= 0).sum())


TUNE: dict[str, Any] = {"lora": {"on": ["experts", "router", "attention", "dense"]}}


@pytest.fixture(scope="module")
def base(data, tmp_path_factory) -> Path:
    """The checkpoints of a run that all parameters learnt in."""
    folder = tmp_path_factory.mktemp("base")
    code, _, err = launch(write_spec(folder, data=data), 1)
    assert code == 0, err
    return folder / "run" / "checkpoints"


def arrays_of(root: Path) -> dict[str, np.ndarray[Any, Any]]:
    source = CheckpointSource(root, ckpt.read_manifest(root))
    return {
        name: source.read_box(name, tuple((0, size) for size in array.shape))
        for name, array in source.arrays.items()
        if name.startswith("model/")
    }


def test_adapters_are_tuned_on_two_ranks_and_transformers_has_what_they_learnt(
    data, base, tmp_path
):
    transformers = pytest.importorskip("transformers")
    spec = write_spec(
        tmp_path, data=data, init={"checkpoint": str(base)}, tune=TUNE, parallel={"ep": 2},
        optimizer={"lr": 0.03},
    )  # fmt: skip
    code, out, err = launch(spec, 2)
    assert code == 0, err
    (moved,) = events(tmp_path / "run", "moved")
    assert moved["step"] == 1
    assert moved["experts"] == 8
    assert moved["trained_experts"] > 0
    assert "step 1: " in out
    # The model that was tuned keeps its bits; the adapters moved.
    before, after = arrays_of(base), arrays_of(tmp_path / "run" / "checkpoints")
    assert all(np.array_equal(values, after[name]) for name, values in before.items())
    adapters = {name for name in after if "/lora/" in name}
    assert after.keys() == before.keys() | adapters
    assert all(np.abs(after[name]).max() > 0 for name in adapters)
    # Moments are of the adapters alone.
    names = ckpt.read_manifest(tmp_path / "run" / "checkpoints").tensors
    moments = {name for name in names if name.startswith("optimizer/")}
    kinds = ("exp_avg", "exp_avg_sq")
    assert moments == {f"optimizer/{k}/{n.removeprefix('model/')}" for k in kinds for n in adapters}

    tuned, exported = str(tmp_path / "run" / "checkpoints"), str(tmp_path / "hf")
    assert main(arguments=["convert", "export", tuned, exported]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    manifest = read_manifest(data["path"])
    (shard,) = manifest.val
    tokens = torch.from_numpy(np.fromfile(Path(data["path"]) / shard.file, "<i4")).long()
    ends = np.fromfile(Path(data["path"]) / shard.ends_file, "<i8").tolist()
    nats, count = 0.0, 0
    for start, end in pairwise([0, *ends]):
        ids, targets = tokens[start:end], tokens[start + 1 : end]
        ids = torch.where(ids < 0, ~ids, ids)
        logits = model(ids.unsqueeze(0)).logits[0, :-1].detach()
        nats += float(cross_entropy(logits[targets >= 0], targets[targets >= 0], reduction="sum"))
        count += int((targets >= 0).sum())
    scored = [event for event in events(tmp_path / "run", "eval") if event["whole"]]
    assert scored[-1]["loss"] == pytest.approx(nats / count, rel=1e-4)
    # The doctor knows that a tuned run has moments of its adapters alone, and adds these.
    for first, other in ((tuned, str(base)), (tuned, exported), (exported, str(base))):
        assert main(arguments=["inspect", "doctor", first, "--against", other]) == 0
    # What is asked of the model by the template that the export has is what it was trained on.
    (talk,) = (talk for talk in SUMS if talk[0]["content"] == "What is 3 + 4?")
    asked = tokenizer.apply_chat_template(talk[:1], add_generation_prompt=True, tokenize=False)
    assert asked == "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer(asked, return_tensors="pt")
    said = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0].tolist()
    # The end token ends what the model says.
    assert len(said) - prompt["input_ids"].shape[1] == 4 or said[-1] == tokenizer.eos_token_id


def test_held_out_answers_are_scored_with_their_questions(data):
    own = DataConfig.model_validate({**data, "seq_len": 40, "shard_tokens": 20_000})
    corpora = open_corpora(own, 320)
    (sequences,) = corpora.held_out_sequences().values()
    manifest, rows = corpora.sources[0].manifest, sequences.read(range(len(sequences)))
    assert len(rows) == manifest.val_documents
    tokens = np.fromfile(Path(data["path"]) / manifest.val[0].file, "<i4")
    texts = [row[: int((row != -1).nonzero()[0][-1]) + 1] for row in rows]
    assert np.concatenate(texts).tolist() == tokens.tolist()


def test_a_rate_that_rounds_updates_away_is_no_error(data, base, tmp_path):
    fields = {
        "data": data, "init": {"checkpoint": str(base)}, "optimizer": {"lr": 1e-8},
        "tune": {"learn": ["*norm*", "head.weight"]}, "parallel": {"pp": 2},
        "schedule": {"warmup_steps": 0},
    }  # fmt: skip
    spec = write_spec(tmp_path, **fields)
    code, _, err = launch(spec, 2)
    assert code == 0, err
    (moved,) = events(tmp_path / "run", "moved")
    made = make_spec(tmp_path, **fields)
    names = [name for name, _ in meta_decoder(made.model, made.moe).named_parameters()]
    assert moved["parameters"] == len(names), "those of both stages"


def test_a_tuned_run_resumes_to_the_bit_on_another_layout(data, base, tmp_path):
    fields = {"data": data, "init": {"checkpoint": str(base)}, "tune": TUNE}
    runs = []
    for name, stops in (("whole", []), ("resumed", [3])):
        folder = tmp_path / name
        folder.mkdir()
        spec = write_spec(folder, **fields)
        for stop in stops:
            assert launch(spec, 1, "train.steps=6", stop_after=stop)[0] == 75
        assert launch(spec, 1)[0] == 0
        runs.append(arrays_of(folder / "run" / "checkpoints"))
    assert all(np.array_equal(values, runs[1][name]) for name, values in runs[0].items())


def test_what_cannot_be_tuned_is_refused(data, base, tmp_path, capfd):
    for tune, message in (
        ({}, "tune must have learn or a table"),
        ({"learn": ["layers.*.nothing"]}, "tune.learn (layers.*.nothing) must be the name of a"),
        ({"lora": {"on": ["sideways"]}}, "tune.lora: on (sideways) must be experts or router or"),
        ({"lora": {}, "exact": True}, "train.exact (true) must be false where tune.lora.on has"),
    ):
        train = {"exact": tune.pop("exact", False)}
        init = {"checkpoint": str(base)}
        spec = write_spec(tmp_path, data=data, init=init, tune=tune, train=train)
        code, _, err = launch(spec, 1)
        assert code == 2
        assert message in err
    fields = {"checkpoint": str(tmp_path / "tuned" / "run" / "checkpoints")}
    (tmp_path / "tuned").mkdir()
    tuned = write_spec(tmp_path / "tuned", data=data, init={"checkpoint": str(base)}, tune=TUNE)
    assert launch(tuned, 1)[0] == 0
    code, _, err = launch(write_spec(tmp_path, data=data, init=fields), 1)
    assert code == 2
    assert "checkpoint has adapters: merge them by convoy convert export and import" in err
