"""Whether nodes see one folder: by the type of its file system."""

from __future__ import annotations

from pathlib import Path

_LOCAL = {
    "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "rootfs", "squashfs", "tmpfs",
    "vfat", "xfs", "zfs",
}  # fmt: skip
"""File systems of one machine. The others are taken for shared: NFS, Lustre, GPFS, CephFS ..."""


def local_file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The type of the file system of ``path`` where it belongs to this machine alone; otherwise
    None. A path that does not exist yet is judged by the nearest folder above that does.

    Args:
        path: an absolute path.
        mounts: the table of mounted file systems; what has none, a Mac, is not judged.
    """
    found, length = None, -1
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    while not path.exists() and path != path.parent:
        path = path.parent
    path = path.resolve()
    for line in lines:
        _device, where, kind, *_ = line.split()
        mount = Path(where.encode().decode("unicode_escape"))
        if path.is_relative_to(mount) and len(mount.parts) >= length:
            found, length = kind, len(mount.parts)
    return found if found in _LOCAL else None
