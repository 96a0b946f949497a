"""The command `rayspec`, also as `python -m rayspec`."""

import sys


def main() -> None:
    try:
        from rayspec.cli import main as run  # noqa: PLC0415 - so that Ctrl-C meanwhile shows no traceback
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
