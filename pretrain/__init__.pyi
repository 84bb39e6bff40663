from .spec.job import JobSpec as JobSpec
from .spec.read import load_spec as load_spec
from .train.entry import run as run
