#!/bin/bash
# Interop tests: the uroce binary on h0 in the namespace against Linux rxe in guest 2.
#
#   interop.sh [REGEX]      runs the cases whose names match (all)
#   interop.sh --list       their names
#   interop.sh --selftest   the same table with guest 1 in uroce's place (standin.sh): tests this script
#
# Prints `ok NAME SECONDS s` or `FAIL NAME` with both sides' logs, and at the end `N passed, N failed`.
# Exit status: 0 all passed, 1 a case failed, 2 the run could not begin. build.sh must have run before.
#
# Environment:
#   UROCE        the binary (target/release/uroce of this repository)
#   KERNEL       of the guest (6.12, or 6.1 where only that is built)
#   NO_NFT       1, the default here: nothing hides UDP 4791 from the host's IP stack, the binary has to
#   CASE_LIMIT   seconds a case may take (60); round trips with an emulated guest take 1 to 30 ms
#   RUN_LIMIT    seconds after which no further case is begun: those left fail (900)
#   CAPDIR       where set, a capture of each case goes there
#   KEEP         1: leave the guest running (a guest that ran before always stays)
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$HERE/lib.sh"

GUEST=2
UROCE=${UROCE:-$HERE/../../target/release/uroce}
CASE_LIMIT=${CASE_LIMIT:-60}
RUN_LIMIT=${RUN_LIMIT:-900}
READY_LIMIT=20
SELFTEST=
ONLY=.
LOGS=$RUN/interop
WATCHED=$HOST_IF # the interface whose packet socket says that the binary is up
OOB_PORT=18515   # the pingpongs' TCP port

PASSED=0
FAILED=0
HOST_PID=
GUEST_PID=
STARTED_GUESTS=
MADE_NET=

in_guest() {
    GSH_TIMEOUT=${GSH_TIMEOUT:-20} "$HERE/run.sh" sh "$@"
}

# ---- the two sides of a case -----------------------------------------------------------------

alive() {
    [ -n "$1" ] && kill -0 "$1" 2>/dev/null
}

# host_start ARGUMENTS…: uroce, in the background, in the namespace.
host_start() {
    echo "\$ uroce $*" >"$LOGS/host"
    timeout -k 2 "$CASE_LIMIT" ip netns exec "$NS" "$UROCE" "$@" >>"$LOGS/host" 2>"$LOGS/host.err" </dev/null &
    HOST_PID=$!
}

# guest_start COMMAND: a program in the guest, which keeps the limit too. What it says on stderr comes last:
# mixed with the other it would break lines in two. (--foreground: one process group, so that all of it ends
# if gsh.py does.)
guest_start() {
    echo "\$ $1" >"$LOGS/guest"
    GSH_TIMEOUT=$((CASE_LIMIT + 10)) python3 "$HERE/gsh.py" "$RUN" "$GUEST" \
        "timeout --foreground -k 2 $CASE_LIMIT stdbuf -oL $1 2>/tmp/case.err &
        echo \$! >/tmp/case.pid
        wait \$!
        status=\$?
        cat /tmp/case.err
        exit \$status" >>"$LOGS/guest" 2>"$LOGS/guest.err" </dev/null &
    GUEST_PID=$!
}

# `timeout` passes the signal on to the program, here and there; so gsh.py still brings what it printed.
stop_both() {
    ! alive "$HOST_PID" || kill -TERM "$HOST_PID" || true
    alive "$GUEST_PID" || return 0
    # shellcheck disable=SC2016 # expanded in the guest
    GSH_TIMEOUT=5 in_guest "$GUEST" 'kill "$(cat /tmp/case.pid)"' >/dev/null 2>&1 || true
    poll 3 ended "$GUEST_PID" || kill -TERM "$GUEST_PID" || true
}

# poll SECONDS COMMAND…: until it succeeds.
poll() {
    local end=$((${EPOCHREALTIME/./} + $1 * 1000000))
    shift
    until "$@"; do
        [ "${EPOCHREALTIME/./}" -lt "$end" ] || return 1
        sleep 0.05
    done
}

ended() {
    ! alive "$1"
}

either_ended() {
    ended "$HOST_PID" || ended "$GUEST_PID"
}

# finish: waits for both sides; when one has ended the other has little time left, less after a failure.
# Leaves their exit statuses in HOST_STATUS and GUEST_STATUS.
finish() {
    local first other grace=10
    poll "$((CASE_LIMIT + 15))" either_ended || true
    if ended "$HOST_PID"; then first=$HOST_PID other=$GUEST_PID; else first=$GUEST_PID other=$HOST_PID; fi
    if ! alive "$first"; then wait "$first" || grace=2; fi
    poll "$grace" ended "$other" || stop_both
    HOST_STATUS=0
    GUEST_STATUS=0
    wait "$HOST_PID" || HOST_STATUS=$?
    wait "$GUEST_PID" || GUEST_STATUS=$?
    HOST_PID=
    GUEST_PID=
}

