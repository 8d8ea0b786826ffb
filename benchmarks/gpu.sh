#!/usr/bin/env bash
# Everything that only a machine with a CUDA GPU can tell, within nine minutes. The first two give parity on the
# device, one step of a 926M model with its timeline, and the share of it in which the GPU idles; then come the
# other tests on the device, and training of 7B, 1B and 14B models, against peers where there are such.
#
#     pip install --no-build-isolation --no-index . && benchmarks/gpu.sh [RESULTS]
#
# RESULTS: a directory, by default build/gpu-DATE, for all that is printed. Figures that README claims go from there to
# benchmarks/results/current (benchmarks/results_index.py says how). Nothing is downloaded. Parts run in the order of
# their value; each has its own time limit, and one that fails is said and does not stop the next. What a part has
# printed is kept whatever becomes of it. Ends with 0 if all parts passed, 1 if one failed, 3 without a GPU.
#
# PYTHON: the interpreter (python3). SWAP: a directory on the disk to use (a new one under the results' directory).
# PEERS: a directory of wheels, deepspeed's and what of its needs PYTHON lacks, where it is not installed; its
# include/ and lib/, if there are such, are searched for libaio.h and libaio.so, which DeepSpeed's NVMe needs. A
# peer that is not there is left out. SECONDS_IN_ALL: instead of 540. RAM_GIB, DISK_GIB: instead of what is free;
# a part that needs more is left out, which is no failure.
set -uo pipefail
cd "$(dirname "$0")/.."

budget=${SECONDS_IN_ALL:-540}
here=$PWD/benchmarks

if ! python=$(command -v "${PYTHON:-python3}") || ! "$python" -c 'import torch' 2>/dev/null; then
    echo "gpu.sh: ${PYTHON:-python3} has no torch; nothing was run." >&2
    exit 2
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "gpu.sh: there is no CUDA GPU here (torch.cuda.is_available() is False); nothing was run." >&2
    exit 3
fi

results=${1:-$PWD/build/gpu-$(date +%F)}
mkdir -p "$results" || exit 2
results=$(cd "$results" && pwd)
swap=$(mktemp -d "${SWAP:-$results}/swap.XXXXXX") || exit 2
compiling=
cleanup() {
    [ -z "$compiling" ] || kill "$compiling" 2>/dev/null
    rm -rf "$swap"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# From elsewhere, so that what is imported is the installed package and not the source tree.
elsewhere=$swap/elsewhere
mkdir "$elsewhere" || exit 2
failed=0
summary=$results/summary.txt
: >"$summary"

say() { printf '%s\n' "$*" | tee -a "$summary"; }

# part NAME LIMIT COMMAND...: run it for LIMIT seconds at most, or for what is left of all.
part() {
    local name=$1 limit=$2 left=$((budget - SECONDS)) started=$SECONDS code
    shift 2
    if [ "$left" -lt 20 ]; then
        say "left out  $name: ${left}s are left"
        failed=1
        return
    fi
    [ "$limit" -lt "$left" ] || limit=$left
    # TERM first, so that swap is removed; 8 seconds later there is no asking. {} stands for the seconds after
    # which a part should begin nothing more.
    (cd "$elsewhere" && exec timeout --kill-after=8 "$((limit - 8))" "${@//\{\}/$((limit > 46 ? limit - 45 : 1))}") \
        >"$results/$name.out" 2>"$results/$name.err" </dev/null
    code=$?
    case $code in
        0) say "passed    $name ($((SECONDS - started))s)" ;;
        124 | 137) say "timed out $name after ${limit}s; what it had printed is in $name.out" ;;
        *) say "failed    $name with $code ($((SECONDS - started))s); see $name.err" ;;
    esac
    [ "$code" = 0 ] || failed=1
    # The last line of what prints JSON is its result.
    tail -n 1 "$results/$name.out" | grep '^{' >"$results/$name.json" || rm -f "$results/$name.json"
}

# fits NAME RAM DISK: whether there is that much RAM and disk, in GiB; says so if not.
fits() {
    [ "$ram" -ge "$2" ] && [ "$disk" -ge "$3" ] && return
    say "left out  $1: it takes $2 GiB of RAM and $3 GiB of disk; $ram and $disk are free"
    return 1
}

# train NAME LIMIT ARGUMENT...: no turn begins in the last seconds, so that there is a report in any case.
train() {
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" "$here/train.py" --device cuda --directory "$swap" --seconds {} \
        --peer-python "$peer_python" --json "$@"
}

