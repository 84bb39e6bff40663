from .linear import Float8Linear as Float8Linear
from .linear import Float8Tally as Float8Tally
from .linear import Product as Product
from .linear import float8_matmul as float8_matmul
from .rows import Float8Rows as Float8Rows
from .rows import round_rows as round_rows
