"""`python -m fscoord`: the command line, where the `fscoord` script is not on the path."""

from fscoord.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
