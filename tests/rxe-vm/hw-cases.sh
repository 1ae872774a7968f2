#!/bin/bash
# uroce on the guest's rxe0, through libibverbs and librdmacm (--device hw:rxe0), against uroce on raw Ethernet on h0.
#
#   hw-cases.sh [REGEX]     runs the cases whose names match (all); ROLE in a name is that of the hardware side
#   hw-cases.sh --list      their names
#
# Prints `ok NAME SECONDS s` or `FAIL NAME` with what both sides said, and at the end `N passed, N failed`.
# Exit status: 0 all passed, 1 a case failed, 2 the run could not begin. build.sh must have run before.
#
# Environment:
#   UROCE        the binary (target/release/uroce of this repository); it must run in the guest too
#   VERBS        the program of the case `verbs` (target/release/verbs_on_hw): every verb, rxe with itself
#   KERNEL       of the guest (6.12, or 6.1 where only that is built)
#   GUEST        its number (4)
#   CASE_LIMIT   seconds a case may take (60)
#   KEEP         1: leave the guest running (a guest that ran before always stays)
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$HERE/lib.sh"
GUEST=${GUEST:-4}
UROCE=${UROCE:-$HERE/../../target/release/uroce}
VERBS=${VERBS:-$HERE/../../target/release/verbs_on_hw}
CASE_LIMIT=${CASE_LIMIT:-60}
LOGS=$RUN/hw-cases
PASSED=0
FAILED=0
STARTED=
MADE_NET=

# The cases: name, role of the hardware side, family, kind of readiness, arguments of both sides.
table() {
    local role family kind what
    echo "verbs"
    for role in server client; do
        for family in v4 v6; do
            echo "ping-$role-$family $role $family ping"
            echo "rc-$role-$family $role $family tcp pingpong rc -n 50 -s 10000 -m 4096 -c"
        done
        echo "rc-events-$role $role v4 tcp pingpong rc -n 20 -s 5000 -m 1024 -c -e"
        echo "uc-$role $role v4 tcp pingpong uc -n 50 -s 3000 -m 1024 -c"
        echo "ud-$role $role v4 tcp pingpong ud -n 50 -s 1000 -c"
        echo "srq-$role $role v4 tcp pingpong srq -n 50 -s 3000 -m 1024 -c -q 4"
        for what in send write read atomic; do
            for kind in bw lat; do
                case $what-$kind in
                atomic-*) echo "perf-$what-$kind-$role $role v4 cm perf $what $kind -n 20" ;;
                *-bw) echo "perf-$what-$kind-$role $role v4 cm perf $what $kind -s 20000 -n 20 -q 2" ;;
                *) echo "perf-$what-$kind-$role $role v4 cm perf $what $kind -s 200 -n 20" ;;
                esac
            done
        done
        echo "perf-inline-$role $role v4 cm perf write bw -s 64 -I 64 -n 50 -Q 10"
        echo "perf-swap-$role $role v4 cm perf atomic bw -A CMP_AND_SWAP -n 20"
    done
}

in_guest() {
    GSH_TIMEOUT=${GSH_TIMEOUT:-20} "$HERE/run.sh" sh "$GUEST" "$@"
}

# until_ready COMMAND…: at most 20 s; a server that has ended shows by itself.
until_ready() {
    local i
    for ((i = 0; i < 100; i++)); do
        "$@" && return 0
        sleep 0.2
    done
    echo "the server did not begin" >>"$LOGS/host"
}

guest_ready() {
    case $1 in
    tcp) in_guest "ss -ltnH 'sport = :18515' | grep -q ." ;;
    *) in_guest "rdma resource show cm_id | grep -q 'state LISTEN'" ;;
    esac 2>/dev/null
}

host_ready() {
    case $1 in
    tcp) ns_exec ss -ltnH 'sport = :18515' | grep -q . ;;
    *) ns_exec ss -l0nH | grep -q "$HOST_IF" ;;
    esac
}

# side ROLE ADDRESS DEVICE COMMAND ARGUMENTS…: the command line of one side.
side() {
    local role=$1 peer=$2 own=$3 device=$4 family=$5
    shift 5
    case $1 in
    ping)
        if [ "$role" = server ]; then echo "ping -s -a $own -v --device $device"; else
            echo "ping -c -a $peer -C 10 -S 1000 -v -V --device $device"; fi
        ;;
    pingpong)
        # The programs find each other over TCP and IPv4; the GID decides over the family of the RoCE packets.
        [ "$role" = server ] && peer=
        echo "pingpong $2 ${peer:+$(if [ "$device" = hw:rxe0 ]; then echo "$HOST_IP4"; else guest_ip4 "$GUEST"; fi)}" \
            "-d $device ${*:3} $(if [ "$family" = v6 ]; then echo "-g 2"; fi)"
        ;;
    perf)
        [ "$role" = server ] && peer=
        echo "perf $2 $3 $peer -d $device ${*:4}"
        ;;
    esac
}

