"""``convoy sample``, from a checkout."""

from pretrain.commands import main

if __name__ == "__main__":
    raise SystemExit(main("sample"))
