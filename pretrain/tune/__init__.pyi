from .config import TuneConfig as TuneConfig
from .tuned import is_adapter as is_adapter
from .tuned import tune as tune
