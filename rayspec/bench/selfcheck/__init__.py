"""`rayspec selfcheck`: what an installation on this device computes, launches, waits for and reaches."""
