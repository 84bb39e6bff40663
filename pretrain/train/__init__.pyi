from .entry import run as run
from .generation import Drawing as Drawing
from .generation import Generated as Generated
from .generation import generate as generate
from .profile import read_window as read_window
from .trainer import Trainer as Trainer
