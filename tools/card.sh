#!/usr/bin/env bash
# What a card can tell (docs/first_card.md). It ends by itself; a second time, it goes on.
# PYTHON is the Python that has torch, OUT a folder for the results. Arguments: see bash tools/card.sh --help
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
export PYTHONUNBUFFERED=1 PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
# Programs that were compiled before there was a card. Triton writes absolute paths among them: the same on both sides.
programs=build/card/triton.tar.gz cache="${CACHE:-/tmp/hf-hybrid-ssm-ahead}"
if [ -f "$programs" ]; then
    mkdir -m 700 "$cache" 2>/dev/null
    if [ -L "$cache" ] || [ ! -O "$cache" ]; then
        echo "$cache is not this user's folder: remove it." >&2
        exit 2
    fi
    tar -xzf "$programs" -C "$cache" || exit 2
    export TRITON_CACHE_DIR="$cache"
fi
exec "${PYTHON:-python3}" -m benchmarks.gpu ${OUT:+--out "$OUT"} "$@"
