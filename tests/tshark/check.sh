#!/bin/bash
# Another decoder reads what we send: nothing may be malformed, and every packet must be RoCEv2.
#
#   check.sh            makes the captures and checks them; prints `ok NAME PACKETS` or `FAIL NAME` with what is wrong
#
# The captures: every served opcode at many lengths and every message of connection management (the example
# `every_packet`), and what real commands sent and received, losses and refusals included. Needs tshark.
# tshark's guesses at what a payload holds (storage protocols, Ethernet) are off: they call our patterns malformed. That
# it finds a UDP checksum of 0 wrong over IPv6 is not looked at: rxe and NICs send 0 there too.
#
# Environment:
#   UROCE   the binary (target/release/uroce of this repository)
#   OUT     where the captures go (a temporary directory)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
UROCE=${UROCE:-$ROOT/target/release/uroce}
KEEP=${OUT:+1}
OUT=${OUT:-$(mktemp -d)}
PEER=
PASSED=0
FAILED=0

cleanup() {
    [ -z "$PEER" ] || kill "$PEER" 2>/dev/null || true
    [ -n "$KEEP" ] || rm -rf "$OUT"
}
trap cleanup EXIT

# The dissectors that guess from payload or private data, as far as this tshark has them: it refuses names it does not
# know.
QUIET=()
quiet() {
    local known guess
    known=$(tshark -G protocols 2>/dev/null | cut -f 3)
    for guess in smc smb_direct rpcordma nvme-rdma lnet iser infiniband.eoib infiniband_sdp fcoib drbd; do
        ! grep -qxF "$guess" <<<"$known" || QUIET+=(--disable-protocol "$guess")
    done
}

decode() {
    # tshark warns on stderr of names that its version does not have, and of running as root.
    timeout 120 tshark -r "$1" "${QUIET[@]}" "${@:2}" 2>"$OUT/tshark.err" || {
        cat "$OUT/tshark.err"
        return 1
    }
}

# check NAME FILE: counts what is malformed and what is not RoCEv2.
check() {
    local name=$1 file=$2 packets bad
    packets=$(decode "$file" | wc -l)
    bad=$(decode "$file" -Y '_ws.malformed || !infiniband.bth' | head -n 20)
    if [ "$packets" -gt 0 ] && [ -z "$bad" ]; then
        echo "ok $name $packets packets"
        PASSED=$((PASSED + 1))
    else
        echo "FAIL $name: $packets packets"
        echo "$bad"
        FAILED=$((FAILED + 1))
    fi
}

# all_opcodes FILE NUMBER…: each of these opcodes is in the capture, as tshark reads it.
all_opcodes() {
    local file=$1 missing
    missing=$(comm -13 <(decode "$file" -T fields -e infiniband.bth.opcode | sort -u) \
        <(printf '%s\n' "${@:2}" | sort -u) | tr '\n' ' ')
    if [ -z "$missing" ]; then
        echo "ok opcodes of $(basename "$file")"
        PASSED=$((PASSED + 1))
    else
        echo "FAIL opcodes of $(basename "$file"): no $missing"
        FAILED=$((FAILED + 1))
    fi
}

# pair NAME FAULT SERVER… -- CLIENT…: two commands on loopback; the client's device records, with a fault rule if any.
pair() {
    local name=$1 fault=$2 server=() client=()
    shift 2
    while [ "$1" != -- ]; do
        server+=("$1")
        shift
    done
    shift
    client=("$@" --pcap "$OUT/$name.pcapng")
    [ -z "$fault" ] || client+=(--fault "$fault")
    timeout 60 "$UROCE" "${server[@]}" >"$OUT/$name.server" 2>&1 </dev/null &
    PEER=$!
    local tries=0
    # The server is up when it holds its UDP port; the client of a pingpong repeats by itself.
    until ss -Hlun 'sport = :4791' | grep -q '127\.88\.0\.1:' || [ $((tries += 1)) -gt 100 ]; do sleep 0.1; done
    sleep 0.3
    timeout 60 "$UROCE" "${client[@]}" >"$OUT/$name.client" 2>&1 </dev/null ||
        { echo "FAIL $name: the command itself" && cat "$OUT/$name.client" "$OUT/$name.server" && FAILED=$((FAILED + 1)); }
    kill "$PEER" 2>/dev/null || true
    wait "$PEER" 2>/dev/null || true
    PEER=
    check "$name" "$OUT/$name.pcapng"
}

command -v tshark >/dev/null || { echo "$0: tshark is missing: apt-get install tshark" >&2 && exit 2; }
[ -x "$UROCE" ] || { echo "$0: no $UROCE: cargo build --release" >&2 && exit 2; }

quiet
(cd "$ROOT" && cargo run -q -p uroce-tests --example every_packet -- "$OUT")
check opcodes "$OUT/opcodes.pcapng"
# FLUSH, ATOMIC WRITE (28, 29) and the congestion notification (0x81) have no names in older versions' tables.
all_opcodes "$OUT/opcodes.pcapng" $(seq 0 20) 22 23 28 29 $(seq 32 43) 100 101
check cm-messages "$OUT/cm.pcapng"

# Two nodes of loopback addresses that nothing else uses.
A=127.88.0.1 B=127.88.0.2
pair ping '' ping -s -a $A -- ping -c -a $A --device udp:$B -C 20
pair ping-loss 'drop:any:every=7' ping -s -a $A -- ping -c -a $A --device udp:$B -C 20
for kind in rc uc ud srq; do
    pair "pingpong-$kind" '' pingpong "$kind" -d udp:$A -n 20 -- pingpong "$kind" -d udp:$B -n 20 $A
done
pair perf-atomic '' perf atomic lat -d udp:$A -n 100 -- perf atomic lat -d udp:$B -n 100 $A
pair perf-read '' perf read bw -d udp:$A -n 100 -- perf read bw -d udp:$B -n 100 $A
pair cm-connect '' cm connect -b $A -c 3 -- cm connect -s $A --device udp:$B -c 3
pair cm-connect-loss 'drop:any:every=5' cm connect -b $A -c 3 -- cm connect -s $A --device udp:$B -c 3
pair cm-datagram '' cm datagram -b $A -c 2 -- cm datagram -s $A --device udp:$B -c 2

echo "$PASSED passed, $FAILED failed"
[ "$FAILED" = 0 ]
