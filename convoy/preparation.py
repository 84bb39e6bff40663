"""What is done for a run before its ranks start: its corpus, and the state to begin from."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from corpus.config import DataConfig
from corpus.manifest import read_manifest
from corpus.prepare import HoldOut, prepare_corpus
from pretrain.checkpoint import remove_run, roll_back
from pretrain.data import Corpora, Corpus, checked_corpora, pack_corpus, verify_corpus
from pretrain.errors import InputError
from pretrain.observe import say
from pretrain.parts.faults import forget_faults
from pretrain.runtime import lock_run
from pretrain.spec import JobSpec


def prepare_corpora(
    data: DataConfig,
    vocab_size: int,
    say: Callable[[str], None] = print,
    *,
    processes: int | None = None,
    count_files: bool = False,
) -> Corpora:
    """Prepare what is not there yet; see :func:`corpus.prepare.prepare_corpus`."""

    def prepared(name: str, one: DataConfig, hold_out: HoldOut) -> Corpus:
        manifest = prepare_corpus(
            one, vocab_size, say, processes=processes, hold_out=hold_out, count_files=count_files
        )
        return Corpus(name, one, manifest)

    sources = tuple(prepared(name, one, "some") for name, one in data.each_source.items())
    validation = tuple(prepared(name, one, "all") for name, one in data.each_validation.items())
    corpora = checked_corpora(Corpora(data, sources, validation))
    if data.packing == "best_fit":
        for one in corpora.sources:
            pack_corpus(one.data, one.manifest, say)
    return corpora


def prepare(
    spec: JobSpec,
    *,
    reset: bool = False,
    load_step: int | None = None,
    processes: int | None = None,
) -> None:
    """Prepare the corpus of a spec, and change what the next start of the run begins from.

    Args:
        spec: the run.
        reset: remove the run's log, summary, status and checkpoints; the next start is a new run.
        load_step: roll the run back: the next start resumes from this step. Newer checkpoints are
            moved to ``away/``, and checkpoints in nodes' memory and on their disks are not taken.
        processes: how many read and tokenize the documents; chosen by size where None.

    Raises InputError where the corpus cannot be made, another run holds the folder, there is no
    such step, or a file cannot be removed.
    """
    corpora = prepare_corpora(
        spec.data, spec.model.vocab_size, say, processes=processes, count_files=True
    )
    for line in corpora.epochs_lines(spec.batch.samples_of(spec.train.steps, spec.data.seq_len)):
        say(line)
    if not reset and load_step is None:
        return
    with lock_run(spec):
        try:
            if load_step is not None:
                roll_back(spec.checkpoint_path, load_step, say)
                return
            remove_run(spec.checkpoint_path)
            for name in ("log.jsonl", "summary.json", "status.json", "health.json"):
                (spec.run_path / name).unlink(missing_ok=True)
            forget_faults(spec.run_path)
            shutil.rmtree(spec.run_path / "flight", ignore_errors=True)
        except OSError as error:
            raise InputError(
                f"checkpoint.path ({spec.checkpoint_path}) cannot be changed: {error.strerror}"
            ) from None


def verify_data(spec: JobSpec) -> None:
    """Compare every byte of the spec's prepared corpora with their manifests.

    Raises InputError, naming the first file that differs.
    """
    for one in (*spec.data.each_source.values(), *spec.data.each_validation.values()):
        manifest = read_manifest(one.path)
        size = verify_corpus(one.path, manifest)
        shards = len(manifest.train) + len(manifest.val)
        say(f"{one.path}: {shards} shards, {size / 1e6:,.1f} MB as the manifest says")
