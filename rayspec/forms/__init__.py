"""The forms that outputs must have: compiled, checked in a process with limits, and followed token by token."""
