from .config import FaultConfig as FaultConfig
from .part import Faults as Faults
from .part import InjectedFaults as InjectedFaults
from .part import faults_of as faults_of
from .part import forget_faults as forget_faults
