#!/usr/bin/env bash
# What a card can tell (docs/first_card.md). It ends by itself; a second time, it goes on.
# PYTHON is the Python that has torch, OUT a folder for the results. Arguments: see bash tools/card.sh --help
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
export PYTHONUNBUFFERED=1 PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m benchmarks.gpu ${OUT:+--out "$OUT"} "$@"
