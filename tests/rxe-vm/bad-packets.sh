#!/bin/bash
# Sends the corpus of bad packets (tests/it/bad_packets) at rxe in a guest and writes what differs from our verdicts.
#
#   bad-packets.sh [6.12|6.1]      docs/src/interop-bad-packets.md, from the newest kernel; about 4 minutes
#
# A packet that ends the guest is a result: the guest is started again, and the next packet follows. Needs root, the
# guests of build.sh, and `cargo build --release -p uroce-tests --bins` (or BAD_PACKETS=PROGRAM).
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$HERE/lib.sh"
GUEST=2
PROGRAM=${BAD_PACKETS:-$HERE/../../target/release/bad_packets_at_rxe}
PAGE=$HERE/../../docs/src/interop-bad-packets.md
DEATHS_MAX=20
export NO_NFT=1

case ${1:-} in
-h | --help)
    usage "$0"
    exit
    ;;
esac
need_root
KERNEL=${1:-$(default_kernel)} || die "no guest is built: run build.sh first"
RESULTS=$RUN/bad-packets.tsv
rm -f "$RESULTS"

# The guest's console says whether it was a panic.
epitaph() {
    local said
    said=$(tr -d '\r' <"$RUN/g$GUEST.console" | grep -m 1 -oE 'Kernel panic.*|BUG:.*|RIP: 0010:[^ ]*' || true)
    echo "${said:-the guest does not answer}"
}

trap '"$HERE/run.sh" stop $GUEST' EXIT
for ((deaths = 0; deaths < DEATHS_MAX; deaths++)); do
    "$HERE/run.sh" start "$GUEST" "$KERNEL"
    "$HERE/run.sh" bg "$GUEST" target "target 18517 1 256"
    sleep 1
    status=0
    ns_exec "$PROGRAM" run "$HOST_IF" "$HOST_IP4" "$(guest_ip4 "$GUEST")" "$RESULTS" || status=$?
    [ "$status" = 3 ] || break
    what=$(epitaph)
    echo "the guest ended: $what"
    sed -i '$ s/\t[^\t]*$/\tthe guest ends: '"${what//[\/&]/ }"'/' "$RESULTS"
    "$HERE/run.sh" stop "$GUEST"
done
[ "$status" = 0 ] || die "the run did not come to its end"
"$PROGRAM" report "$RESULTS" "$(cat "$CACHE/version-$KERNEL")" >"$PAGE"
echo "$(wc -l <"$RESULTS") packets, in ${PAGE#"$HERE/../../"}"
