"""`python -m rayspec` is the command `rayspec`."""

from rayspec.cli import main

if __name__ == "__main__":
    main()
