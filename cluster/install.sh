#!/bin/bash
# Installs rayspec, from the folder above this one, into .venv there, within constraints.txt:
#
#   cluster/install.sh [CLOUD]    CLOUD (aws, gcp, azure) brings what Ray's launcher needs there as well
#
# Does nothing where the same has been installed: begin with a machine image that has it, and a node is up minutes sooner.
set -euo pipefail

# The Python of k8s/docker/Dockerfile. All nodes must have the same one.
python_version=${RAYSPEC_PYTHON:-3.11.14}
uv_version=0.13.9

cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
requirements=()
if [[ $# -gt 0 ]]; then
    requirements=(--requirement "cluster/requirements-$1.txt")
fi

wanted="$python_version ${1:-} $(
    find pyproject.toml hatch_build.py constraints.txt cluster rayspec -type f -not -path '*/__pycache__/*' -print0 \
        | sort --zero-terminated | xargs --null sha256sum | sha256sum
)"
if [[ -f .venv/installed && $(<.venv/installed) == "$wanted" ]]; then
    exit 0
fi

rm -rf .venv
# uv brings this very Python wherever the machine has another one.
python3 -m venv .uv
.uv/bin/pip install --quiet --disable-pip-version-check "uv==$uv_version"
.uv/bin/uv venv --quiet --python "$python_version" .venv
.uv/bin/uv pip install --quiet --python .venv --constraint constraints.txt "${requirements[@]}" ".[serve]"
.venv/bin/rayspec version
echo "$wanted" > .venv/installed
