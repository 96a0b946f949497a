#!/bin/bash
# Mounts an NFS export where all nodes look for models, inputs and outputs:
#
#   cluster/mount-shared.sh HOST:/EXPORT
set -euo pipefail
readonly folder=/shared

if ! mountpoint --quiet "$folder"; then
    sudo mkdir -p "$folder"
    # hard: a server that is away for a moment is waited for, rather than failing a shard that is loading.
    sudo mount -t nfs -o hard,noresvport "$1" "$folder"
fi
# A new file system belongs to root.
if [[ ! -w $folder ]]; then
    sudo chown "$(id --user):$(id --group)" "$folder"
fi
mkdir -p "$folder/huggingface" "$folder/cache"
