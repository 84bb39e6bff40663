"""The commands: what they are told, what they print, and their exit codes.

No file here imports torch, numpy or ckpt before a command acts: ``--help`` and a wrong flag are
answered at once.
"""

from convoy.commands.command_line import main

__all__ = ["main"]
