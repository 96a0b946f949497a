# What Ray, and all that it starts, finds in its environment. Sourced by the commands of the launcher files.
# shellcheck shell=bash
export PATH="$HOME/rayspec/.venv/bin:$PATH"
# Without the token of ~/.ray/auth_token nobody gets in.
export RAY_AUTH_MODE=token
export RAY_USAGE_STATS_ENABLED=0
# One copy of each model for all nodes, and one set of latency profiles.
export HF_HOME=/shared/huggingface
export XDG_CACHE_HOME=/shared/cache
# Ray's launcher sets it to 1 for every command, and all processes of the node would inherit that.
unset OMP_NUM_THREADS
