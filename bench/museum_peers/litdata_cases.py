"""Streams of LitData: epochs that end early go on in the data.

Legend: none, the streams yield numbers.
"""

from __future__ import annotations

import tempfile

from bench.museum_peers.frame import Answer, peer_case

WITH = ("lightning-utilities==0.15.2", "tifffile==2025.10.16")


@peer_case(
    "Lightning-AI/litData#760",
    went_wrong="From the third epoch on, epochs that end early read the second's samples again.",
    wrong=("litdata==0.2.58", *WITH),
    fixed=("litdata==0.2.76", *WITH),
)
def short_epochs_go_on_in_the_data() -> Answer:
    from litdata import ParallelStreamingDataset, StreamingDataLoader, StreamingDataset
    from litdata.streaming import Cache

    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(input_dir=folder, chunk_size=1)
        for number in range(10):
            cache[number] = number
        cache.done()
        cache.merge()
        stream = ParallelStreamingDataset([StreamingDataset(folder)], length=100, resume=True)
        loader = StreamingDataLoader(stream, batch_size=1, num_workers=0)
        epochs = []
        for _ in range(3):
            batches = iter(loader)
            epochs.append([int(next(batches)[0]) for _ in range(3)])
    return Answer(
        epochs == [[0, 1, 2], [3, 4, 5], [6, 7, 8]], f"three epochs of three samples: {epochs}"
    )