# ---- is the server listening? ------------------------------------------------------------------

guest_cm_listens() {
    in_guest "$1" "rdma resource show cm_id" 2>/dev/null | grep -q "state LISTEN.*:$2 "
}

guest_tcp_listens() {
    in_guest "$1" "ss -ltnH sport = :$OOB_PORT" 2>/dev/null | grep -q .
}

host_tcp_listens() {
    ns_exec ss -ltnH "sport = :$OOB_PORT" | grep -q .
}

# A connection manager in user space leaves no trace in the kernel but its packet socket.
host_packet_socket() {
    local index
    index=$(ns_exec cat "/sys/class/net/$WATCHED/ifindex")
    ns_exec cat /proc/net/packet | awk -v i="$index" 'NR > 1 && $5 == i { found = 1 } END { exit !found }'
}

# host_listens KIND PORT
host_listens() {
    case $SELFTEST$1 in
    1ping) guest_cm_listens 1 "$2" ;;
    1*) guest_tcp_listens 1 ;;
    ping) host_packet_socket ;;
    *) host_tcp_listens ;;
    esac
}

guest_listens() {
    case $1 in
    ping) guest_cm_listens "$GUEST" "$2" ;;
    *) guest_tcp_listens "$GUEST" ;;
    esac
}

# wait_listening SIDE PID KIND PORT: returns early if the server has ended; the case fails by itself then.
wait_listening() {
    # shellcheck disable=SC2329 # called by poll
    listening_or_dead() { ended "$2" || "$1_listens" "$3" "$4"; }
    poll "$READY_LIMIT" listening_or_dead "$@" || true
    sleep 0.3
}

# ---- what must be true at the end -----------------------------------------------------------

REASON=
fail_because() {
    REASON=$1
    return 1
}

# ping_lines COUNT SIZE: what rping puts into its buffer: a header, then ASCII from 65 to 122 in a circle
# whose start moves on by one each time, and a NUL as the last byte.
ping_lines() {
    awk -v count="$1" -v size="$2" 'BEGIN {
        for (n = 0; n < count; n++) {
            text = "rdma-ping-" n ": "
            c = 65 + n % 58
            while (length(text) < size - 1) {
                text = text sprintf("%c", c)
                c = c == 122 ? 65 : c + 1
            }
            print text
        }
    }'
}

check_statuses() {
    [ "$HOST_STATUS" = 0 ] || fail_because "uroce's exit status is $HOST_STATUS" || return 1
    [ "$GUEST_STATUS" = 0 ] || fail_because "the guest program's exit status is $GUEST_STATUS"
}

# rping's exit status is 0 after some failures: its output decides.
check_ping() {
    local side
    check_statuses || return 1
    ping_lines "$1" "$2" >"$LOGS/expected"
    for side in host guest; do
        sed -n 's/^\(server \)\?ping data: //p' "$LOGS/$side" >"$LOGS/$side.data"
        cmp -s "$LOGS/expected" "$LOGS/$side.data" ||
            fail_because "$side: not $1 times the expected ping data" || return 1
    done
}

# So is the pingpongs' after a difference found by -c.
check_pingpong() {
    check_statuses || return 1
    ! grep -qi 'invalid data' "$LOGS/host" "$LOGS/guest" || fail_because "invalid data" || return 1
    grep -q "^$1 iters in" "$LOGS/guest" || fail_because "the guest did not do $1 iterations"
}

# ---- the cases -------------------------------------------------------------------------------

CASE_NUMBER=0

# together ROLE KIND PORT "UROCE ARGUMENTS" "GUEST COMMAND": uroce in its ROLE, the guest in the other.
together() {
    if [ "$1" = server ]; then
        # shellcheck disable=SC2086 # words wanted
        host_start $4
        wait_listening host "$HOST_PID" "$2" "$3"
        guest_start "$5"
    else
        guest_start "$5"
        wait_listening guest "$GUEST_PID" "$2" "$3"
        # shellcheck disable=SC2086 # words wanted
        host_start $4
    fi
    finish
}

# An endpoint of its own beside the kernel on the same interface.
OWN_IP4=10.77.0.99
OWN_IP6=fd77::99
OWN_DEVICE="packet:$HOST_IF,mac=02:77:00:00:00:99,ip=$OWN_IP4,ip=$OWN_IP6"

