"""``convoy burn-in``, from a checkout."""

from pretrain.commands import main

if __name__ == "__main__":
    raise SystemExit(main("burn-in"))
