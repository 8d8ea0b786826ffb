#!/usr/bin/env bash
# Everything that only a machine with a CUDA GPU can tell, in four parts of less than ten minutes each:
#
#     benchmarks/gpu.sh PART [RESULTS]
#
# 1: the package is built; facts, driver calls, page-locked RAM and the link, kernels, bits, a step of 926M.
# 2: 7B with parameters on the device and states in RAM, as ZeRO-Offload has it; then by default budgets.
# 3: idle time of the GPU with a trace, 926M against peers, a memory checker, all other tests on the device.
# 4: 7B against DeepSpeed, 14B, all pages on NVMe, two ranks on the GPU, doctor, tune, speed of updates and disks.
#
# RESULTS: a directory, by default build/gpu-DATE, for PART.log (all that is printed), PART.json (a line of JSON for
# each figure) and PART.summary. Part 1 leaves the wheel there, too: where the package is not installed, later parts
# install .whl/infinity*.whl, or build it anew. Figures that README claims go from there to benchmarks/results/current
# (benchmarks/results_index.py says how). Nothing is downloaded. What a part runs is in the order of its value; each
# has its own time limit, and one that fails is said and does not stop the next. Ends with 0 if all passed, 1 if one
# failed, 3 without a GPU.
#
# PYTHON: the interpreter (python3). SWAP: a directory on the disk to use (a new one under the results' directory).
# PEERS: a directory of wheels, deepspeed's and what of its needs PYTHON lacks, where it is not installed; its
# include/ and lib/, if there are such, are searched for libaio.h and libaio.so, which DeepSpeed's NVMe needs. A
# peer that is not there is left out. SECONDS_IN_ALL: instead of 560. RAM_GIB, DISK_GIB, GPU_GIB: instead of what is
# there; what needs more is left out, which is no failure.
set -uo pipefail
cd "$(dirname "$0")/.."

number=${1:-}
case $number in
    [1-4]) ;;
    *)
        echo "gpu.sh: give the part, 1 to 4, and a directory for results." >&2
        exit 2
        ;;
esac
budget=${SECONDS_IN_ALL:-560}
here=$PWD/benchmarks

if ! python=$(command -v "${PYTHON:-python3}") || ! "$python" -c 'import torch' 2>/dev/null; then
    echo "gpu.sh: ${PYTHON:-python3} has no torch; nothing was run." >&2
    exit 2
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "gpu.sh: there is no CUDA GPU here (torch.cuda.is_available() is False); nothing was run." >&2
    exit 3
fi

results=${2:-$PWD/build/gpu-$(date +%F)}
mkdir -p "$results" || exit 2
results=$(cd "$results" && pwd)
swap=$(mktemp -d "${SWAP:-$results}/swap.XXXXXX") || exit 2
running=()
cleanup() {
    [ "${#running[@]}" = 0 ] || kill "${running[@]}" 2>/dev/null
    rm -rf "$swap"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
export PYTHONUNBUFFERED=1

# From elsewhere, so that what is imported is the installed package and not the source tree.
elsewhere=$swap/elsewhere
mkdir "$elsewhere" || exit 2
failed=0
log=$results/$number.log
figures=$results/$number.json
summary=$results/$number.summary
: >"$log"
: >"$figures"
: >"$summary"

say() { printf '%s\n' "$*" | tee -a "$summary"; }

# run NAME LIMIT COMMAND...: run it for LIMIT seconds at most, or for what is left of all.
run() {
    local name=$1 limit=$2 left=$((budget - SECONDS)) started=$SECONDS code
    shift 2
    if [ "$left" -lt 20 ]; then
        say "left out  $name: ${left}s are left"
        failed=1
        return
    fi
    [ "$limit" -lt "$left" ] || limit=$left
    printf '\n== %s (%ss): %s\n' "$name" "$SECONDS" "$*" >>"$log"
    # TERM first, so that swap is removed; 8 seconds later there is no asking. {} stands for the seconds after
    # which a part should begin nothing more.
    (cd "$elsewhere" && exec timeout --kill-after=8 "$((limit - 8))" "${@//\{\}/$((limit > 46 ? limit - 45 : 1))}") \
        >"$swap/printed" 2>>"$log" </dev/null
    code=$?
    cat "$swap/printed" >>"$log"
    case $code in
        0) say "passed    $name ($((SECONDS - started))s)" ;;
        124 | 137) say "timed out $name after ${limit}s; what it had printed is in $number.log" ;;
        *) say "failed    $name with $code ($((SECONDS - started))s); see $number.log" ;;
    esac
    [ "$code" = 0 ] || failed=1
    sed -n "s/^{.*}\$/{\"of\": \"$name\", \"found\": &}/p" "$swap/printed" >>"$figures"
}

