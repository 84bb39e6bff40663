"""Real processes on gloo for tests.

``run_ranks(fn, world, *args)`` calls ``fn(rank, *args)`` in ``world`` processes that form a
process group, and returns what each returned. A failure in any rank fails the
test with that rank's traceback; a rank that hangs is killed when the time is up.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import queue
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from typing import Any

# One server imports torch once; ranks fork from it, before any thread of torch exists.
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.preload"])
_started: list[Any] = []

# Within pytest's limit, and long: on a busy machine a rank may wait a minute for its turn.
COLLECTIVE_TIMEOUT = timedelta(seconds=150)
_RANKS_SECONDS = 200.0


def serve_ranks() -> None:
    """Start the server that ranks fork from, which takes seconds, while this process goes on."""
    from tests.support.writers import start_serving

    start_serving()
    forkserver.ensure_running()


def share_server() -> None:
    """In a fork of the process that called :func:`serve_ranks`: use the server of that process.

    multiprocessing would wait for the server as for a child of this process.
    """
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[attr-defined]


def set_rank_environment(rank: int, world: int, port: int) -> None:
    """What torchrun would set."""
    os.environ.update(
        # As under torchrun, the store is the starting process's: nobody can take its port.
        TORCHELASTIC_USE_AGENT_STORE="True",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )


def _rank_main(
    fn: Callable[..., Any], rank: int, world: int, port: int, args: tuple, results: Any,
    backend: str | None,
) -> None:  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    set_rank_environment(rank, world, port)
    try:
        if backend is not None:
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        # Plain bytes: torch's own way shares memory with a process that is about to end.
        results.put((rank, True, pickle.dumps(fn(rank, *args))))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise SystemExit(1) from None


def start_ranks(
    fn: Callable[..., Any], world: int, *args: Any, group: bool = True, backend: str = "gloo"
) -> tuple[list[Any], Any]:
    """Start the ranks and return (processes, results queue), for tests that kill them."""
    import torch.distributed as dist

    from tests.support.writers import start_serving

    start_serving()
    results = _context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results.store = store  # for as long as somebody waits for what the ranks return
    port = store.port
    processes = [
        _context.Process(
            target=_rank_main,
            args=(fn, r, world, port, args, results, backend if group else None),
            daemon=True,
        )
        for r in range(world)
    ]
    for process in processes:
        process.start()
    _started.extend(processes)
    return processes, results


def end_ranks() -> None:
    """Kill what ranks a test has left behind, for instance because it failed."""
    while _started:
        process = _started.pop()
        process.kill()
        process.join()


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = _RANKS_SECONDS,
    group: bool = True,
    backend: str = "gloo",
) -> list[Any]:
    processes, results = start_ranks(fn, world, *args, group=group, backend=backend)
    values: dict[int, Any] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(values) + len(errors) < world:
            try:
                rank, ok, value = results.get(timeout=0.2)
            except queue.Empty:
                assert time.monotonic() < deadline, (
                    f"ranks {set(range(world)) - set(values) - set(errors)} hang"
                )
                assert any(p.is_alive() for p in processes) or not results.empty(), (
                    "a rank died without a word"
                )
                continue
            if ok:
                values[rank] = pickle.loads(value)
            else:
                errors[rank] = value
            if errors:  # the others may be waiting for this one
                deadline = min(deadline, time.monotonic() + 2.0)
    except AssertionError:
        if not errors:
            raise
    finally:
        for process in processes:
            process.join(timeout=5.0 if not errors else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
    assert not errors, "\n".join(f"rank {r}:\n{e}" for r, e in sorted(errors.items()))
    return [values[r] for r in range(world)]
