"""What a checkpoint of a run holds besides arrays: the manifest's state."""

from __future__ import annotations

import torch

from ckpt import SaveInfo
from pretrain.checkpoint.run_id import save_id
from pretrain.job import Job
from pretrain.observe import code_version
from pretrain.state import Progress, RunState


def save_info(job: Job, progress: Progress) -> SaveInfo:
    """What besides arrays a checkpoint after ``progress.step`` steps holds."""
    spec = job.spec
    return SaveInfo(
        save_id=save_id(job.runtime.launch_id, progress.step, progress.health.go_backs),
        step=progress.step,
        topology=job.topology,
        state=RunState(
            progress=progress,
            corpus=job.corpora.fingerprint,
            tokenizer=job.corpora.tokenizer_fingerprint,
            sources={source.name: source.manifest.fingerprint for source in job.corpora.sources},
            blend=None if job.loader.blend is None else job.loader.blend.as_json(),
            parts={p.name: state for p in job.parts if (state := p.state()) is not None},
            machines=list(job.machines),
            threads=torch.get_num_threads() if spec.train.exact else None,
        ).as_dict()
        | {"code": code_version()},
        spec=spec.as_dict(),
        spec_hash=spec.hash,
        compression=spec.checkpoint.compression,
    )