# fits NAME RAM DISK [GPU]: whether there is that much RAM, disk and GPU memory, in GiB; says so if not.
fits() {
    [ "$ram" -ge "$2" ] && [ "$disk" -ge "$3" ] && [ "$gpu" -ge "${4:-0}" ] && return
    say "left out  $1: it takes $2 GiB of RAM, $3 of disk and ${4:-0} of the GPU; $ram, $disk and $gpu are there"
    return 1
}

probe() { # probe NAME LIMIT ARGUMENT...
    run "$1" "$2" "$python" "$here/gpu_probe.py" "${@:3}"
}

tests() { # tests NAME LIMIT ARGUMENT...: the tests that need a GPU among those that the arguments choose
    run "$1" "$2" "$python" -m pytest -v -rfE --maxfail=20 -n 0 -p no:cacheprovider --rootdir "$PWD" \
        -c "$PWD/pyproject.toml" -m "cuda and not slow" "${@:3}"
}

# train NAME LIMIT ARGUMENT...: no turn begins in the last seconds, so that there is a report in any case.
train() {
    run "$1" "$2" "$python" "$here/train.py" --device cuda --directory "$swap" --seconds {} \
        --peer-python "$peer_python" --json "${@:3}"
}

# The peers' interpreter: $python, with what $PEERS holds. What DeepSpeed compiles stays in $swap.
peer_python=$swap/peer-python
install_peers() {
    local site=$swap/peers
    mkdir "$site"
    if [ -n "${PEERS:-}" ]; then
        "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$PEERS"/*.whl \
            2>>"$log" || say "failed    peers: the wheels in $PEERS cannot be installed; see $number.log"
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
    offload=()
    infinite=()
    if ! "$peer_python" -c 'import deepspeed' >/dev/null 2>&1; then
        say "deepspeed is not to be had here: peers are FSDP2 and plain PyTorch"
        return
    fi
    # Compiled before a contender starts, whose time it would take.
    local compiled
    compiled=$(timeout 150 "$peer_python" -c '
import traceback
from deepspeed.accelerator import get_accelerator
for name in ("CPUAdamBuilder", "AsyncIOBuilder"):
    try:
        get_accelerator().create_op_builder(name).load()
        print("compiled", name, flush=True)
    except Exception:
        traceback.print_exc()' 2>>"$log" </dev/null)
    case $compiled in *CPUAdamBuilder*) offload=(--peer deepspeed:cpu) ;; esac
    case $compiled in *CPUAdamBuilder*AsyncIOBuilder*) infinite=(--peer deepspeed:nvme) ;; esac
    if [ "${#infinite[@]}" = 0 ]; then
        say "failed    deepspeed-build: peers of it are ${offload[*]:-none}; see $number.log"
        failed=1
    fi
}

installed() { (cd "$elsewhere" && "$python" -c 'import infinity') 2>/dev/null; }
pip() { timeout 150 "$python" -m pip "$@" --no-index --no-deps >>"$log" 2>&1; }
if ! installed; then
    wheel=$(ls .whl/infinity*.whl 2>/dev/null | tail -n 1)
    if [ -z "$wheel" ]; then
        pip wheel --no-build-isolation --wheel-dir "$results" . && wheel=$(ls "$results"/infinity*.whl | tail -n 1)
    fi
    if [ -z "$wheel" ] || ! pip install "$wheel" || ! installed; then
        say "failed    build: the package cannot be installed; see $number.log"
        exit 1
    fi
    say "passed    build (${SECONDS}s)"
fi

ram=${RAM_GIB:-$(awk '/^MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo)}
disk=${DISK_GIB:-$(df --output=avail -k "$swap" | awk 'NR == 2 { print int($1 / 1048576) }')}
gpu=${GPU_GIB:-$("$python" -c 'import torch; print(torch.cuda.mem_get_info()[0] >> 30)')}

part_1() {
    probe facts 40 facts
    probe driver 40 driver
    # As much as 7B's states take; a machine with less locks what it has room for.
    probe host 110 host 1 8 32 $((ram > 104 ? 92 : ram * 7 / 8))
    probe kernels 40 kernels
    tests cuda-core 60 "$PWD/tests/tiers" "$PWD/tests/device_update"
    tests parity 60 "$PWD/tests/test_parity.py" -k transformer
    # ZeRO-Offload's placement: parameters on the device, states in RAM.
    probe step-926m 80 step 926m --device 12GiB --host 24GiB --clip 1.0
}

part_2() {
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi dmon -s pucvmt -d 1 >"$results/2.dmon" 2>&1 &
        running+=($!)
    fi
    # 13 GiB of parameters on the device beside what a step of 4 x 1024 tokens takes there. In RAM 77 GiB of
    # gradients and states, the parameters once more, and 3 GiB in which chunks are updated: with less, units
    # without a copy in RAM would cross the link twice.
    if fits 7b-offload 100 0; then
        probe 7b-offload 200 step 7b --device 48GiB --host 94GiB --clip 1.0 --steps 5
        probe 7b-offload-eager 180 step 7b --device 48GiB --host 94GiB --update eager --steps 5
    fi
    probe 7b 170 step 7b --clip 1.0 --steps 5
}

part_3() {
    install_peers
    run idle-926m 90 "$python" "$here/gpu_idle.py" --model 926m --batch 4 --seq 1024 --directory "$swap" \
        --host 24GiB --device-budget 12GiB --timeline "$results/3.timeline.json" \
        --trace "$results/3.kernels.json"
    gzip --force "$results/3.timeline.json" "$results/3.kernels.json" 2>>"$log"
    # 1B against all: once with everything in RAM, as ZeRO-Offload and FSDP2 have it, and once with most of it
    # on NVMe, as ZeRO-Infinity has it.
    train train-926m 150 --model 926m --batch 4 --seq 1024 --rounds 2 --steps 2 --warm-up 1 --processes kept \
        --ours host=24GiB,device=12GiB,nvme=none --ours host=4GiB,device=12GiB \
        "${offload[@]}" "${infinite[@]}" --peer fsdp2 --peer torch:fused
    if command -v compute-sanitizer >/dev/null; then
        run memcheck 60 compute-sanitizer --tool memcheck "$python" -m pytest -q -n 0 -p no:cacheprovider \
            --rootdir "$PWD" -c "$PWD/pyproject.toml" -m "cuda and not slow" -k edges \
            "$PWD/tests/device_update/test_device_update.py"
    else
        say "left out  memcheck: compute-sanitizer is not installed"
    fi
    tests cuda-rest 140 "$PWD/tests" --ignore "$PWD/tests/test_parity.py" --ignore "$PWD/tests/tiers" \
        --ignore "$PWD/tests/device_update"
    tests parity-rest 100 "$PWD/tests/test_parity.py" -k "not transformer"
}

part_4() {
    install_peers
    if fits train-7b 100 0; then
        local alone=(--capacity)
        [ "${#offload[@]}" = 0 ] || alone=("${offload[@]}")
        train train-7b 200 --model 7b --batch 4 --seq 1024 --rounds 1 --steps 1 --warm-up 1 \
            --processes fresh --ours host=94GiB,device=48GiB,nvme=none "${alone[@]}"
    fi
    # 14B: what the device and RAM do not hold of 183 GiB is on the disk.
    if fits train-14b 92 40 100; then
        train train-14b 110 --model 14b --batch 1 --seq 1024 --rounds 1 --steps 1 --warm-up 1 \
            --processes fresh --capacity --ours host=84GiB,device=96GiB,nvme=36GiB
    elif fits train-14b-on-less 92 66; then
        train train-14b-on-less 110 --model 14b --batch 1 --seq 1024 --rounds 1 --steps 1 --warm-up 1 \
            --processes fresh --capacity --ours host=84GiB,device=70GiB,nvme=62GiB
    fi
    # 7B with every page on NVMe, as ZeRO-Infinity has it: 12 bytes a parameter of states and gradients, and its 2.
    if fits train-7b-nvme 24 100; then
        train train-7b-nvme 80 --model 7b --batch 4 --seq 1024 --rounds 1 --steps 1 --warm-up 1 \
            --processes fresh --capacity --ours all-nvme,device=48GiB
    fi
    # Two ranks on this GPU, whose pages lie in each other's device memory, beside one process with the same
    # batches.
    run ranks-926m 70 "$python" "$here/ranks.py" --device cuda --directory "$swap" --model 926m --batch 2 \
        --seq 1024 --host 24GiB --device-budget 12GiB --case ours:3:ram alone:ram --rounds 2 --json
    run doctor 30 "$python" -m infinity doctor --json --path "$swap"
    run tune 60 "$python" -m infinity tune --json --path "$swap"
    run cpu_adam 30 "$python" "$here/cpu_adam.py" --elements 50000000 --repeats 3 --json
    if command -v fio >/dev/null; then
        run aio 30 "$python" "$here/aio.py" --directory "$swap" --engine io_uring --block 4194304 \
            --size 536870912 --pairs 2 --json
    else
        say "left out  aio: fio is not installed"
    fi
}

"part_$number"
say "$SECONDS s in all; results are in $results"
exit "$failed"
