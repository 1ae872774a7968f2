#!/bin/bash
# Makes the captures of rxe talking to rxe: guest 1 is the client, guest 2 the server, tcpdump on tap1.
#
#   captures.sh DIR [REGEX]     all, or those whose names match; about 5 s each
#
# Leaves NAME.pcap, NAME.log (what both programs printed) and a line in DIR/index.tsv for each; mkindex.py makes
# DIR/INDEX.md of them. The guests are left running. Environment: KERNEL, as for run.sh.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$HERE/lib.sh"

case ${1:-} in
"" | -*)
    usage "$0" >&2
    exit 2
    ;;
esac
mkdir -p "$1"
CAPDIR=$(cd "$1" && pwd)
export CAPDIR
ONLY=${2:-.}
TABLE=$CAPDIR/index.tsv
LIMIT=40 # seconds a program may take
CLIENT=1
SERVER=2

S4=$(guest_ip4 $SERVER)
S6=$(guest_ip6 $SERVER)
SLL=fe80::77:ff:fe00:$SERVER

run() {
    "$HERE/run.sh" "$@"
}

in_guest() {
    GSH_TIMEOUT=60 run sh "$@" 2>&1
}

# end_server COMMAND: gives it a moment, ends what is left, prints what it said.
end_server() {
    local program=${1%% *}
    in_guest $SERVER "for i in 1 2 3 4 5 6 7 8; do pidof $program >/dev/null || break; sleep 0.2; done
        for p in \$(pidof $program); do kill \$p; done
        cat /tmp/server.log"
}

# capture NAME SERVER-COMMAND CLIENT-COMMAND [SET-UP CLEAN-UP in the client's guest [SET-UP CLEAN-UP in the server's]]
capture() {
    local name=$1 server=$2 client=$3 client_setup=${4:-} client_cleanup=${5:-} server_setup=${6:-} server_cleanup=${7:-}
    local status=0 client_said server_said="" summary
    [[ $name =~ $ONLY ]] || return 0
    [ -z "$client_setup" ] || in_guest $CLIENT "$client_setup"
    [ -z "$server_setup" ] || in_guest $SERVER "$server_setup"
    run cap-start "$name" "udp port 4791 or (vlan and udp port 4791)"
    if [ -n "$server" ]; then
        run bg $SERVER server "timeout $LIMIT $server"
        sleep 1.2
    fi
    client_said=$(in_guest $CLIENT "timeout $LIMIT $client") || status=$?
    [ -z "$server" ] || sleep 0.5
    run cap-stop "$name" >/dev/null
    [ -z "$server" ] || server_said=$(end_server "$server") || true
    [ -z "$client_cleanup" ] || in_guest $CLIENT "$client_cleanup"
    [ -z "$server_cleanup" ] || in_guest $SERVER "$server_cleanup"
    {
        echo "\$ server (guest $SERVER): $server"
        echo "$server_said"
        echo "\$ client (guest $CLIENT): $client   -> rc $status"
        echo "$client_said"
        [ -z "$client_setup$server_setup" ] || echo "setup guest1: $client_setup / guest2: $server_setup"
    } >"$CAPDIR/$name.log"
    summary=$(python3 "$HERE/icrc.py" -m "$CAPDIR/$name.pcap") || warn "$name: a wrong ICRC"
    echo "rc=$status $summary"
    grep -v "^$name"$'\t' "$TABLE" >"$TABLE.new" || true
    printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$name" "$status" "$server" "$client" \
        "$client_setup ${server_setup:+(guest $SERVER: $server_setup)}" "$summary" >>"$TABLE.new"
    mv "$TABLE.new" "$TABLE"
}

[ "$ONLY" != . ] || : >"$TABLE"
touch "$TABLE"
run start $CLIENT ${KERNEL:+"$KERNEL"}
run start $SERVER ${KERNEL:+"$KERNEL"}

