"""Reading slices of a checkpoint, verified, onto any number of ranks."""

from ckpt.read.box import PackReader as PackReader
from ckpt.read.box import read_box as read_box
from ckpt.read.box import read_nowhere as read_nowhere
from ckpt.read.box import read_tensor as read_tensor
from ckpt.read.compare import ArrayDifference as ArrayDifference
from ckpt.read.compare import compare as compare
from ckpt.read.load import load as load
from ckpt.read.stored_array import open_checkpoint as open_checkpoint
from ckpt.read.verify import open_group as open_group
from ckpt.read.verify import verify as verify
