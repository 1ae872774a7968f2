#!/bin/bash
# Builds the guest: Debian's kernel and an initramfs with rdma_rxe and the RDMA programs.
#
#   build.sh          both kernels: 6.12 (bookworm-backports) and 6.1 (bookworm)
#   build.sh 6.12     only that one; if the mirror has no backports, 6.1 instead
#   build.sh 6.1      only that one
#   build.sh status   what is built, and from which kernel versions
#
# For Debian 12 as root. Installs what it needs with apt-get and takes every package from the mirror
# that the machine's own apt sources name. Everything it makes lies in $RXE_VM_CACHE (by default
# rxe-vm in the user's cache folder). It may be run again at any time and does only what is missing
# or out of date; removing the cache folder gives a fresh start (and the mirror's newest kernel).
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$HERE/lib.sh"
export DEBIAN_FRONTEND=noninteractive

LOG=$CACHE/build.log
LIBDIR=/usr/lib/x86_64-linux-gnu

# What runs on this machine, what is compiled against, and what is copied into the guest.
PACKAGES="qemu-system-x86 seabios python3 iproute2 nftables ethtool tcpdump util-linux
    debian-archive-keyring kmod cpio xz-utils zstd gcc libc6-dev libibverbs-dev librdmacm-dev
    busybox-static ibverbs-utils rdmacm-utils ibverbs-providers perftest iputils-ping"

PROGRAMS="ibv_devinfo ibv_devices ibv_rc_pingpong ibv_uc_pingpong ibv_ud_pingpong ibv_srq_pingpong
    rping ucmatose udaddy rdma_server rdma_client rdma_xserver rdma_xclient cmtime mckey udpong
    rstream riostream rcopy
    ib_send_bw ib_send_lat ib_write_bw ib_write_lat ib_read_bw ib_read_lat ib_atomic_bw ib_atomic_lat
    ip rdma tc ss tcpdump ethtool ping nft timeout stdbuf"

# Loaded by the guest's init, in dependency order. rxe takes its CRC from the kernel's crypto
# interface, so crc32_* come before rdma_rxe.
BOOT_MODULES="virtio_pci virtio_console virtio_net 9pnet_virtio 9p af_packet
    crc32_generic crc32_pclmul crc32c_intel rdma_rxe ib_umad rdma_ucm configfs"
# There for `modprobe` in the guest.
MORE_MODULES="bridge veth dummy sch_netem sch_ingress act_mirred cls_u32 cls_matchall
    nf_tables nft_numgen nft_limit nft_log nft_objref nft_compat x_tables xt_statistic vxlan 8021q"

# apt_get CMD...: apt-get, with what it says in the log; tried twice, since mirrors have bad moments.
apt_get() {
    apt-get -o Acquire::Retries=2 "$@" >>"$LOG" 2>&1 && return 0
    sleep 3
    apt-get -o Acquire::Retries=2 "$@" >>"$LOG" 2>&1
}

fail_with_log() {
    tail -n 20 "$LOG" >&2
    die "$1 (whole log: $LOG)"
}

missing_packages() {
    local p
    for p in $PACKAGES; do
        case $(dpkg-query -W -f '${db:Status-Abbrev}' "$p" 2>/dev/null || true) in
        ii*) ;;
        *) echo "$p" ;;
        esac
    done
}

UPDATED=
update_lists() {
    [ -z "$UPDATED" ] || return 0
    apt_get update || fail_with_log "apt-get update failed"
    UPDATED=1
}

install_packages() {
    local missing
    mapfile -t missing < <(missing_packages)
    [ "${#missing[@]}" -gt 0 ] || return 0
    echo "installing ${#missing[@]} packages"
    update_lists
    apt_get install -y --no-install-recommends "${missing[@]}" || fail_with_log "apt-get install failed"
}

# debian_mirror: the base address of the mirror that this machine's bookworm packages come from.
debian_mirror() {
    # shellcheck disable=SC2016 # apt's own placeholders
    apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
        awk '$2 == "Debian" && $3 == "bookworm" && $4 == "main" { print $1; exit }'
}

