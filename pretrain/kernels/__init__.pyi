from .rotary import DTYPES as DTYPES
from .rotary import has_kernel as has_kernel
from .rotary import rotate as rotate
