from .build import Built as Built
from .build import assemble as assemble
from .build import build as build
from .build import build_job as build_job
from .job import Job as Job
from .rank_model import RankModel as RankModel
from .rank_model import build_model as build_model
from .rank_model import compute_dtype as compute_dtype
