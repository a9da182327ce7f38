"""The command `hpo`, and `python -m hpo`."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C while it is imported ends it without a traceback."""
    try:
        from hpo.cli import commands
    except KeyboardInterrupt:
        sys.exit(130)
    commands.main()


if __name__ == "__main__":
    main()
