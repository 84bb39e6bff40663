"""A run on the engine of a cluster: a job is rendered to text, printed, and submitted."""

from cluster.launch import kubernetes, ray, slurm, torchrun
from cluster.launch.config import KubernetesConfig, LaunchConfig
from cluster.launch.job import EngineJob
from cluster.launch.shared_folder import local_file_system

ENGINES = {"torchrun": torchrun, "slurm": slurm, "ray": ray, "kubernetes": kubernetes}
"""By name: modules with ``render``, ``check`` and ``submit``."""

__all__ = ["ENGINES", "EngineJob", "KubernetesConfig", "LaunchConfig", "local_file_system"]
