from .config import FaultConfig as FaultConfig
from .happened import forget_faults as forget_faults
from .part import Faults as Faults
from .part import InjectedFaults as InjectedFaults
from .part import faults_of as faults_of
