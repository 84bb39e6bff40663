"""From documents to batches, in this order through the files:

    copy_source                      objects of a store, copied to this machine
    files, unit, columns, megatron   the files of a source, cut into units of work
    documents, filters               the documents of a unit, and those that are left out
    tokenizer, parts, worker(s)      their tokens: a part for each unit, in several processes
    shards, prepare, manifest        the parts in order, as shards; the manifest, written last
    location, cache                  in a folder or an object store; shards kept on a node's disk
    verify                           every byte against the manifest
    corpora, config, weights         all sources and validation sets of a run
    sequences                        the sequences of a split (through mmap); of several sources
    blend, order                     sample n -> source -> sequence, one permutation an epoch
    loader, division, skipped        sample n to n + B -> the micro-batches of a step on each rank

The manifest is the contract between preparation and training. It names every shard with its tokens
and its SHA-256, and has one hash of all, the fingerprint. Training never looks at the source.

Sample n is a pure function of (fingerprints, seed, n) and of the blend, whose changes are in every
checkpoint. No state is stored but the next n: any
number of ranks, any resize and any resume see the same sequence. A rank's share of a step is cut
from the step's samples by :func:`pretrain.data.loader.micro_batches`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
