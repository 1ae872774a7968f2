#!/bin/sh
# Runs inside the guest: rxe and uroce in turns over one veth pair. Prints `FIGURE|id|title|metric|value` lines.
#
#   guest-measure.sh ROUNDS FOLDER     FOLDER has the programs uroce and versus
#
# Both ends of the pair are in one network namespace, as rxe knows no other: rules send each end's packets to the other
# over the pair. uroce's endpoints have MACs and addresses of their own, beside rxe's.
set -u
ROUNDS=$1
BIN=$2
A=10.98.0.1 B=10.98.0.2 OWN_A=10.98.0.11 OWN_B=10.98.0.12
DEV_A="packet:va,mac=02:98:00:00:00:11,ip=$OWN_A"
DEV_B="packet:vb,mac=02:98:00:00:00:12,ip=$OWN_B"

make_pair() {
    modprobe veth 2>/dev/null
    ip link add va mtu 9000 type veth peer name vb mtu 9000
    echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
    for i in va vb; do
        echo 0 >/proc/sys/net/ipv4/conf/$i/rp_filter
        echo 1 >/proc/sys/net/ipv4/conf/$i/accept_local
        echo 1 >/proc/sys/net/ipv4/conf/$i/arp_ignore
        ip link set $i up
    done
    ip addr add $A/24 dev va
    ip addr add $B/24 dev vb
    ip rule add pref 5 iif va lookup local
    ip rule add pref 6 iif vb lookup local
    ip route add $B dev va src $A table 201
    ip route add $A dev vb src $B table 202
    ip rule add pref 10 from $A to $B lookup 201
    ip rule add pref 11 from $B to $A lookup 202
    ip rule add pref 100 lookup local
    ip rule del pref 0
    ping -c 1 -I $A $B >/dev/null || echo "NOTE|no way over the pair"
    rdma link add rxa type rxe netdev va
    rdma link add rxb type rxe netdev vb
}

drop_pair() {
    rdma link delete rxa
    rdma link delete rxb
    ip rule add pref 0 lookup local
    for pref in 5 6 10 11 100; do ip rule del pref $pref; done
    ip link del va
}

figure() {
    case $5 in
    '' | *[!0-9.]*) echo "NOTE|$1 gave no figure" ;;
    *) echo "FIGURE|$1|$2|$3|$5" ;;
    esac
}

# The row under the head of perftest's table, column $1.
column() { awk -v n="$1" '/^ *#bytes/ { getline; print $n; exit }'; }

# rxe_test PROGRAM ARGUMENTS…: what its client printed.
rxe_test() {
    program=$1
    shift
    timeout 60 "$program" -d rxa -x 1 -F "$@" >/tmp/versus-server.log 2>&1 &
    server=$!
    sleep 2
    timeout 60 "$program" -d rxb -x 1 -F "$@" 127.0.0.1 2>&1
    wait $server
}

# uroce_test OPERATION DIRECTION ARGUMENTS…
uroce_test() {
    operation=$1 direction=$2
    shift 2
    timeout 60 "$BIN/uroce" perf "$operation" "$direction" -d "$DEV_A" "$@" >/tmp/versus-server.log 2>&1 &
    server=$!
    sleep 2
    timeout 60 "$BIN/uroce" perf "$operation" "$direction" -d "$DEV_B" --verify "$@" $OWN_A 2>&1
    wait $server
}

json() { sed -n "s/.*\"$1\": *\\([0-9.]*\\).*/\\1/p" | head -n 1; }
# Microseconds a connection of cmtime's steps whose first word matches $1, summed.
steps() { awk -v step="$1" 'NF >= 5 && $1 ~ step && $NF ~ /^[0-9.]+$/ { sum += $NF } END { if (sum) print sum }' /tmp/versus-client.log; }
# Bytes a second to Gbit/s; microseconds of half a round trip to a round trip; microseconds a connection to a rate.
gbits() { awk '{ printf "%.4f", $1 * 8 / 1e9 }'; }
twice() { awk '{ printf "%.2f", $1 * 2 }'; }
rate() { awk '$1 > 0 { printf "%.2f", 1e6 / $1 }'; }

