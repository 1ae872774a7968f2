#!/bin/bash
# Guests with soft-RoCE on a bridge, in a network namespace of their own.
#
#   run.sh net-up | net-down          the namespace (net-up comes with the first start)
#   run.sh start N [6.12|6.1] [ARG…]  boots guest N (1 to 9), waits until it is ready; ARGs go to its kernel
#   run.sh stop N | stop-all | status
#   run.sh sh N 'COMMANDS'            runs them in guest N: their output, their exit status
#   run.sh bg N NAME 'COMMANDS'       starts them in guest N; output in its /tmp/NAME.log, pid in /tmp/NAME.pid
#   run.sh ns COMMAND…                a command on this machine, inside the namespace
#   run.sh cap-start NAME [FILTER]    tcpdump on $CAPIF into $CAPDIR/NAME.pcap
#   run.sh cap-stop NAME
#
# Environment:
#   RXE_VM_CACHE  what build.sh made          NS      the namespace (rxelab)
#   MTU   of all links (4500)                 NO_NFT  1: leave out the rule that hides UDP 4791 from the host's IP stack
#   MEM   MiB a guest (640), SMP CPUs (2)     ACCEL   tcg; kvm where the machine has a real one
#   CAPDIR, CAPIF (tap1)                      GSH_TIMEOUT  seconds a command in a guest may take (120)
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$HERE/lib.sh"
SMP=${SMP:-2}
MEM=${MEM:-640}
ACCEL=${ACCEL:-tcg}
CAPDIR=${CAPDIR:-$CACHE/captures}
CAPIF=${CAPIF:-tap1}
BOOT_LIMIT=${BOOT_LIMIT:-120}

link_exists() {
    ip -n "$NS" link show "$1" >/dev/null 2>&1
}

# The host's IP stack has no socket on UDP 4791 and would answer rxe with ICMP port unreachable.
# AF_PACKET and XDP see a frame before this rule drops it.
hide_roce_port() {
    ns_exec nft -f - <<'E' || warn "nft failed: the host will answer UDP 4791 with ICMP port unreachable"
table inet rxelab
delete table inet rxelab
table inet rxelab {
    chain input {
        type filter hook input priority 0
        udp dport 4791 drop
    }
}
E
}

show_roce_port() {
    ns_exec nft 'table inet rxelab; delete table inet rxelab' 2>/dev/null || true
}

make_bridge() {
    ip -n "$NS" link add br0 type bridge mcast_snooping 0 stp_state 0 forward_delay 0
    ns_sysctl ipv6/conf/br0/disable_ipv6 1
    # Else br0 answers ARP for h0's address too, with its own MAC, and the guests' frames miss h0.
    ns_sysctl ipv4/conf/all/arp_ignore 1
}

# h0 is where the endpoint under test sits; its peer is a port of the bridge.
make_host_side() {
    ip -n "$NS" link add "$HOST_IF" address "$HOST_MAC" mtu "$MTU" type veth peer name h0b mtu "$MTU"
    ns_sysctl ipv6/conf/h0b/disable_ipv6 1
    ns_sysctl "ipv6/conf/$HOST_IF/accept_dad" 0
    ip -n "$NS" link set h0b master br0 up
    ip -n "$NS" link set "$HOST_IF" up
    ip -n "$NS" addr add "$HOST_IP4/24" dev "$HOST_IF"
    ip -n "$NS" addr add "$HOST_IP6/64" dev "$HOST_IF" nodad
    ip -n "$NS" link set br0 mtu "$MTU" up
    # What AF_PACKET sees shall be what a wire would carry.
    local i
    for i in "$HOST_IF" h0b; do
        ns_exec ethtool -K "$i" tx off rx off tso off gso off gro off >/dev/null 2>&1 ||
            warn "offloads of $i stay on"
    done
}

