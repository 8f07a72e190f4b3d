#!/bin/sh
# One emulated host of an MPI job. `crossmesh launch --per-host 1 --emulate RATE` starts it once for every host:
#
#     mpi_host.sh FOLDER HOSTS WORD...
#
# Every host leaves its process id in FOLDER. The first then runs mpirun with WORDs; where mpirun would use ssh, it calls this
# script again as an agent (`mpi_host.sh agent FOLDER hN COMMAND...`), which starts MPI's daemon inside host N: in its network,
# and under its name, so that MPI takes no two hosts for one.
set -eu

if [ "$1" = agent ]; then
    folder=$2; host=$3; shift 3
    exec nsenter --target "$(cat "$folder/$host")" --net unshare --uts sh -c 'hostname "$0"; exec sh -c "$*"' "$host" "$@"
fi

folder=$1; hosts=$2; shift 2
echo $$ > "$folder/h$RANK.tmp"
mv "$folder/h$RANK.tmp" "$folder/h$RANK"
if [ "$RANK" != 0 ]; then
    until [ -e "$folder/done" ]; do sleep 0.2; done
    exit 0
fi
until [ "$(find "$folder" -name 'h*[0-9]' | wc -l)" = "$hosts" ]; do sleep 0.1; done
status=0
# All hosts share this machine's cores: ranks that wait by spinning would take each other's time.
mpirun --allow-run-as-root --oversubscribe --hostfile "$folder/hostfile" --map-by slot \
    --mca plm_rsh_agent "$0 agent $folder" --mca plm_rsh_no_tree_spawn 1 --mca btl_tcp_if_include nic \
    --mca oob_tcp_if_include nic --mca mpi_yield_when_idle 1 "$@" || status=$?
touch "$folder/done"
exit $status
