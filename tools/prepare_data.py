"""``convoy prepare``, from a checkout."""

from convoy.commands import main

if __name__ == "__main__":
    raise SystemExit(main("prepare"))
