#!/bin/bash
# Takes uroce's place in `interop.sh --selftest`: uroce's command line, run by rdma-core's programs in guest 1.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command=${1:?ping or pingpong}
shift
args=()
if [ "$command" = ping ]; then
    program=rping
else
    program="ibv_${1:?rc, uc or ud}_pingpong"
    args+=(-d rxe0)
    shift
fi
while [ $# -gt 0 ]; do
    case $1 in
    --device) shift ;;
    -g)
        # uroce's GID order is IPv4, link-local, ULA; rxe's is link-local, IPv4, ULA.
        case ${2:?} in
        0) args+=(-g 1) ;;
        1) args+=(-g 0) ;;
        *) args+=(-g "$2") ;;
        esac
        shift
        ;;
    *) args+=("$1") ;;
    esac
    shift
done
# What is killed here ends there too.
exec "$HERE/run.sh" sh 1 "timeout --foreground -k 2 ${CASE_LIMIT:-60} $program ${args[*]} 2>/tmp/standin.err; status=\$?; cat /tmp/standin.err; exit \$status"
