"""``python -m pretrain.commands``: what torchrun starts where there is no checkout."""

from pretrain.commands.main import main

if __name__ == "__main__":
    raise SystemExit(main())
