# shellcheck shell=bash
# Sourced by the scripts of this folder: where things lie, the addresses of the test network, and a few helpers.

# shellcheck disable=SC2034 # used by the scripts that source this file
{
    CACHE=${RXE_VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rxe-vm}
    RUN=$CACHE/run     # pid files, control sockets, consoles, logs
    SHARE=$CACHE/share # /host in the guests
    NS=${NS:-rxelab}
    MTU=${MTU:-4500}
    HOST_IF=h0
    HOST_MAC=02:77:00:00:00:64
    HOST_IP4=10.77.0.100
    HOST_IP6=fd77::100
    KERNELS="6.12 6.1" # in the order in which they are preferred
}

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}

warn() {
    echo "${0##*/}: warning: $*" >&2
}

# usage FILE: prints the comment block at the head of FILE.
usage() {
    awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$1"
}

need_root() {
    [ "$(id -u)" = 0 ] || die "must run as root"
}

ns_exec() {
    ip netns exec "$NS" "$@"
}

# ns_sysctl KEY VALUE: /proc/sys/net/KEY inside the namespace (procps may be missing).
ns_sysctl() {
    # shellcheck disable=SC2016 # expanded by the inner shell
    ns_exec sh -c 'echo "$2" > "/proc/sys/net/$1"' sh "$1" "$2"
}

guest_ip4() { echo "10.77.0.$1"; }
guest_ip6() { echo "fd77::$1"; }

built() {
    [ -s "$CACHE/vmlinux-$1" ] && [ -s "$CACHE/initrd-$1.cpio" ]
}

# default_kernel: the preferred one of those that build.sh has built.
default_kernel() {
    local k
    for k in $KERNELS; do
        if built "$k"; then
            echo "$k"
            return 0
        fi
    done
    return 1
}
