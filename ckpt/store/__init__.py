"""Stores of named, immutable objects: in folders, object stores, and the memory of peers."""

from ckpt.store.folder import lock_file, new_folder, publish_folder
from ckpt.store.local import LocalStore
from ckpt.store.location import Location, as_location, open_store
from ckpt.store.peer import PeerServer, address_towards
from ckpt.store.posix import PAGE, Files
from ckpt.store.protocol import THREADS, Bytes, Reader, ReportBytes, Store
from ckpt.store.retrying import Retrying, holds

__all__ = [
    "PAGE",
    "THREADS",
    "Bytes",
    "Files",
    "LocalStore",
    "Location",
    "PeerServer",
    "Reader",
    "ReportBytes",
    "Retrying",
    "Store",
    "address_towards",
    "as_location",
    "holds",
    "lock_file",
    "new_folder",
    "open_store",
    "publish_folder",
]
