#!/usr/bin/env bash
# Quantize a model, and release it only if nothing is wrong with it.
#
#   release.sh MODEL FOLDER [RECIPE]
#
# MODEL   a .safetensors or .onnx file, or a checkpoint folder.
# FOLDER  gets the release as FOLDER/1, the next one as FOLDER/2; FOLDER/latest links to the last.
# RECIPE  says how to quantize; default: recipe.toml beside this script.
#
# A release holds the quantized model, under the name of MODEL, and report.json, .md and .html. It
# appears whole or not at all: when a check fails, FOLDER/latest stays what it was, and
# FOLDER/failed.json is the report of what did not pass.
#
# Exit codes: 0 released; 3 a check failed, a line on standard error says of which tensor; 1 it
# cannot be done; else qtool's own: 2 wrong usage, 130 interrupted, 143 terminated.
set -euo pipefail

[ $# -ge 2 ] || { echo 'usage: release.sh MODEL FOLDER [RECIPE]' >&2; exit 2; }
given=$1
model=$(realpath -s -- "$given")
command -v qtool >/dev/null || { echo 'release: qtool is not installed' >&2; exit 1; }
recipe=$(realpath -s -- "${3:-$(dirname -- "$0")/recipe.toml}")
mkdir -p -- "$2"
folder=$(realpath -- "$2")
name=$(basename -- "$model")
export QTOOL_NO_CONFIG=1 # the recipe says it all

# What stops a release: figures of a tensor, or of all together, as `qtool quantize --help` says.
size=(--fail-if 'total.bits_per_weight > 5.5')
gates=(
    "${size[@]}"
    --fail-if 'sqnr_db < 15'
    --fail-if 'max_abs_error > 0.2' # in the units of the weights: suit it to the model
    --fail-if 'flushed_to_zero > 0.3 * elements'
    --fail-if 'absmax == 0' # a layer of zeros, which is exact
)
if [ -e "$folder/latest" ]; then
    echo "baseline: $folder/$(readlink -- "$folder/latest")" >&2
    gates+=(--baseline "$folder/latest/report.json" --fail-if 'sqnr_db worse by 0.5')
fi

# All work is done in a folder of its own, which goes away with the script.
staging=$(mktemp -d -- "$folder/.release.XXXXXX")
failing=$staging/release/report.json # what says why, if a check fails now
leave() {
    code=$?
    [ $code -eq 0 ] || echo "release: nothing is released; messages call $given ${source-$model}" >&2
    [ $code -ne 3 ] || [ ! -e "$failing" ] || mv -- "$failing" "$folder/failed.json"
    rm -rf -- "$staging"
}
trap leave EXIT
rm -f -- "$folder/failed.json" # an earlier one
mkdir "$staging/release" "$staging/again"
cd "$staging/release"
source=$(realpath -s --relative-to=. -- "$model") # reports name no folder of this machine
quantize=(qtool quantize "$source" -o "$name" --recipe "$recipe" --strict)

echo '1. The plan, from headers alone: does the recipe fit, and is the result small enough?' >&2
"${quantize[@]}" "${size[@]}" --dry-run --report report.json

echo '2. Quantize. No file appears where a gate fails.' >&2
"${quantize[@]}" "${gates[@]}" --report report.json --hash

echo '3. Read it back: do the file, its original and the report agree?' >&2
failing=$staging/verified.json
qtool verify "$source" "$name" --against report.json --report "$failing" --quiet

echo '4. Quantize again, on one thread: are the bytes the same?' >&2
failing=$staging/again/report.json
(cd ../again && "${quantize[@]}" --report report.json --jobs 1 --quiet)
diff -r --exclude=report.json . ../again >&2 || { echo "release: a second run differs" >&2; exit 3; }

echo '5. Pages for people, and the release appears.' >&2
qtool report report.json -o report.md --quiet
qtool report report.json -o report.html --quiet
number=1
while [ -e "$folder/$number" ]; do number=$((number + 1)); done
ln -s "$number" ../latest
mv -T -- "$staging/release" "$folder/$number"
mv -T -- "$staging/latest" "$folder/latest"
echo "released $folder/$number/$name"