# ---- RDMA-CM
capture rping_v4 "rping -s -a $S4 -C 3 -v" "rping -c -a $S4 -C 3 -v -S 64"
capture rping_v6_ula "rping -s -a $S6 -C 3 -v" "rping -c -a $S6 -C 3 -v -S 64"
capture rping_v6_ll "rping -s -a $SLL%eth0 -C 3 -v" "rping -c -a $SLL%eth0 -C 3 -v -S 64"
capture rping_big "rping -s -a $S4 -C 2 -S 10000" "rping -c -a $S4 -C 2 -S 10000"
capture ucmatose "ucmatose -b $S4 -c 2 -C 3 -S 100" "ucmatose -s $S4 -c 2 -C 3 -S 100"
capture udaddy "udaddy -b $S4 -c 1 -C 3 -S 100" "udaddy -s $S4 -c 1 -C 3 -S 100"
capture rdma_client "rdma_server" "rdma_client -s $S4"
capture cmtime_10 "cmtime -b $S4 -c 10" "cmtime -s $S4 -c 10"
capture rstream "rstream -b $S4 -S 1000 -I 5 -C 3" "rstream -s $S4 -S 1000 -I 5 -C 3"
capture mckey_mcast "mckey -b $S4 -m 239.7.7.7 -C 3" "mckey -s -b $(guest_ip4 $CLIENT) -m 239.7.7.7 -C 3"
capture cm_rej_noport "" "rlab client basic -a $S4 -p 19999"
capture cm_rej_user "rlab server reject" "rlab client reject -a $S4"
capture cm_req_noanswer "" "timeout 14 rlab client basic -a $HOST_IP4"

# A program that has the REQ and takes its time: the kernel answers the REQ's repeat with an MRA.
capture cm_mra "rlab server slowaccept" "rlab client slowaccept -a $S4"
# The QP of a connection in a new REQ: REJ, stale connection, and DREQ on the old one.
capture cm_rej_stale "rlab server stale" "rlab client stale -a $S4"
# A server that has stopped hears of the REQ and says nothing.
STOPPED="timeout 20 sh -c 'rping -s -a $S4 -C 1 -v & p=\$!; sleep 0.4; kill -STOP \$p; sleep 6.5; kill -CONT \$p; wait \$p'"
# A client that goes away meanwhile says so: REJ, timeout, with its CA GUID as ARI.
capture cm_rej_timeout "$STOPPED" "timeout 3 rping -c -a $S4 -C 1 -v -S 64"
# Nobody has the datagram service.
capture sidr_noservice "" "udaddy -s $S4 -c 1 -C 1 -S 100"
VLAN='modprobe 8021q; ip link add link eth0 name eth0.5 type vlan id 5; ip link set eth0.5 up; ip addr add 10.78.0.NODE/24 dev eth0.5'
capture vlan "rping -s -a 10.78.0.$SERVER -C 1 -v" "rping -c -a 10.78.0.$SERVER -C 1 -v -S 64" \
    "${VLAN/NODE/$CLIENT}; sleep 1" "ip link del eth0.5" "${VLAN/NODE/$SERVER}; sleep 1" "ip link del eth0.5"

# ---- known payloads (src/rlab.c)

# known NAME MODE: over the CM.
known() {
    capture "$1" "rlab server $2" "rlab client $2 -a $S4" "${@:3}"
}

# exact NAME MODE GID SERVER-PSN CLIENT-PSN MTU [SET-UPs]: without the CM, all numbers given.
exact() {
    capture "$1" "rlab tserver $2 -g $3 -P $4 -M $6" "rlab tclient $2 -a $S4 -g $3 -P $5 -M $6" "${@:7}"
}

known rlab_basic_cm basic
capture rlab_basic_cm6 "rlab server basic -6" "rlab client basic -a $S6"
exact rlab_psnwrap_1024 basic 1 0xfffffd 0xfffffc 1024
exact rlab_mtu256 basic 1 0x000100 0x000200 256
exact rlab_mtu4096_v6 basic 2 0x7fffff 0x800000 4096
known rlab_mw_inv inv
known nak_badrkey_write badrkey
known nak_badrkey_read badread
known nak_badrkey_atomic badatomic
known nak_write_oob oob
known nak_send_toolong toolong
known rnr_then_ok rnr
known rnr_exhausted rnrfail