net_up() {
    need_root
    exec 9>"$RUN/net.lock" # two `start` at once
    flock 9
    ip netns list | grep -qw "$NS" || ip netns add "$NS"
    ip -n "$NS" link set lo up
    link_exists br0 || make_bridge
    link_exists "$HOST_IF" || make_host_side
    if [ "${NO_NFT:-0}" = 1 ]; then show_roce_port; else hide_roce_port; fi
    exec 9>&-
}

net_down() {
    need_root
    if ip netns list | grep -qw "$NS"; then ip netns del "$NS"; fi
}

# guest_pid N: its QEMU's pid, if it runs. A pid file alone proves nothing: pids are reused.
guest_pid() {
    local pid
    pid=$(cat "$RUN/g$1.pid" 2>/dev/null) || return 1
    tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q -- "-name rxe$1 " || return 1
    echo "$pid"
}

guest_number() {
    case ${1:-} in
    [1-9]) echo "$1" ;;
    *) die "guests are numbered 1 to 9" ;;
    esac
}

qemu() {
    local n=$1 kernel=$2 p off
    shift 2
    local args=(
        -name "rxe$n" -M pc -m "$MEM" -smp "$SMP"
        -nodefaults -no-user-config -display none -no-reboot
        -daemonize -pidfile "$RUN/g$n.pid" -serial "file:$RUN/g$n.console"
        -kernel "$CACHE/vmlinux-$kernel" -initrd "$CACHE/initrd-$kernel.cpio"
        -append "console=ttyS0 quiet panic=1 mitigations=off nokaslr tsc=reliable no_timer_check cryptomgr.notests random.trust_cpu=on lab.node=$n lab.mtu=$MTU $*"
        -device virtio-rng-pci -device virtio-serial-pci
        -virtfs "local,path=$SHARE,mount_tag=host,security_model=none,multidevs=remap"
    )
    if [ "$ACCEL" = tcg ]; then
        # shellcheck disable=SC2054 # QEMU's commas
        args+=(-accel tcg,thread=multi,tb-size=256 -cpu "${CPU:-max}")
    else
        args+=(-accel "$ACCEL" -cpu host)
    fi
    for p in 1 2 3 4; do
        args+=(-chardev "socket,id=c$p,path=$RUN/g$n.p$p,server=on,wait=off"
            -device "virtserialport,chardev=c$p,nr=$p,name=lab.$p")
    done
    # Offloads off: each frame arrives as it was sent, with its checksums.
    off=csum=off,guest_csum=off,gso=off,guest_tso4=off,guest_tso6=off,guest_ufo=off,host_tso4=off,host_tso6=off,host_ufo=off
    args+=(-netdev "tap,id=n0,ifname=tap$n,script=no,downscript=no"
        -device "virtio-net-pci,netdev=n0,mac=02:77:00:00:00:0$n,host_mtu=$MTU,romfile=,$off")
    (cd "$CACHE" && ns_exec qemu-system-x86_64 "${args[@]}") </dev/null >"$RUN/g$n.qemu" 2>&1
}

wait_ready() {
    local n=$1 end=$((SECONDS + BOOT_LIMIT))
    until grep -q LAB-READY "$RUN/g$n.console" 2>/dev/null; do
        if ! guest_pid "$n" >/dev/null || [ "$SECONDS" -ge "$end" ]; then
            tail -n 20 "$RUN/g$n.console" "$RUN/g$n.qemu" >&2
            return 1
        fi
        sleep 0.1
    done
    grep LAB-READY "$RUN/g$n.console" | tr -d '\r'
}

