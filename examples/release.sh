#!/usr/bin/env bash
# Quantize a checkpoint to int4 for a release, and stop where the result is not good enough.
#
#   release.sh [FOLDER [MODEL.safetensors]]
#
# FOLDER: where the model and its report go; default: a new temporary folder.
# MODEL: what is released; default: the digits network beside this script.
# MAX_RELATIVE_ERROR (environment): the limit for ||x - x_hat|| / ||x|| over all quantized weights.
#
# Exit codes: 0 released; 1 the model cannot be quantized; 3 the error is above the limit; 4 the
# result cannot be read back, or a second run gives other bytes; anything else as qtool gave it.
# The model and its report appear in FOLDER only when every check has passed; until then what an
# earlier release left there stays as it is.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$(mktemp -d)}
model=${2:-$here/digits.safetensors}
limit=${MAX_RELATIVE_ERROR:-0.15}
options=(--dtype int4 --block-size 32)

stop() {
    echo "release: $2" >&2
    exit "$1"
}

[ -r "$model" ] || stop 1 "$model cannot be read"
model=$(cd "$(dirname "$model")" && pwd)/$(basename "$model")
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
name=$(basename "$model" .safetensors).int4
quantized=$name.safetensors
report=$name.report.json

# Work in a folder of its own, so that the report calls the model by the name it will have.
staging=$(mktemp -d "$folder/.release.XXXXXX")
trap 'rm -rf "$staging"' EXIT
cd "$staging"

# 1. Quantize. qtool itself says on standard error what was wrong; the exit code says whose fault.
status=0
qtool quantize "$model" -o "$quantized" "${options[@]}" --report "$report" --quiet || status=$?
case $status in
    0) ;;
    1) stop 1 "$model cannot be quantized" ;;
    *) stop "$status" "qtool stopped with exit code $status" ;;
esac

# 2. Check a figure of the report.
error=$(python3 -c 'import json, sys
print(json.load(sys.stdin)["totals"]["relative_error"])' <"$report")
python3 -c 'import sys
sys.exit(not float(sys.argv[1]) <= float(sys.argv[2]))' "$error" "$limit" ||
    stop 3 "relative error $error is above $limit"

# 3. Read the result back: what is in it, and can every tensor be restored?
qtool inspect "$quantized" || stop 4 "$quantized cannot be read"
qtool dequantize "$quantized" -o restored.safetensors --quiet ||
    stop 4 "$quantized cannot be restored"

# 4. The same through a pipe gives the same bytes.
qtool quantize - -o - "${options[@]}" --quiet <"$model" | cmp - "$quantized" ||
    stop 4 "a second run gives other bytes"

mv "$report" "$quantized" "$folder"
printf 'released %s: %d -> %d bytes, relative error %.4f\n' "$folder/$quantized" \
    "$(wc -c <"$model")" "$(wc -c <"$folder/$quantized")" "$error"