one_round() {
    figure rxe/write/bw "rxe: ib_write_bw of 1 MiB" gbits - "$(rxe_test ib_write_bw -s 1048576 -n 200 --report_gbits | column 4)"
    figure uroce/write/bw "uroce AF_PACKET: write of 1 MiB" gbits - "$(uroce_test write bw -s 1048576 -n 1000 -t 16 -Q 4 --json | json BW_average | gbits)"
    figure rxe/send/lat "rxe: ib_send_lat of 8 bytes, round trip" p50_us - "$(rxe_test ib_send_lat -s 8 -n 300 | column 5 | twice)"
    figure uroce/send/lat "uroce AF_PACKET: send of 8 bytes, round trip" p50_us - "$(uroce_test send lat -s 8 -n 1000 --json | json t_typical | twice)"
    figure rxe/write/lat "rxe: ib_write_lat of 8 bytes, round trip" p50_us - "$(rxe_test ib_write_lat -s 8 -n 300 | column 5 | twice)"
    figure uroce/write/lat "uroce AF_PACKET: write of 8 bytes, round trip" p50_us - "$(uroce_test write lat -s 8 -n 1000 --json | json t_typical | twice)"

    # cmtime makes its connections step by step, all of them at once; a connection's time is the sum of its steps.
    timeout 60 cmtime -b $A -c 100 >/tmp/versus-server.log 2>&1 &
    server=$!
    sleep 1
    timeout 60 cmtime -b $B -s $A -c 100 >/tmp/versus-client.log 2>&1
    kill $server 2>/dev/null
    wait $server 2>/dev/null
    figure rxe/connect "rxe: cmtime, all steps of a connection" connections_s - "$(steps '.*' | rate)"
    figure rxe/connect/step "rxe: cmtime, its step connect" connections_s - "$(steps '^connect$' | rate)"
    timeout 60 "$BIN/uroce" perf cm -d "$DEV_A" --wait spin >/tmp/versus-server.log 2>&1 &
    server=$!
    sleep 2
    figure uroce/connect "uroce AF_PACKET: perf cm, 100 at once, made and ended" connections_s - "$(timeout 60 "$BIN/uroce" perf cm -d "$DEV_B" -n 1000 -q 100 --json $OWN_A 2>&1 | json connections_per_second)"
    wait $server
    timeout 60 "$BIN/uroce" cm time --device "$DEV_A" -c 100 >/tmp/versus-server.log 2>&1 &
    server=$!
    sleep 1
    figure uroce/connect/step "uroce AF_PACKET: cm time, its step connect" connections_s - "$(timeout 60 "$BIN/uroce" cm time --device "$DEV_B" -c 100 -s $OWN_A --json 2>&1 | json connects_per_second)"
    wait $server
    floor=$("$BIN/versus" child floor --seconds 1)
    figure floor "copy and CRC in memory: a sender" copy_crc_gbits - "$(echo "$floor" | sed -n 's/.*"copy_crc_gbits": *\([0-9.]*\).*/\1/p')"
    figure floor "copy and CRC in memory" crc_copy_gbits - "$(echo "$floor" | sed -n 's/.*"crc_copy_gbits": *\([0-9.]*\).*/\1/p')"
}

echo "MACHINE|guest kernel|$(uname -r)"
echo "MACHINE|guest copy and CRC|kernel $("$BIN/versus" child floor --seconds 0.1 | sed -n 's/.*"kernel": *"\([A-Za-z]*\)".*/\1/p'), as uroce uses"
echo "MACHINE|guest processor|$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1), $(grep -c ^processor /proc/cpuinfo) processors, emulated; rep movsb $(grep -qw erms /proc/cpuinfo && echo believed fast || echo not believed fast)"
make_pair
round=0
while [ $round -lt "$ROUNDS" ]; do
    round=$((round + 1))
    echo "NOTE|round $round" >&2
    one_round
done
drop_pair