# Backports get apt state of their own, so that the machine's sources stay as they are.
BACKPORTS=$CACHE/backports
backports_options() {
    echo "-o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=$BACKPORTS" \
        "-o Dir::State::lists=$BACKPORTS/lists -o Dir::Cache=$BACKPORTS/cache"
}

prepare_backports() {
    local mirror
    mirror=$(debian_mirror)
    if [ -z "$mirror" ]; then
        update_lists
        mirror=$(debian_mirror)
    fi
    [ -n "$mirror" ] || {
        warn "no Debian 12 mirror in this machine's apt sources"
        return 1
    }
    mkdir -p "$BACKPORTS/lists/partial" "$BACKPORTS/cache/archives/partial"
    cat >"$BACKPORTS/backports.sources" <<E
Types: deb
URIs: $mirror
Suites: bookworm-backports
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
E
    # shellcheck disable=SC2046 # words wanted
    apt_get $(backports_options) -o APT::Update::Error-Mode=any update
}

# kernel_package OPTIONS...: the package that linux-image-amd64 stands for.
kernel_package() {
    apt-cache "$@" depends linux-image-amd64 2>/dev/null |
        awk '/Depends: linux-image-[0-9]/ { print $2; exit }'
}

# fetch_kernel SHORT: leaves the path of the kernel's .deb in $CACHE/kernel-SHORT.deb.
fetch_kernel() {
    local short=$1 deb=$CACHE/kernel-$1.deb options="" package got
    [ ! -s "$deb" ] || return 0
    if [ "$short" = 6.12 ]; then
        prepare_backports || return 1
        options=$(backports_options)
    fi
    # shellcheck disable=SC2086 # words wanted
    package=$(kernel_package $options)
    if [ -z "$package" ] && [ "$short" != 6.12 ]; then
        update_lists
        package=$(kernel_package)
    fi
    case $package in
    "linux-image-$short."*) ;;
    *)
        warn "the mirror offers '$package' where a $short kernel was expected"
        return 1
        ;;
    esac
    echo "downloading $package"
    rm -rf "$CACHE/download"
    mkdir -p "$CACHE/download"
    # shellcheck disable=SC2086 # words wanted
    (cd "$CACHE/download" && apt_get $options download "$package") || return 1
    got=("$CACHE"/download/*.deb)
    mv "${got[0]}" "$deb"
    rm -rf "$CACHE/download"
}

# The uncompressed kernel has a PVH entry: QEMU starts it directly, and the guest is spared its own
# decompression, which is slow under emulation.
extract_vmlinux() {
    python3 - "$1" "$2" <<'PY'
import subprocess, sys

image = open(sys.argv[1], "rb").read()
formats = [
    (b"\xfd7zXZ\x00", ["xz", "-dc"]),
    (b"\x28\xb5\x2f\xfd", ["zstd", "-dcq"]),
    (b"\x1f\x8b\x08", ["gzip", "-dc"]),
]
for magic, command in formats:
    at = image.find(magic)
    while at >= 0:
        out = subprocess.run(command, input=image[at:], capture_output=True).stdout
        if out[:4] == b"\x7fELF":
            open(sys.argv[2], "wb").write(out)
            sys.exit()
        at = image.find(magic, at + 1)
sys.exit("no kernel found in " + sys.argv[1])
PY
}

# Test programs of our own, dynamically linked: the guest gets this machine's libraries.
compile_programs() {
    local source out
    mkdir -p "$CACHE/bin"
    for source in "$HERE"/src/*.c; do
        out=$CACHE/bin/$(basename "${source%.c}")
        [ "$out" -nt "$source" ] || gcc -O2 -g -Wall -Wextra -o "$out" "$source" -lrdmacm -libverbs
    done
    out=$CACHE/agent
    [ "$out" -nt "$HERE/guest/agent.c" ] || gcc -O2 -Wall -Wextra -static -o "$out" "$HERE/guest/agent.c"
}

find_program() {
    local d
    for d in /usr/bin /usr/sbin /bin /sbin; do
        if [ -x "$d/$1" ]; then
            echo "$d/$1"
            return 0
        fi
    done
    return 1
}

# copy_libraries TREE ELF...: everything the programs are linked with, at the same paths.
copy_libraries() {
    local tree=$1 lib
    shift
    for lib in $({ ldd "$@" 2>/dev/null || true; } | awk '$3 ~ /^\// { print $3 } $1 ~ /^\/.*[^:]$/ { print $1 }' | sort -u); do
        mkdir -p "$tree$(dirname "$lib")"
        cp -L "$lib" "$tree$lib"
    done
}

# make_userland TREE: everything in the initramfs but the kernel's modules.
make_userland() {
    local tree=$1 name path elfs=()
    rm -rf "$tree"
    mkdir -p "$tree"/{bin,sbin,usr/{bin,sbin,lib/tc},lib,lib64,etc/libibverbs.d,proc,sys,dev,run,tmp,root,host,var/run}
    for name in $PROGRAMS; do
        path=$(find_program "$name") || {
            warn "no $name on this machine"
            continue
        }
        cp -L "$path" "$tree/usr/bin/"
        elfs+=("$path")
    done
    for path in "$CACHE"/bin/*; do
        cp "$path" "$tree/usr/bin/"
        elfs+=("$path")
    done
    # Only rxe's provider: each further one makes opening a device slower.
    mkdir -p "$tree$LIBDIR/libibverbs"
    for path in "$LIBDIR"/libibverbs/librxe-rdmav*.so; do
        cp -L "$path" "$tree$LIBDIR/libibverbs/"
        elfs+=("$path")
    done
    cp /etc/libibverbs.d/rxe.driver "$tree/etc/libibverbs.d/"
    copy_libraries "$tree" "${elfs[@]}" /bin/dash
    # pthread_exit loads it at run time, so ldd does not list it.
    cp -L "$LIBDIR/libgcc_s.so.1" "$tree$LIBDIR/"
    mkdir -p "$tree/usr/libexec/coreutils" # stdbuf's
    cp /usr/libexec/coreutils/libstdbuf.so "$tree/usr/libexec/coreutils/"
    cp /usr/lib/tc/*.dist "$tree/usr/lib/tc/" 2>/dev/null || true

    cp "$(find_program busybox)" "$tree/bin/busybox"
    for name in $("$tree/bin/busybox" --list); do
        [ -e "$tree/bin/$name" ] || ln -s busybox "$tree/bin/$name"
    done
    ln -s ../bin/busybox "$tree/sbin/modprobe"
    # Debian's busybox shell prefers its own applets (`ip`, `tc`) to the programs in PATH: dash does not.
    rm -f "$tree/bin/sh" "$tree/bin/ip"
    cp -L /bin/dash "$tree/bin/sh"

    echo 'root:x:0:0:root:/root:/bin/sh' >"$tree/etc/passwd"
    echo 'root:x:0:' >"$tree/etc/group"
    printf '%s: files\n' passwd group hosts >"$tree/etc/nsswitch.conf"
    install -m 755 "$CACHE/agent" "$tree/bin/agent"
    install -m 755 "$HERE/guest/init" "$tree/init"
}

# add_modules TREE KERNEL-TREE VERSION: the modules with all they depend on, uncompressed (6.12's
# are .ko.xz, which busybox insmod cannot read), and the order in which init loads them.
add_modules() {
    local tree=$1 from=$2 version=$3 module path plain
    mkdir -p "$tree/lib/modules/$version"
    : >"$tree/etc/modules.boot"
    for module in $BOOT_MODULES $MORE_MODULES; do
        # A module may be built in, or gone from a later kernel.
        for path in $(modprobe -d "$from" -S "$version" --show-depends "$module" 2>/dev/null |
            awk '$1 == "insmod" { print $2 }'); do
            path=${path#"$from"}
            plain=${path%.xz}
            if [ ! -e "$tree$plain" ]; then
                mkdir -p "$tree$(dirname "$plain")"
                case $path in
                *.xz) xz -dc "$from$path" >"$tree$plain" ;;
                *) cp "$from$path" "$tree$plain" ;;
                esac
            fi
            case " ${BOOT_MODULES//[[:space:]]/ } " in
            *" $module "*)
                grep -qxF "$plain" "$tree/etc/modules.boot" || echo "$plain" >>"$tree/etc/modules.boot"
                ;;
            esac
        done
    done
    cp "$from/lib/modules/$version"/modules.{builtin,builtin.modinfo,order} "$tree/lib/modules/$version/"
    depmod -b "$tree" "$version"
    grep -q rdma_rxe "$tree/etc/modules.boot" || die "kernel $version has no rdma_rxe"
}

# inputs SHORT: a digest of all that the guest is made of.
inputs() {
    {
        cat "$HERE/build.sh" "$HERE"/guest/* "$HERE"/src/*
        stat -c '%s %Y' "$CACHE/kernel-$1.deb"
        # shellcheck disable=SC2086 # words wanted
        dpkg-query -W $PACKAGES
    } | sha256sum
}

build_guest() {
    local short=$1 kernel=$CACHE/kernel-$1.tree tree=$CACHE/initrd-$1.tree stamp version
    stamp=$(inputs "$short")
    if built "$short" && [ "$(cat "$CACHE/stamp-$short" 2>/dev/null)" = "$stamp" ]; then
        return 0
    fi
    echo "making the $short guest"
    rm -rf "$kernel" "$CACHE/stamp-$short"
    dpkg-deb -x "$CACHE/kernel-$short.deb" "$kernel"
    version=$(ls "$kernel/lib/modules")
    depmod -b "$kernel" "$version"
    extract_vmlinux "$kernel/boot/vmlinuz-$version" "$CACHE/vmlinux-$short"
    make_userland "$tree"
    add_modules "$tree" "$kernel" "$version"
    (cd "$tree" && find . | cpio -o -H newc --quiet -R 0:0) >"$CACHE/initrd-$short.cpio"
    rm -rf "$kernel" "$tree"
    echo "$version" >"$CACHE/version-$short"
    echo "$stamp" >"$CACHE/stamp-$short"
}

status() {
    local k
    for k in $KERNELS; do
        if built "$k"; then
            echo "$k: kernel $(cat "$CACHE/version-$k")," \
                "initramfs $(du -h "$CACHE/initrd-$k.cpio" | cut -f1)"
        else
            echo "$k: not built"
        fi
    done
}

main() {
    local wanted short
    case ${1:-all} in
    all) wanted=$KERNELS ;;
    6.1 | 6.12) wanted=$1 ;;
    status)
        status
        return
        ;;
    -h | --help)
        usage "$0"
        return
        ;;
    *)
        usage "$0" >&2
        exit 2
        ;;
    esac
    need_root
    # shellcheck disable=SC1091 # the machine's
    [ "$(. /etc/os-release && echo "${VERSION_CODENAME:-}")" = bookworm ] || die "this is not Debian 12"
    mkdir -p "$CACHE" "$RUN" "$SHARE"
    exec 8>"$CACHE/build.lock"
    flock 8
    : >"$LOG"

    install_packages
    compile_programs
    for short in $wanted; do
        if ! fetch_kernel "$short"; then
            [ "$short" = 6.12 ] || fail_with_log "cannot download kernel $short"
            warn "cannot download kernel 6.12 from backports: 6.1 takes its place"
            short=6.1
            fetch_kernel "$short" || fail_with_log "cannot download kernel $short"
        fi
        build_guest "$short"
    done
    status
    echo "done in $SECONDS s, $(du -sh "$CACHE" | cut -f1) in $CACHE"
}

main "$@"
