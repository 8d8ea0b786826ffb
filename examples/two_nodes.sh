#!/usr/bin/env bash
# Trains on two nodes with torchrun. Run it on each of them, with its own number:
#
#     examples/two_nodes.sh 0 NAME_OF_NODE_0 [options of infinity train]
#     examples/two_nodes.sh 1 NAME_OF_NODE_0 [options of infinity train]
#
# If a rank dies, all end, and torchrun starts them again: they go on from the last commit. The same happens if
# both are started again by hand. PAGES is the directory on NVMe with its budget, such as /mnt/nvme0:40GiB, and
# COMMITS that of the commits; both may be others on each node. PROCESSES is the number of ranks on a node.
# INTERFACE is the network interface that leads to the other node; without it torch's own group takes the one to
# which the node's own name resolves. INFINITY_SECRET, the same on both nodes, has all messages encrypted.
set -euo pipefail

node=$1 first=$2
shift 2
host=false
[ "$node" != 0 ] || host=true
if [ -n "${INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE
    address=$(ip -o -4 address show dev "$INTERFACE" | awk '{ sub("/.*", "", $4); print $4; exit }')
fi

# Each restart needs a store of its own, where nothing is left of ranks that have died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes 2 --nproc-per-node "${PROCESSES:-1}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-id "${JOB:-infinity}" --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29500}" \
    --rdzv-conf "is_host=$host" ${address:+--local-addr "$address"} -m -- \
    infinity train --budget-host 160MiB --budget-nvme "${PAGES:-.:1GiB}" \
    --checkpoint "${COMMITS:-commits}" --every 20 --resume "$@"
