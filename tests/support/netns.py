"""Hosts with names and addresses of their own on this machine, joined by a switch; Linux and root.

Each host is a set of namespaces: network, mounts, process ids, IPC and host name. It has one
interface, ``eth0``, its own /dev/shm and its own /etc/hosts. Folders on disk are those of this
machine, as on a file system that all hosts share.

A host lives as long as its first process, and the kernel ends everything in it with that process.
The first process ends when its standard input does. So neither a process nor an interface is left
behind, not even where the tests are killed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_UNSHARE = (
    "unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--mount-proc", "--fork",
    "--kill-child=SIGKILL", "--",
)  # fmt: skip
# CHLD ignored: the kernel then removes processes that have ended and that nobody waits for.
_FIRST_PROCESS = """
set -e
trap '' CHLD
ip link set lo up
mount -t tmpfs tmpfs /dev/shm
hostname "$1"
[ -z "$2" ] || mount --bind "$2" /etc/hosts
echo ready
exec cat > /dev/null
"""


class _Namespaces:
    """Namespaces that end with :meth:`close`, or with this process."""

    def __init__(self, name: str, hosts: str = "") -> None:
        self.name = name
        self._outer = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _FIRST_PROCESS, "sh", name, hosts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._outer.stdout is not None
        if self._outer.stdout.readline() != b"ready\n":
            _, error = self._outer.communicate()
            raise OSError(error.decode().strip().splitlines()[-1])
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        (self.first,) = map(int, children.read_text().split())

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` inside."""
        inside = ["nsenter", f"--target={self.first}", "--net", "--mount", "--uts", "--ipc"]
        return [*inside, "--pid", f"--wd={Path.cwd()}", "--", *command]

    def run(self, *command: str) -> str:
        """Run a short command inside; returns its output. Raises OSError where it fails."""
        return _output(self.command(command))

    def ip(self, *arguments: str) -> None:
        """Run ``ip`` in the network alone: process ids are those of this machine. Raises OSError
        where it fails."""
        _output(["nsenter", f"--target={self.first}", "--net", "--", "ip", *arguments])

    def close(self) -> None:
        """End every process inside, and with them the namespaces."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.first, signal.SIGKILL)
        self._outer.communicate()


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Host(_Namespaces):
    """One host of a :class:`Network`. What ``eth0`` has sent is in its /proc/net/dev; /sys shows
    the interfaces of this machine."""

    def __init__(self, network: Network, name: str, address: str, port: str, hosts: Path) -> None:
        super().__init__(name, str(hosts))
        self.address, self.port, self._network = address, port, network
        self.processes: list[subprocess.Popen[bytes]] = []
        switch = network.switch
        pair = ["type", "veth", "peer", "name", "eth0", "netns", str(self.first)]
        switch.ip("link", "add", port, *pair)
        switch.ip("link", "set", port, "master", "switch0", "up")
        self.ip("address", "add", f"{address}/24", "dev", "eth0")
        self.ip("link", "set", "eth0", "up")

    def start(self, command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen:
        """Start a process on this host; its output goes to the end of ``log``."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.command(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            )
        self.processes.append(process)
        return process

    def unplug(self) -> None:
        """Take the cable out: the interface has no carrier until :meth:`plug_in`."""
        self._network.switch.ip("link", "set", self.port, "down")

    def plug_in(self) -> None:
        """Undo :meth:`unplug`."""
        self._network.switch.ip("link", "set", self.port, "up")

    def silence(self) -> None:
        """Let the switch drop every frame from and to this host, which cannot see that."""
        self._network.switch.ip("link", "set", self.port, "nomaster")

    def hear(self) -> None:
        """Undo :meth:`silence`."""
        self._network.switch.ip("link", "set", self.port, "master", "switch0")

    def close(self) -> None:
        """End the host, as a loss of power does: nothing that its sockets say gets out."""
        with contextlib.suppress(OSError):
            self._network.switch.ip("link", "delete", self.port)
        super().close()
        for process in self.processes:
            process.kill()
            process.wait()


class Network:
    """Hosts by name, in one subnet.

    Args:
        names: of the hosts.
        own_name_is_loopback: each host resolves its own name to 127.0.1.1, as Debian sets it up.
    """

    def __init__(self, names: Sequence[str], own_name_is_loopback: bool = False) -> None:
        self.hosts: dict[str, Host] = {}
        self._loopback = own_name_is_loopback
        self._addresses = {name: f"10.77.0.{i}" for i, name in enumerate(names, 1)}
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self._started = 0
        self.switch = _Namespaces("switch")
        try:
            # No delay before a port that comes up forwards.
            bridge = ["type", "bridge", "forward_delay", "0", "stp_state", "0"]
            self.switch.ip("link", "add", "switch0", *bridge)
            self.switch.ip("link", "set", "switch0", "up")
            for name in names:
                self.start(name)
        except BaseException:
            self.close()
            raise

    def start(self, name: str) -> Host:
        """Start a host, or one in the place of a host that is lost: its memory is empty."""
        if name in self.hosts:
            self.hosts.pop(name).close()
        own = {name: "127.0.1.1"} if self._loopback else {}
        lines = ["127.0.0.1 localhost"]
        lines += [f"{address} {host}" for host, address in {**self._addresses, **own}.items()]
        hosts = self._folder / name
        hosts.write_text("\n".join(lines) + "\n")
        self._started += 1
        port = f"port{self._started}"
        self.hosts[name] = Host(self, name, self._addresses[name], port, hosts)
        return self.hosts[name]

    def close(self) -> None:
        """End all hosts and the switch."""
        for host in self.hosts.values():
            host.close()
        self.switch.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def network(*names: str, own_name_is_loopback: bool = False) -> Iterator[Network]:
    """Hosts that are ended with all of their processes, however the context ends."""
    made = Network(names, own_name_is_loopback)
    try:
        yield made
    finally:
        made.close()


@functools.cache
def unavailable() -> str | None:
    """Why there can be no hosts here, as a reason to skip; None where there can be."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (iproute2, util-linux)"
    try:
        with network("one", "two"):
            return None
    except OSError as error:
        return f"network namespaces cannot be made: {error}"
