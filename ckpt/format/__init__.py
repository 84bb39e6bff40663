"""The bytes of a checkpoint: the manifest, arrays, objects and chunks."""

from ckpt.format.array import (
    ArrayRecord,
    Compression,
    MeshRecord,
    check_compression,
    keys_of_ranks,
    metadata_keys,
    metadata_objects,
)
from ckpt.format.chunk_grid import storage_grid
from ckpt.format.dtypes import FLOATS, STORAGE_DTYPES, convert, to_float32
from ckpt.format.keys import locate, manifest_key, objects_key, pending_key
from ckpt.format.manifest import (
    Manifest,
    committed_steps,
    decode_manifest,
    encode_manifest,
    read_manifest,
)
from ckpt.format.names import Extra, Missing, check_names, renamed
from ckpt.format.object_index import ObjectRecord, gather
from ckpt.format.pack_plan import Pack, PackPlan, PlacedTensor, plan_packs
from ckpt.format.packed import TREE, PackedTensor, PackPlace, StoredTensor
from ckpt.format.shard_layout import Array, ObjectLayout, ReadInto
from ckpt.format.shard_reader import Destination, read_object
from ckpt.format.shard_writer import Encoder, aligned
from ckpt.format.state_tree import (
    Node,
    Path,
    children,
    dotted_names,
    is_leaf,
    leaf_value,
    name_of,
    renamed_tree,
    shown,
    tensor_names,
    where,
)

__all__ = [
    "FLOATS",
    "STORAGE_DTYPES",
    "TREE",
    "Array",
    "ArrayRecord",
    "Compression",
    "Destination",
    "Encoder",
    "Extra",
    "Manifest",
    "MeshRecord",
    "Missing",
    "Node",
    "ObjectLayout",
    "ObjectRecord",
    "Pack",
    "PackPlace",
    "PackPlan",
    "PackedTensor",
    "Path",
    "PlacedTensor",
    "ReadInto",
    "StoredTensor",
    "aligned",
    "check_compression",
    "check_names",
    "children",
    "committed_steps",
    "convert",
    "decode_manifest",
    "dotted_names",
    "encode_manifest",
    "gather",
    "is_leaf",
    "keys_of_ranks",
    "leaf_value",
    "locate",
    "manifest_key",
    "metadata_keys",
    "metadata_objects",
    "name_of",
    "objects_key",
    "pending_key",
    "plan_packs",
    "read_manifest",
    "read_object",
    "renamed",
    "renamed_tree",
    "shown",
    "storage_grid",
    "tensor_names",
    "to_float32",
    "where",
]
