from .config import KubernetesConfig as KubernetesConfig
from .config import LaunchConfig as LaunchConfig
from .engines import ENGINES as ENGINES
from .engines import Engine as Engine
from .engines import engine_named as engine_named
from .engines import name_of as name_of
from .job import EngineJob as EngineJob