ram=${RAM_GIB:-$(awk '/^MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo)}
disk=${DISK_GIB:-$(df --output=avail -k "$swap" | awk 'NR == 2 { print int($1 / 1048576) }')}

# The peers' interpreter: $python, with what $PEERS holds. What DeepSpeed compiles stays in $swap.
peer_python=$swap/peer-python
site=$swap/peers
mkdir "$site"
if [ -n "${PEERS:-}" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$PEERS"/*.whl \
        2>"$results/peers.err" || say "failed    peers: the wheels in $PEERS cannot be installed; see peers.err"
fi
cat >"$peer_python" <<END
#!/bin/sh
export PATH="$(dirname "$python"):\$PATH" PYTHONPATH="$site\${PYTHONPATH:+:\$PYTHONPATH}"
export TORCH_EXTENSIONS_DIR="$swap/extensions"
export CPATH="${PEERS:-/nowhere}/include\${CPATH:+:\$CPATH}"
export LIBRARY_PATH="${PEERS:-/nowhere}/lib\${LIBRARY_PATH:+:\$LIBRARY_PATH}"
export LD_LIBRARY_PATH="${PEERS:-/nowhere}/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
exec "$python" "\$@"
END
chmod +x "$peer_python"

tests() {
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" -m pytest -v -rfE --maxfail=20 -p no:cacheprovider --rootdir "$PWD" \
        -c "$PWD/pyproject.toml" "$@"
}

part facts 20 "$python" -c '
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from machine_facts import machine_facts
gpu = torch.cuda.get_device_properties(0)
print(json.dumps(machine_facts() | {"gpu": gpu.name, "gpu_gib": round(gpu.total_memory / 2**30, 1)}))' "$here"
# Line by line, so that what has passed is known if the time runs out.
tests parity 40 "$PWD/tests/test_parity.py" -k cuda
# ZeRO-Offload's placement: parameters on the device, states in RAM.
part step-926m 60 "$python" "$here/gpu_idle.py" --model 926m --batch 4 --seq 1024 --directory "$swap" \
    --host 24GiB --device-budget 12GiB --timeline "$results/step-926m.timeline.json" \
    --trace "$results/step-926m.kernels.json"

offload=()
infinite=()
if "$peer_python" -c 'import deepspeed' >/dev/null 2>&1; then
    # Compiled while the other tests run, so that no start of a contender waits for a compiler.
    timeout 150 "$peer_python" -c '
import traceback
from deepspeed.accelerator import get_accelerator
for name in ("CPUAdamBuilder", "AsyncIOBuilder"):
    try:
        get_accelerator().create_op_builder(name).load()
        print("compiled", name, flush=True)
    except Exception:
        traceback.print_exc()' >"$results/deepspeed-build.out" 2>&1 </dev/null &
    compiling=$!
else
    say "deepspeed is not to be had here: peers are FSDP2 and plain PyTorch"
fi

tests tests 110 "$PWD/tests" --ignore "$PWD/tests/test_parity.py" \
    -k "cuda or gpu or test_link or test_device_kernels or (test_where_tensors_are and device)"
if [ -n "$compiling" ]; then
    wait "$compiling"
    compiling=
    compiled() { grep -q "^compiled $1" "$results/deepspeed-build.out"; }
    if compiled CPUAdamBuilder; then
        offload=(--peer deepspeed:cpu)
        compiled AsyncIOBuilder && infinite=(--peer deepspeed:nvme)
    fi
    if [ "${#infinite[@]}" = 0 ]; then
        say "failed    deepspeed-build: peers of it are ${offload[*]:-none}; see deepspeed-build.out"
        failed=1
    fi
fi

# 7B with parameters on the device (13 GiB, and 34 GiB for what a step of 4 x 1024 tokens takes there), and
# gradients and states in RAM (77 GiB). With kept processes no two of them would fit.
alone=(--capacity)
[ "${#offload[@]}" = 0 ] || alone=("${offload[@]}")
if fits train-7b-offload 92 0; then
    train train-7b-offload 110 --model 7b --batch 4 --seq 1024 --rounds 1 --steps 1 --warm-up 1 \
        --processes fresh --ours host=84GiB,device=48GiB,nvme=none "${alone[@]}"
fi
# 1B against all: once with everything in RAM, as ZeRO-Offload and FSDP2 have it, and once with most of it on NVMe,
# as ZeRO-Infinity has it.
train train-926m 130 --model 926m --batch 4 --seq 1024 --rounds 2 --steps 2 --warm-up 1 --processes kept \
    --ours host=24GiB,device=12GiB,nvme=none --ours host=4GiB,device=12GiB \
    "${offload[@]}" "${infinite[@]}" --peer fsdp2 --peer torch:fused
# Two ranks on this GPU, whose pages lie in each other's device memory, beside one process with the same batches.
part ranks-926m 70 "$python" "$here/ranks.py" --device cuda --directory "$swap" --model 926m --batch 2 --seq 1024 \
    --host 24GiB --device-budget 12GiB --case ours:3:ram alone:ram --rounds 2 --json
# 7B with every page on NVMe, as ZeRO-Infinity has it: 12 bytes a parameter of states and gradients, and its 2.
if fits train-7b-nvme 24 100; then
    train train-7b-nvme 80 --model 7b --batch 4 --seq 1024 --rounds 1 --steps 1 --warm-up 1 \
        --processes fresh --capacity --ours all-nvme,device=48GiB
fi
# 14B: what the device and RAM do not hold of 183 GiB is on the disk.
if fits train-14b 92 40; then
    train train-14b 110 --model 14b --batch 1 --seq 1024 --rounds 1 --steps 1 --warm-up 1 \
        --processes fresh --capacity --ours host=84GiB,device=96GiB,nvme=36GiB
fi
part doctor 30 "$python" -m infinity doctor --json --path "$swap"
if "$python" -m infinity tune --help >/dev/null 2>&1; then
    part tune 60 "$python" -m infinity tune --json --path "$swap"
else
    say "left out  tune: this version has no such command"
fi
part cpu_adam 30 "$python" "$here/cpu_adam.py" --elements 50000000 --repeats 3 --json
if command -v fio >/dev/null; then
    part aio 30 "$python" "$here/aio.py" --directory "$swap" --engine io_uring --block 4194304 --size 536870912 \
        --pairs 2 --json
else
    say "left out  aio: fio is not installed"
fi

say "$SECONDS s in all; results are in $results"
exit "$failed"
