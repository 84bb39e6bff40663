"""A rendezvous backend of torchrun, ``--rdzv-backend convoy``: who joins a launch, and when.

The backend is torchrun's own (c10d by default) with three rules of an operator's:

- A machine on the exclude list does not join.
- A machine that comes while all members are there joins at once, at the next checkpoint, or when
  the next member is lost. Without this rule, torchrun starts all ranks again at once.
- Ranks are numbered by the machines' places in the network, where ``CONVOY_NODE_ORDER`` has them:
  machines of one rack or block get ranks that follow each other. Without it torchrun numbers
  machines by their names, as text: ``n10`` comes before ``n2``.

Keys of ``--rdzv-conf``, beside those of the inner backend:

===============  =====================================================================
``scale_up``     ``at_once`` (default), ``at_checkpoint`` or ``never``
``run_dir``      the run's folder: its ``exclude.json`` is the exclude list
``checkpoints``  the run's checkpoint folder; ``checkpoints/`` in ``run_dir`` by default
``store``        the inner backend: ``c10d`` (default) or ``etcd-v2``
===============  =====================================================================

Over etcd the ranks train on while etcd does not answer: :mod:`cluster.members.etcd_outage`.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A public, documented name that torch.distributed does not mark as exported for type checkers.
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from cluster.members.etcd_outage import OutageBackend, etcd_handler
from cluster.members.exclude_list import EXCLUDE_LIST, node_name, read_exclusions

_OWN_KEYS = ("scale_up", "run_dir", "checkpoints", "store")
SCALE_UP = ("at_once", "at_checkpoint", "never")
STORES = ("c10d", "etcd-v2")
"""torchrun's legacy backend ``etcd`` keeps another state, which does not say who is there."""
_PAUSE_SECONDS = 1.0
"""Between two questions to a store that does not answer."""


