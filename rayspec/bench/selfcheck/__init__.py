"""`rayspec selfcheck`: check the results, launches, host waits and speed of an installation on this device."""
