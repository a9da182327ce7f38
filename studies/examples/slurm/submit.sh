#!/usr/bin/env bash
# Search with two Slurm jobs:  bash submit.sh PARTITION
#
# Call it on a login node, in a folder that all nodes share, with `hpo` on the PATH there and on the nodes. If you have
# a PostgreSQL, set STORAGE to its URL, or to @FILE with a file that holds the URL. Otherwise a job of yours serves one;
# its node needs the server programs of PostgreSQL (`initdb`, `postgres`).
set -euo pipefail
partition=${1:?give the partition, one of those that sinfo shows}

if [ -z "${STORAGE:-}" ]; then
    STORAGE=@runs/postgres/url
    if ! hpo database status >/dev/null 2>&1; then
        sbatch --job-name hpo-database --partition "$partition" --time 1-00:00:00 --mem "${DATABASE_MEM:-2G}" \
            --output database.log --wrap "exec hpo database start --foreground --host 0.0.0.0"
        until hpo database status 2>/dev/null; do
            if [ -z "$(squeue --me --noheader --name hpo-database)" ]; then
                echo "The job hpo-database has ended: read database.log." >&2
                exit 1
            fi
            sleep 2
        done
    fi
fi

# Each job needs 0.4 GB before it has a model. Add --gpus-per-node 1 for a GPU.
hpo submit study.yaml --slurm --storage "$STORAGE" --workers 2 --partition "$partition" --time 1:00:00 \
    --cpus-per-task 1 --mem "${MEM:-8G}"
echo "Watch it:  squeue --me;  hpo status study.yaml --storage $STORAGE"
echo "At the end, stop the database:  scancel --name hpo-database"