start_guest() {
    echo "\$ uroce $1" >"$LOGS/guest"
    GSH_TIMEOUT=$((CASE_LIMIT + 10)) in_guest "timeout -k 2 $CASE_LIMIT /host/uroce-hw $1 2>&1" >>"$LOGS/guest" \
        2>"$LOGS/guest.err" </dev/null &
    GUEST_PID=$!
}

start_host() {
    echo "\$ uroce $1" >"$LOGS/host"
    # shellcheck disable=SC2086 # words wanted
    timeout -k 2 "$CASE_LIMIT" ip netns exec "$NS" "$UROCE" $1 >>"$LOGS/host" 2>&1 </dev/null &
    HOST_PID=$!
}

# run_case NAME ROLE FAMILY READINESS WORDS…
run_case() {
    local name=$1 role=$2 family=$3 ready=$4 other=server began=${EPOCHREALTIME/./} took
    local host_address=$HOST_IP4 guest_address status=0
    shift 4
    [ "$ready" != ping ] || set -- ping
    guest_address=$(guest_ip4 "$GUEST")
    if [ "$family" = v6 ]; then host_address=$HOST_IP6 guest_address=$(guest_ip6 "$GUEST"); fi
    [ "$role" = client ] || other=client
    local here there
    there=$(side "$role" "$host_address" "$guest_address" hw:rxe0 "$family" "$@")
    here=$(side "$other" "$guest_address" "$host_address" "packet:$HOST_IF" "$family" "$@")
    if [ "$role" = server ]; then
        start_guest "$there"
        until_ready guest_ready "$ready"
        start_host "$here"
    else
        start_host "$here"
        until_ready host_ready "$ready"
        start_guest "$there"
    fi
    wait "$HOST_PID" || status=$?
    wait "$GUEST_PID" || status=$?
    if [ "$status" = 0 ] && { [ "$ready" != ping ] || same_pings; }; then
        took=$(((${EPOCHREALTIME/./} - began) / 10000))
        printf 'ok %s %d.%02d s\n' "$name" $((took / 100)) $((took % 100))
        PASSED=$((PASSED + 1))
        return
    fi
    echo "FAIL $name"
    cat "$LOGS/guest" "$LOGS/guest.err" "$LOGS/host" | tail -n 60 | cut -c 1-160 | sed 's/^/    /'
    FAILED=$((FAILED + 1))
}

# Every verb, on rxe0 alone.
run_verbs() {
    local began=${EPOCHREALTIME/./} took
    if GSH_TIMEOUT=$((CASE_LIMIT + 10)) in_guest "timeout -k 2 $CASE_LIMIT /host/verbs_on_hw rxe0 2>&1" >"$LOGS/guest"; then
        took=$(((${EPOCHREALTIME/./} - began) / 10000))
        printf 'ok verbs %d.%02d s\n' $((took / 100)) $((took % 100))
        PASSED=$((PASSED + 1))
        return
    fi
    echo "FAIL verbs"
    sed 's/^/    /' "$LOGS/guest"
    FAILED=$((FAILED + 1))
}

# Both sides have seen the same ten texts.
same_pings() {
    local side
    for side in host guest; do
        sed -n 's/^\(server \)\?ping data: //p' "$LOGS/$side" >"$LOGS/$side.data"
    done
    [ "$(wc -l <"$LOGS/host.data")" = 10 ] && cmp -s "$LOGS/host.data" "$LOGS/guest.data"
}

clean_up() {
    set +e
    if [ "${KEEP:-0}" = 1 ] || [ -z "$STARTED" ]; then return; fi
    "$HERE/run.sh" stop "$GUEST"
    [ -z "$MADE_NET" ] || "$HERE/run.sh" net-down
}

main() {
    local said line only=${1:-.}
    case $only in
    -h | --help)
        usage "$0"
        return
        ;;
    --list)
        table | cut -d ' ' -f 1
        return
        ;;
    esac
    [ "$(id -u)" = 0 ] || die "must run as root"
    UROCE=$(command -v -- "$UROCE") || { echo "hw-cases.sh: no uroce binary: set UROCE" >&2 && exit 2; }
    KERNEL=${KERNEL:-$(default_kernel)} || { echo "hw-cases.sh: no guest is built: run build.sh first" >&2 && exit 2; }
    export NO_NFT=${NO_NFT:-1}
    mkdir -p "$LOGS" "$SHARE"
    install -m 755 "$UROCE" "$SHARE/uroce-hw"
    [[ ! verbs =~ $only ]] || install -m 755 "$VERBS" "$SHARE/verbs_on_hw" || exit 2
    ip netns list | grep -qw "$NS" || MADE_NET=1
    trap clean_up EXIT
    trap 'exit 130' INT TERM
    said=$("$HERE/run.sh" start "$GUEST" "$KERNEL") || exit 2
    [[ $said == *"runs already"* ]] || STARTED=1
    echo "# $said" | tr '\n' ' '
    echo
    while read -r -a line <&3; do
        [[ ${line[0]} =~ $only ]] || continue
        if [ "${line[0]}" = verbs ]; then run_verbs; else run_case "${line[@]}"; fi
    done 3< <(table)
    echo "$PASSED passed, $FAILED failed"
    [ "$FAILED" = 0 ] && [ "$PASSED" -gt 0 ]
}

main "$@"
