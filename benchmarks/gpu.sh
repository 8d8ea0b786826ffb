#!/usr/bin/env bash
# Everything that only a machine with a CUDA GPU can tell, within nine minutes: tests on the device, then training.
#
#     pip install --no-build-isolation --no-index . && benchmarks/gpu.sh [RESULTS]
#
# RESULTS: a directory, by default benchmarks/results/gpu-DATE. Nothing is downloaded. Parts run in the order of
# their value; each has its own time limit, and one that fails is said and does not stop the next. What a part has
# printed is kept whatever becomes of it. Ends with 0 if all parts passed, 1 if one failed, 3 without a GPU.
#
# PYTHON: the interpreter (python3). SWAP: a directory on the disk to use (a new one under the results' directory).
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
budget=${SECONDS_IN_ALL:-540}
here=$PWD/benchmarks

if ! "$python" -c 'import torch' 2>/dev/null; then
    echo "gpu.sh: $python has no torch; nothing was run." >&2
    exit 2
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "gpu.sh: there is no CUDA GPU here (torch.cuda.is_available() is False); nothing was run." >&2
    exit 3
fi

results=${1:-$here/results/gpu-$(date +%F)}
mkdir -p "$results" || exit 2
results=$(cd "$results" && pwd)
made_swap=
if [ -z "${SWAP:-}" ]; then
    SWAP=$(mktemp -d "$results/swap.XXXXXX") || exit 2
    made_swap=$SWAP
fi
cleanup() { [ -z "$made_swap" ] || rm -rf "$made_swap"; }
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# From elsewhere, so that what is imported is the installed package and not the source tree.
elsewhere=$(mktemp -d "$SWAP/elsewhere.XXXXXX") || exit 2
failed=0
summary=$results/summary.txt
: >"$summary"

say() { printf '%s\n' "$*" | tee -a "$summary"; }

# part NAME LIMIT COMMAND...: run it for LIMIT seconds at most, or for what is left of all.
part() {
    local name=$1 limit=$2 left=$((budget - SECONDS)) started=$SECONDS code
    shift 2
    if [ "$left" -lt 15 ]; then
        say "left out  $name: ${left}s are left"
        failed=1
        return
    fi
    [ "$limit" -lt "$left" ] || limit=$left
    # TERM first, so that swap is removed; 8 seconds later there is no asking.
    (cd "$elsewhere" && exec timeout --kill-after=8 "$((limit - 8))" "$@") \
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

train() {
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" "$here/train.py" --device cuda --directory "$SWAP" --json --timeout "$limit" "$@"
}

if "$python" -c 'import deepspeed' 2>/dev/null; then
    peer=(--peer deepspeed)
else
    say "deepspeed is not installed here: the peer is plain torch with everything on the GPU"
    peer=(--peer torch)
fi

part facts 30 "$python" -c '
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from machine_facts import machine_facts
gpu = torch.cuda.get_device_properties(0)
print(json.dumps(machine_facts() | {"gpu": gpu.name, "gpu_gib": round(gpu.total_memory / 2**30, 1)}))' "$here"
part tests 150 "$python" -m pytest -q -rfE --maxfail=20 -p no:cacheprovider --rootdir "$PWD" \
    -c "$PWD/pyproject.toml" "$PWD/tests" \
    -k "cuda or gpu or test_link or (test_where_tensors_are and device)"
train train-926m 130 --model 926m --rounds 3 --steps 2 --budget-device 2GiB --budget-host 4GiB "${peer[@]}"
train train-4b 150 --model 4b --rounds 2 --steps 1 --warm-up 1 --capacity --budget-device 4GiB --budget-host 16GiB
part doctor 30 "$python" -m infinity doctor --json --path "$SWAP"
part cpu_adam 30 "$python" "$here/cpu_adam.py" --elements 50000000 --repeats 3 --json
if command -v fio >/dev/null; then
    part aio 30 "$python" "$here/aio.py" --directory "$SWAP" --engine io_uring --block 4194304 --size 536870912 \
        --pairs 2 --json
else
    say "left out  aio: fio is not installed"
fi

say "$SECONDS s in all; results are in $results"
exit "$failed"
