"""``python -m convoy``: what torchrun starts where there is no checkout."""

from convoy.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