capture atomic_write "ops server -M 1024 atomic-write bad-key-atomic-write" "ops client -a $S4 -M 1024 atomic-write bad-key-atomic-write"
# Its ICRCs are wrong: captures/odd.
capture rxe_flush "ops server -M 1024 flush flush-region bad-key-flush" "ops client -a $S4 -M 1024 flush flush-region bad-key-flush"

# ---- rdma-core's pingpongs and perftest

# same NAME COMMAND: the server's command; the client's is that with the server's address.
same() {
    capture "$1" "$2" "$2 $S4"
}

for mtu in 256 1024 4096; do
    same rc_pingpong_mtu$mtu "ibv_rc_pingpong -d rxe0 -g 1 -n 4 -s 5000 -m $mtu -c"
done
same rc_pingpong_v6ll "ibv_rc_pingpong -d rxe0 -g 0 -n 4 -s 3000 -m 1024"
same rc_pingpong_v6ula "ibv_rc_pingpong -d rxe0 -g 2 -n 4 -s 3000 -m 1024"
same uc_pingpong "ibv_uc_pingpong -d rxe0 -g 1 -n 4 -s 3000 -m 1024"
same ud_pingpong "ibv_ud_pingpong -d rxe0 -g 1 -n 5 -s 1000"
same ud_pingpong_v6 "ibv_ud_pingpong -d rxe0 -g 2 -n 5 -s 1000"
same srq_pingpong "ibv_srq_pingpong -d rxe0 -g 1 -n 20 -q 4 -s 512"

P="-d rxe0 -x 1 -F"
same ib_write_bw_1024 "ib_write_bw $P -m 1024 -s 10000 -n 5"
same ib_write_bw_4096 "ib_write_bw $P -m 4096 -s 20000 -n 5"
same ib_read_bw "ib_read_bw $P -m 1024 -s 10000 -n 5"
same ib_send_bw "ib_send_bw $P -m 1024 -s 5000 -n 5"
same ib_send_bw_uc "ib_send_bw $P -c UC -m 1024 -s 5000 -n 5"
same ib_send_bw_ud "ib_send_bw $P -c UD -m 1024 -s 500 -n 5"
same ib_send_bw_cm "ib_send_bw $P -R -s 5000 -n 5"
same ib_write_bw_cm "ib_write_bw $P -R -s 5000 -n 5"
same ib_write_lat "ib_write_lat $P -s 8 -n 10"
same ib_send_lat "ib_send_lat $P -s 8 -n 10"
same ib_atomic_fadd "ib_atomic_bw $P -A FETCH_AND_ADD -n 10"
same ib_atomic_cas "ib_atomic_bw $P -A CMP_AND_SWAP -n 10"

# ---- loss, duplication, reordering

# drop MATCH: nft in the guest that receives, after the capture point: the dropped packet is in the capture.
drop() {
    echo "modprobe nf_tables; modprobe nft_numgen; nft add table inet l;" \
        "nft add chain inet l i '{ type filter hook input priority 0; }';" \
        "nft add rule inet l i udp dport 4791 $* counter drop"
}
DROPPED='nft list table inet l | grep counter; nft delete table inet l'
OPCODE="@th,64,8" # the byte after the UDP header
CM=0x64

exact loss_data many 1 0x400 0xffffe0 256 "" "" "$(drop $OPCODE != $CM numgen inc mod 9 4)" "$DROPPED"
exact loss_ack many 1 0x400 0x500 256 "$(drop $OPCODE 0x11 numgen inc mod 5 3)" "$DROPPED"
exact loss_read_resp basic 1 0x10 0x20 256 "$(drop $OPCODE 0x0e numgen inc mod 6 2)" "$DROPPED"
exact loss_atomic_ack basic 1 0x10 0x20 1024 "$(drop $OPCODE 0x12 numgen inc mod 2 0)" "$DROPPED"
known loss_cm_rep basic "$(drop $OPCODE $CM numgen inc mod 3 0)" "$DROPPED"
# netem in the guest that sends, before the capture point: what it does is on the wire.
exact netem_dup_reorder many 1 0x400 0x500 256 \
    "tc qdisc add dev eth0 root netem delay 4ms reorder 30% 50% duplicate 10%" "tc qdisc del dev eth0 root"
