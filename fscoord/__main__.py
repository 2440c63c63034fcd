"""The command line as `python -m fscoord`, for systems where the `fscoord` script is not on the path."""

from fscoord.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