host_address() { if [ "$1" = v4 ]; then echo "$HOST_IP4"; else echo "$HOST_IP6"; fi; }
own_address() { if [ "$1" = v4 ]; then echo "$OWN_IP4"; else echo "$OWN_IP6"; fi; }
guest_address() { "guest_ip${1#v}" "$GUEST"; }
host_gid() { if [ "$1" = v4 ]; then echo 0; else echo 2; fi; }
guest_gid() { if [ "$1" = v4 ]; then echo 1; else echo 2; fi; }

# case_ping ROLE FAMILY [DEVICE [FLAGS…]]
case_ping() {
    local role=$1 server port=$((7200 + CASE_NUMBER)) host=-c guest=-s common device=${3:-packet:$HOST_IF}
    if [ "$role" = server ]; then
        host=-s guest=-c
        server=$(if [ "$device" = "$OWN_DEVICE" ]; then own_address "$2"; else host_address "$2"; fi)
    else
        server=$(guest_address "$2")
    fi
    common="-a $server -p $port -C 10 -S 1000 -v -V"
    together "$role" ping "$port" "ping $host $common --device $device ${*:4}" "rping $guest $common"
    check_ping 10 1000
}

# case_pingpong ROLE FAMILY TRANSPORT SIZE [MTU [FLAGS…]]: the GID decides over the family of the RoCE packets; the TCP
# connection over which the two exchange their addresses is IPv4 in any case.
case_pingpong() {
    local role=$1 host="" guest="" common="-n 50 -s $4${5:+ -m $5} -c"
    if [ "$role" = server ]; then guest=$HOST_IP4; else host=$(guest_ip4 "$GUEST"); fi
    together "$role" pingpong "$OOB_PORT" \
        "pingpong $3 $host --device packet:$HOST_IF -g $(host_gid "$2") $common ${*:6}" \
        "ibv_$3_pingpong -d rxe0 -g $(guest_gid "$2") $common $guest"
    check_pingpong 50
}

unreachables() {
    ns_exec sh -c 'cat /proc/net/snmp /proc/net/snmp6' | awk '
        $1 == "Icmp:" && !column { for (i = 1; i <= NF; i++) if ($i == "OutDestUnreachs") column = i; next }
        $1 == "Icmp:" { n += $column }
        $1 == "Icmp6OutDestUnreachs" { n += $2 }
        END { print n + 0 }'
}

# While the binary has the device open, the host's IP stack must not answer UDP 4791.
case_icmp() {
    local before after
    host_start ping -s -a "$HOST_IP4" -p 7199 --device "packet:$HOST_IF"
    wait_listening host "$HOST_PID" ping 7199
    alive "$HOST_PID" || fail_because "uroce has ended" || return 1
    before=$(unreachables)
    guest_start "sh -c 'for a in $HOST_IP4 $HOST_IP6; do timeout 1 tftp -g -l /dev/null -r x \$a 4791; done'"
    wait "$GUEST_PID" || true # tftp gets no answer: it is only there to send datagrams
    after=$(unreachables)
    alive "$HOST_PID" || fail_because "uroce has ended" || return 1
    stop_both
    wait "$HOST_PID" || true
    [ "$before" = "$after" ] || fail_because "$((after - before)) ICMP unreachable sent by the host"
}

# NAME, function and arguments.
table() {
    local family role
    echo "icmp icmp"
    for family in v4 v6; do
        for role in client server; do
            echo "ping-$role-$family ping $role $family"
            echo "rc-1024-$role-$family pingpong $role $family rc 5000 1024"
            echo "rc-4096-$role-$family pingpong $role $family rc 10000 4096"
            echo "uc-1024-$role-$family pingpong $role $family uc 3000 1024"
            echo "ud-$role-$family pingpong $role $family ud 1000"
        done
    done
    # The guest in uroce's place has neither these devices nor rules.
    [ -z "$SELFTEST" ] || return 0
    for role in client server; do
        for family in v4 v6; do
            echo "ping-own-$role-$family ping $role $family $OWN_DEVICE"
        done
        echo "ping-pnet-$role-v4 ping $role v4 pnet:$HOST_IF"
        # What is lost both ways is repaired by both transports. ACKs of ours are lost in matrix.sh alone: they can stop
        # rxe for ever.
        echo "rc-loss-$role-v4 pingpong $role v4 rc 10000 1024 --fault drop:send-middle:every=25 --fault drop:send-last:3 --fault drop:ack:7:in --fault drop:ack:20:in"
        echo "ping-loss-$role-v4 ping $role v4 packet:$HOST_IF --fault drop:read-resp-only:2 --fault drop:rtu:1 --fault drop:write-only:3 --fault drop:ack:9:in"
    done
}

