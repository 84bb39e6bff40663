"""Stores of named, immutable objects: in folders, object stores, and the memory of peers."""

from ckpt.store.folder import lock_file as lock_file
from ckpt.store.folder import new_folder as new_folder
from ckpt.store.folder import publish_folder as publish_folder
from ckpt.store.local import LocalStore as LocalStore
from ckpt.store.location import Location as Location
from ckpt.store.location import as_location as as_location
from ckpt.store.location import open_store as open_store
from ckpt.store.peer import PeerServer as PeerServer
from ckpt.store.peer import address_towards as address_towards
from ckpt.store.posix import PAGE as PAGE
from ckpt.store.posix import Files as Files
from ckpt.store.protocol import THREADS as THREADS
from ckpt.store.protocol import Bytes as Bytes
from ckpt.store.protocol import Reader as Reader
from ckpt.store.protocol import ReportBytes as ReportBytes
from ckpt.store.protocol import Store as Store
from ckpt.store.retrying import Retrying as Retrying
from ckpt.store.retrying import holds as holds
