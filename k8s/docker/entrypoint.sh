#!/bin/bash
# What the container lacks is said before anything starts. KubeRay replaces this: there an init container says it.
set -euo pipefail
rayspec doctor --quick
exec "$@"