start() {
    local n kernel began
    n=$(guest_number "${1:-}")
    kernel=${2:-}
    shift
    [ $# -eq 0 ] || shift
    need_root
    [ -n "$kernel" ] || kernel=$(default_kernel) || die "no guest is built: run build.sh first"
    built "$kernel" || die "the $kernel guest is not built: run build.sh $kernel first"
    net_up
    if guest_pid "$n" >/dev/null; then
        echo "guest $n runs already"
        return
    fi
    link_exists "tap$n" || ip -n "$NS" tuntap add dev "tap$n" mode tap
    ns_sysctl "ipv6/conf/tap$n/disable_ipv6" 1
    ip -n "$NS" link set "tap$n" mtu "$MTU"
    ip -n "$NS" link set "tap$n" master br0 up
    rm -f "$RUN/g$n.console" "$RUN/g$n".p?
    began=$(date +%s%N)
    qemu "$n" "$kernel" "$@" || die "QEMU does not start: $(cat "$RUN/g$n.qemu")"
    wait_ready "$n" || {
        stop "$n"
        die "guest $n did not come up within $BOOT_LIMIT s"
    }
    echo "started in $((($(date +%s%N) - began) / 1000000)) ms"
}

# end_process PID SIGNAL TENTHS: asks, waits, insists.
end_process() {
    local i
    kill "-$2" "$1" 2>/dev/null || return 0
    for ((i = 0; i < $3; i++)); do
        kill -0 "$1" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL "$1" 2>/dev/null || true
}

stop() {
    local n pid
    n=$(guest_number "${1:-}")
    if pid=$(guest_pid "$n"); then end_process "$pid" TERM 50; fi
    rm -f "$RUN/g$n.pid" "$RUN/g$n".p?
    ip -n "$NS" link del "tap$n" 2>/dev/null || true
}

each_guest() {
    local f n
    for f in "$RUN"/g[1-9].pid; do
        [ -e "$f" ] || continue
        n=${f##*/g}
        "$1" "${n%.pid}"
    done
}

status() {
    local pid
    pid=$(guest_pid "$1") || return 0
    echo "guest $1: pid $pid, $(awk '/^VmRSS/ { print int($2 / 1024) " MiB" }' "/proc/$pid/status")"
}

cap_start() {
    local name=${1:?NAME} filter=${2:-udp port 4791 or arp or icmp6} i
    mkdir -p "$CAPDIR"
    rm -f "$CAPDIR/$name.pcap" "$RUN/cap-$name.log"
    # Without --immediate-mode the last packets, or all, are missing.
    setsid ip netns exec "$NS" tcpdump -i "$CAPIF" -p -U --immediate-mode -s 0 -B 16384 \
        -w "$CAPDIR/$name.pcap" "$filter" </dev/null >"$RUN/cap-$name.log" 2>&1 &
    echo $! >"$RUN/cap-$name.pid"
    for ((i = 0; i < 60; i++)); do
        grep -qs 'listening on' "$RUN/cap-$name.log" && return 0
        sleep 0.05
    done
    die "tcpdump does not start: $(cat "$RUN/cap-$name.log")"
}

cap_stop() {
    local name=${1:?NAME} pid
    pid=$(cat "$RUN/cap-$name.pid")
    sleep 0.5
    if tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q "/$name.pcap"; then end_process "$pid" INT 30; fi
    rm -f "$RUN/cap-$name.pid"
    grep -E 'captured|dropped by kernel' "$RUN/cap-$name.log" | paste -sd ' ' || true
}

mkdir -p "$RUN" "$SHARE"
command=${1:-help}
[ $# -eq 0 ] || shift
case $command in
net-up) net_up ;;
net-down) net_down ;;
start) start "$@" ;;
stop) stop "$@" ;;
stop-all) each_guest stop ;;
status) each_guest status ;;
sh) exec python3 "$HERE/gsh.py" "$RUN" "$(guest_number "${1:-}")" "${@:2}" ;;
bg)
    n=$(guest_number "${1:-}")
    name=${2:?NAME}
    exec python3 "$HERE/gsh.py" "$RUN" "$n" "( ${*:3} ) >/tmp/$name.log 2>&1 </dev/null & echo \$! >/tmp/$name.pid"
    ;;
ns) ns_exec "$@" ;;
cap-start) cap_start "$@" ;;
cap-stop) cap_stop "$@" ;;
-h | --help) usage "$0" ;;
*)
    usage "$0" >&2
    exit 2
    ;;
esac
