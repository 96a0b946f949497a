"""Exit codes of commands and jobs. 3: some rows failed. Above 128: 128 plus the number of the signal that ended it."""

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_SOME_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 1, 2, 3, 130, 143
