#!/bin/bash
# uroce beside iperf3 TCP, a TCP ping-pong, a TCP connection loop, UCX over tcp, libfabric's tcp provider and the bare
# device: on one veth pair, in one run. Debian 12 or newer, as root, two processors that do nothing else.
#
#   benches/versus/run.sh                 everything, at most 12 minutes; writes docs/versus and docs/src/versus.md
#   benches/versus/run.sh --quick         at most 2 minutes
#   benches/versus/run.sh --only point1,point4 [--devices packet,udp] [--out DIR]
#   benches/versus/run.sh --help          all options
#
# Installs with apt-get what is missing (iperf3, ucx-utils, libfabric-bin) and builds uroce. The namespaces that it
# makes, versusPID…, are gone when it ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

missing=""
command -v iperf3 >/dev/null || missing="$missing iperf3"
command -v ucx_perftest >/dev/null || missing="$missing ucx-utils"
command -v fi_pingpong >/dev/null || missing="$missing libfabric-bin"
command -v ip >/dev/null || missing="$missing iproute2"
command -v sysctl >/dev/null || missing="$missing procps"
if [ -n "$missing" ]; then
    export DEBIAN_FRONTEND=noninteractive
    echo "apt-get install$missing" >&2
    # shellcheck disable=SC2086 # words wanted
    { apt-get update -q && apt-get install -q -y --no-install-recommends $missing; } >&2
fi
cargo build --release -q -p uroce-tools --bin uroce
cargo build --release -q -p uroce-benches --example raw --example connections --example versus
exec target/release/examples/versus "$@"
