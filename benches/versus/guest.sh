#!/bin/bash
# uroce beside Linux's rxe, inside the guest of tests/rxe-vm: bandwidth, latency and connections over one veth pair, and
# what copies and CRCs of the guest allow. Emulated, so only the ratios mean something.
#
#   benches/versus/guest.sh [--rounds N] [--kernel 6.12|6.1] [--out DIR]
#
# The guest's processor does not claim that "rep movsb" is fast (CPU=max,-erms): emulated, byte by byte, it is the slowest
# copy there is, and a kernel that believes otherwise takes it for each copy between it and programs, and to clear pages.
# CPU=max measures with it. The guest goes before other work of this machine, as its two processors talk to each other.
#
# Writes DIR/versus/guest.json (DIR is docs by default), which `run.sh` and `run.sh report` show beside the other
# results. Debian 12, as root; takes about three minutes. The guest is stopped at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
rounds=5 kernel=6.12 out=docs
while [ $# -gt 0 ]; do
    case $1 in
    --rounds) rounds=$2 ;;
    --kernel) kernel=$2 ;;
    --out) out=$2 ;;
    *)
        awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"
        exit 2
        ;;
    esac
    shift 2
done

export NS=versusguest GSH_TIMEOUT=900 CPU=${CPU:-max,-erms}
VM=tests/rxe-vm
GUEST=9
"$VM/build.sh" "$kernel" >&2
cargo build --release -q -p uroce-tools --bin uroce
cargo build --release -q -p uroce-benches --example versus
# shellcheck source=../../tests/rxe-vm/lib.sh
share=$(bash -c '. "$1/lib.sh"; echo "$SHARE"' _ "$VM")
run=$(bash -c '. "$1/lib.sh"; echo "$RUN"' _ "$VM")
mkdir -p "$share/versus"
cp target/release/uroce target/release/examples/versus benches/versus/guest-measure.sh "$share/versus/"

stop() {
    "$VM/run.sh" stop "$GUEST" || true
    "$VM/run.sh" net-down || true
    rm -rf "$share/versus"
}
trap stop EXIT
nice -n -20 "$VM/run.sh" start "$GUEST" "$kernel" >&2
# Where sessions share the processors evenly, niceness holds within one alone.
echo -20 >"/proc/$(cat "$run/g$GUEST.pid")/autogroup" 2>/dev/null || true
log=$(mktemp)
"$VM/run.sh" sh "$GUEST" "sh /host/versus/guest-measure.sh $rounds /host/versus" | tee "$log" >&2
target/release/examples/versus --out "$out" guest "$log"
rm "$log"