class MembersHandler(RendezvousHandler):
    """A rendezvous that asks ``inner`` for all but the three rules above.

    Args:
        inner: torchrun's own rendezvous.
        scale_up: one of :data:`SCALE_UP`.
        run_dir: the run's folder; None for no exclude list.
        checkpoints: the run's checkpoint folder, for ``at_checkpoint``.
        local_addr: the address of this machine for others; None for its name.
        backend: the state of ``inner``, where its store may be away for some time.
    """

    def __init__(
        self,
        inner: Any,
        scale_up: str,
        run_dir: Path | None = None,
        checkpoints: Path | None = None,
        local_addr: str | None = None,
        backend: OutageBackend | None = None,
    ) -> None:
        self.inner, self.scale_up, self.run_dir = inner, scale_up, run_dir
        self.checkpoints, self.local_addr = checkpoints, local_addr
        self._excluded = False
        self._members = 0
        self._step_at_arrival: int | None = None
        self._backend = backend
        self._ask_again_at = 0.0

    def get_backend(self) -> str:
        """The name that ``--rdzv-backend`` has."""
        return "convoy"

    @property
    def use_agent_store(self) -> bool:
        """As the inner rendezvous."""
        return bool(self.inner.use_agent_store)

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next start. Raises RendezvousError on a machine of the exclude list."""
        if self.run_dir is not None:
            path, name = self.run_dir / EXCLUDE_LIST, node_name()
            for one in read_exclusions(path):
                if one.node == name:
                    self._excluded = True
                    raise RendezvousError(f"{name} is on the exclude list {path}: {one.reason}")
        info: RendezvousInfo = self._in_order(self._next_of_inner())
        self._members, self._step_at_arrival = info.world_size, None
        return info

    def _next_of_inner(self) -> RendezvousInfo:
        if self._backend is None:
            found: RendezvousInfo = self.inner.next_rendezvous()
            return found
        self._backend.waits = True
        try:
            found = self.inner.next_rendezvous()
        finally:
            self._backend.waits = False
        return found

    def _in_order(self, info: RendezvousInfo) -> RendezvousInfo:
        """The machines of a start, numbered by their places in the network."""
        store = PrefixStore("node-order", info.store)
        store.set(str(info.rank), json.dumps(node_place()))
        places = [json.loads(store.get(str(rank))) for rank in range(info.world_size)]
        order = sorted(range(info.world_size), key=lambda rank: (natural(places[rank]), rank))
        if order == list(range(info.world_size)):
            return info
        rank = order.index(info.rank)
        # The machine of the first rank serves the ranks' store.
        bootstrap = RendezvousStoreInfo.build(rank, store, self.local_addr)
        return RendezvousInfo(info.store, rank, info.world_size, bootstrap)

    def num_nodes_waiting(self) -> int:
        """The machines for which all ranks are to start again.

        A member that waits was restarted by its torchrun, and counts at once. While a store does
        not answer that may be away, nobody can have come.
        """
        if time.monotonic() < self._ask_again_at:
            return 0
        try:
            waiting = int(self.inner.num_nodes_waiting())
        except RendezvousConnectionError:
            if self._backend is None:
                raise
            self._ask_again_at = time.monotonic() + _PAUSE_SECONDS
            return 0
        # The state that the line above has just read.
        here = len(self.inner._state_holder.state.participants)
        if not waiting or here < self._members or self.scale_up == "at_once":
            self._step_at_arrival = None
            return waiting
        if self.scale_up == "never" or self.checkpoints is None:
            return 0
        newest = _newest_step(self.checkpoints)
        if self._step_at_arrival is None:
            self._step_at_arrival = newest
        return waiting if newest > self._step_at_arrival else 0

    def is_closed(self) -> bool:
        """As the inner rendezvous."""
        return bool(self.inner.is_closed())

    def set_closed(self) -> None:
        """As the inner rendezvous."""
        self.inner.set_closed()

    def get_run_id(self) -> str:
        """As the inner rendezvous."""
        return str(self.inner.get_run_id())

    def shutdown(self) -> bool:
        """Close the rendezvous for all machines; an excluded machine leaves it to the others.

        The others see the excluded machine as lost when its heartbeats end with its process.
        """
        return True if self._excluded else bool(self.inner.shutdown())


def node_place() -> str:
    """The place of this machine in the network, as ``rack2.n9``; empty where it is not known."""
    return os.environ.get("CONVOY_NODE_ORDER", "")


def natural(text: str) -> list[tuple[bool, int, str]]:
    """A key that sorts numbers in a text as numbers: ``rack2.n9`` comes before ``rack10.n1``."""
    parts = re.split(r"([0-9]+)", text)
    return [(p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in parts]


def _newest_step(checkpoints: Path) -> int:
    """The newest committed step in a folder, by the names of its manifests; -1 for none."""
    names = [path.stem for path in (checkpoints / "manifests").glob("step-*.json")]
    return max((int(name.removeprefix("step-")) for name in names), default=-1)


def _create(params: RendezvousParameters) -> RendezvousHandler:
    scale_up = params.get("scale_up", "at_once")
    if scale_up not in SCALE_UP:
        raise ValueError(f"rdzv-conf scale_up ({scale_up}) must be one of {', '.join(SCALE_UP)}")
    store = params.get("store", "c10d")
    if store not in STORES:
        raise ValueError(f"rdzv-conf store ({store}) must be one of {', '.join(STORES)}")
    run_dir = Path(params.config["run_dir"]) if params.get("run_dir") else None
    folder = params.get("checkpoints")
    checkpoints = Path(folder) if folder else run_dir and run_dir / "checkpoints"
    if scale_up == "at_checkpoint" and checkpoints is None:
        raise ValueError("rdzv-conf scale_up (at_checkpoint) needs run_dir or checkpoints")
    if scale_up == "at_checkpoint" and "://" in str(folder):
        raise ValueError(
            f"rdzv-conf scale_up (at_checkpoint) must be at_once or never with checkpoints in an "
            f"object store ({folder}), which machines that train do not look into"
        )
    inner = RendezvousParameters(
        backend=store,
        endpoint=params.endpoint,
        run_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        local_addr=params.local_addr,
        **{key: value for key, value in params.config.items() if key not in _OWN_KEYS},
    )
    if store == "etcd-v2":
        handler, backend = etcd_handler(inner)
        return MembersHandler(
            handler, scale_up, run_dir, checkpoints, params.local_addr, backend=backend
        )
    of_torchrun = rendezvous_handler_registry.create_handler(inner)
    return MembersHandler(of_torchrun, scale_up, run_dir, checkpoints, params.local_addr)


def convoy_rendezvous() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What the entry point ``torchrun.handlers`` names: torchrun calls what this returns."""
    return _create
