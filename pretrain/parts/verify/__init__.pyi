from .config import VerifyConfig as VerifyConfig
from .rule import Finding as Finding
from .rule import GradientPass as GradientPass
from .rule import gradients_agree as gradients_agree
from .rule import judge_gradients as judge_gradients
from .rule import judge_states as judge_states
from .rule import machine_to_exclude as machine_to_exclude
from .rule import next_shifts as next_shifts
