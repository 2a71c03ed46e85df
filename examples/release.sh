#!/usr/bin/env bash
# Quantize a checkpoint to int4 for a release, and stop where the result is not good enough.
#
#   release.sh [FOLDER [MODEL.safetensors]]
#
# FOLDER: where the model and its report go; default: a new temporary folder.
# MODEL: what is released; default: the digits network beside this script.
# MAX_RELATIVE_ERROR (environment): the limit for ||x - x_hat|| / ||x|| over all quantized weights.
#
# Exit codes: 0 released; 1 the model cannot be quantized; 3 the error is above the limit;
# anything else as qtool gave it. The model appears in FOLDER only when every check has passed.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$(mktemp -d)}
model=${2:-$here/digits.safetensors}
limit=${MAX_RELATIVE_ERROR:-0.15}
options=(--dtype int4 --block-size 32)

name=$(basename "$model" .safetensors).int4
report=$folder/$name.report.json
mkdir -p "$folder"
staging=$(mktemp -d "$folder/.release.XXXXXX")
trap 'rm -rf "$staging"' EXIT
quantized=$staging/$name.safetensors

# 1. Quantize. qtool itself says on standard error what was wrong; the exit code says whose fault.
status=0
qtool quantize "$model" -o "$quantized" "${options[@]}" --report "$report" --quiet || status=$?
case $status in
    0) ;;
    1) echo "release: $model cannot be quantized" >&2 && exit 1 ;;
    *) echo "release: qtool stopped with exit code $status" >&2 && exit "$status" ;;
esac

# 2. Check a figure of the report.
error=$(python3 -c 'import json, sys
print(json.load(sys.stdin)["totals"]["relative_error"])' <"$report")
if ! python3 -c 'import sys
sys.exit(not float(sys.argv[1]) <= float(sys.argv[2]))' "$error" "$limit"; then
    echo "release: relative error $error is above $limit" >&2
    exit 3
fi

# 3. Read the result back: what is in it, and can every tensor be restored?
qtool inspect "$quantized"
qtool dequantize "$quantized" -o "$staging/restored.safetensors" --quiet

# 4. The same through a pipe gives the same bytes.
cat "$model" | qtool quantize - -o - "${options[@]}" --quiet | cmp - "$quantized"

mv "$quantized" "$folder"
printf 'released %s: %d -> %d bytes, relative error %.4f\n' "$folder/$name.safetensors" \
    "$(wc -c <"$model")" "$(wc -c <"$folder/$name.safetensors")" "$error"
