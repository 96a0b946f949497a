"""How a command or job ended. 3: some rows failed; 128 and more: the signal that ended it."""

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_SOME_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 1, 2, 3, 130, 143
