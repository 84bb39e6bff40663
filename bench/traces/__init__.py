"""Traces of natural routing: counts of experts early, in the middle and late in three small runs.

    from moe import read_trace
    trace = read_trace(TRACES / "switch.npz")  # counts_CLSE, step_C; see docs/layer.md

``none`` has nothing that balances the experts, ``switch`` the Switch loss, and ``bias`` sigmoid
scores with a bias for each expert. ``python -m bench.traces`` trains the runs and writes the files.
"""

from pathlib import Path

TRACES = Path(__file__).parent
