#!/bin/bash
# The matrix of uroce against Linux rxe: matrix.py says how.
exec python3 "$(dirname "${BASH_SOURCE[0]}")/matrix.py" "$@"