report_failure() {
    echo "FAIL $1"
    echo "    $2"
    local side
    for side in host guest; do
        [ -e "$LOGS/$side" ] || continue
        echo "    -- $side:"
        cat "$LOGS/$side" "$LOGS/$side.err" | tail -n 40 | cut -c 1-160 | sed 's/^/    /'
    done
    echo "    -- rxe's counters since the guest's start:"
    GSH_TIMEOUT=5 in_guest "$GUEST" \
        'cd /sys/class/infiniband/rxe0/ports/1/hw_counters && grep . * | grep -v ":0$" | tr "\n" " "' 2>&1 |
        sed 's/^/    /' || true
    echo
}

# run_case NAME FUNCTION ARGUMENTS…
run_case() {
    local name=$1 began=${EPOCHREALTIME/./} took
    CASE_NUMBER=$((CASE_NUMBER + 1))
    if [ "$SECONDS" -ge "$RUN_LIMIT" ]; then
        report_failure "$name" "not run: the whole run has taken more than $RUN_LIMIT s"
        FAILED=$((FAILED + 1))
        return
    fi
    rm -f "$LOGS"/*
    REASON=unknown
    [ -z "${CAPDIR:-}" ] || CAPIF=tap$GUEST "$HERE/run.sh" cap-start "$name"
    if "case_$2" "${@:3}"; then
        took=$(((${EPOCHREALTIME/./} - began) / 10000))
        printf 'ok %s %d.%02d s\n' "$name" $((took / 100)) $((took % 100))
        PASSED=$((PASSED + 1))
    else
        report_failure "$name" "$REASON"
        FAILED=$((FAILED + 1))
    fi
    [ -z "${CAPDIR:-}" ] || "$HERE/run.sh" cap-stop "$name" >/dev/null
    stop_both
    HOST_PID=
    GUEST_PID=
}

# ---- the run ---------------------------------------------------------------------------------

boot() {
    local n=$1 said
    said=$("$HERE/run.sh" start "$n" "$KERNEL" 7>&-) || exit 2
    case $said in
    *"runs already"*) ;;
    *) STARTED_GUESTS="$STARTED_GUESTS $n" ;;
    esac
    echo "# $said" | tr '\n' ' '
    echo
}

clean_up() {
    local n
    set +e
    stop_both
    [ "${KEEP:-0}" != 1 ] || return
    for n in $STARTED_GUESTS; do "$HERE/run.sh" stop "$n"; done
    [ -z "$MADE_NET" ] || "$HERE/run.sh" net-down
}

refuse() {
    echo "interop.sh: $*" >&2
    exit 2
}

begin() {
    [ "$(id -u)" = 0 ] || refuse "must run as root"
    mkdir -p "$LOGS"
    exec 7>"$RUN/interop.lock"
    flock -n 7 || refuse "another run is under way"
    KERNEL=${KERNEL:-$(default_kernel)} || refuse "no guest is built: run build.sh first"
    if [ -n "$SELFTEST" ]; then
        UROCE=$HERE/standin.sh
        HOST_IP4=$(guest_ip4 1)
        HOST_IP6=$(guest_ip6 1)
        NO_NFT=${NO_NFT:-0}
    fi
    UROCE=$(command -v -- "$UROCE") || refuse "no uroce binary: set UROCE"
    export NO_NFT=${NO_NFT:-1}
    ip netns list | grep -qw "$NS" || MADE_NET=1
    trap clean_up EXIT
    trap 'exit 130' INT TERM
    boot "$GUEST"
    [ -z "$SELFTEST" ] || boot 1
}

main() {
    local name rest
    case ${1:-} in
    -h | --help)
        usage "$0"
        return
        ;;
    --list)
        table | cut -d ' ' -f 1
        return
        ;;
    --selftest)
        SELFTEST=1
        ONLY=${2:-.}
        ;;
    -*)
        usage "$0" >&2
        exit 2
        ;;
    *) ONLY=${1:-.} ;;
    esac
    begin
    while read -r name rest <&3; do
        [[ $name =~ $ONLY ]] || continue
        # shellcheck disable=SC2086 # words wanted
        run_case "$name" $rest
    done 3< <(table)
    echo "$PASSED passed, $FAILED failed"
    [ "$FAILED" = 0 ] && [ "$PASSED" -gt 0 ]
}

main "$@"
