"""A run on the engine of a cluster: a job is rendered to text, printed, and submitted."""

from cluster.launch.config import KubernetesConfig, LaunchConfig
from cluster.launch.engines import ENGINES, Engine, engine_named, name_of
from cluster.launch.job import EngineJob
from cluster.launch.shared_folder import local_file_system

__all__ = [
    "ENGINES",
    "Engine",
    "EngineJob",
    "KubernetesConfig",
    "LaunchConfig",
    "engine_named",
    "local_file_system",
    "name_of",
]
