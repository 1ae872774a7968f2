#!/bin/bash
# Instructions a packet or a connection, by callgrind: they repeat where the clock of a shared machine does not.
#
#   benches/counts/counts.sh                    prints each count beside what it was (baseline.tsv)
#   benches/counts/counts.sh --check            the same, and fails if one is more than 3 % above what it was
#   benches/counts/counts.sh --write            makes baseline.tsv anew
#   benches/counts/counts.sh --layers NAME...   where those of these names go, layer by layer
#
# Each is the difference between a long and a short run, in which the set-up cancels. Callgrind's processor has neither
# AVX-512 nor VPCLMULQDQ, so the loops over bytes are the narrowest there are. Needs valgrind, and for --layers python3 and
# addr2line. The counts belong to a compiler: make the baseline anew when rustc changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Name; packets or connections that the long run has more; count of the short and of the long run; program and arguments.
list() {
    local wire kind
    for wire in direct superframes; do
        for kind in write send read; do
            echo "$wire/$kind/64 4000 1000 5000 transfer $wire $kind 64 COUNT"
            echo "$wire/$kind/4096 2000 500 2500 transfer $wire $kind 4096 COUNT"
            echo "$wire/$kind/1MiB 2048 2 10 transfer $wire $kind 1048576 COUNT"
        done
    done
    echo "switch/write/64 4000 1000 5000 transfer loopback write 64 COUNT"
    echo "switch/write/1MiB 2048 2 10 transfer loopback write 1048576 COUNT"
    echo "alone/send/8 2000 500 2500 transfer direct send 8 COUNT 1"
    echo "alone/write/8 2000 500 2500 transfer direct write 8 COUNT 1"
    echo "connections 1000 300 1300 connections direct COUNT 64"
}

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
programs=${CARGO_TARGET_DIR:-target}/release/examples
baseline=benches/counts/baseline.tsv

# profile FILE COUNT "PROGRAM ARGUMENTS" [OPTION...]
profile() {
    local file=$1 words
    read -ra words <<<"${3//COUNT/$2}"
    valgrind --tool=callgrind --callgrind-out-file="$file" "${@:4}" "$programs/${words[0]}" "${words[@]:1}" \
        >"$dir/said" 2>&1 || { cat "$dir/said" >&2; exit 1; }
}

total() {
    awk '/^(summary|totals):/ { n = $2 } END { print n }' "$1"
}

counts() {
    local name units few many command
    while read -r name units few many command; do
        profile "$dir/few" "$few" "$command"
        profile "$dir/many" "$many" "$command"
        echo -e "$name\t$((($(total "$dir/many") - $(total "$dir/few")) / units))"
    done < <(list)
}

layers() {
    local name units few many command detail=(--dump-instr=yes --demangle=no --compress-strings=no --compress-pos=no)
    while read -r name units few many command; do
        [[ " $* " == *" $name "* ]] || continue
        profile "$dir/few" "$few" "$command" "${detail[@]}"
        profile "$dir/many" "$many" "$command" "${detail[@]}"
        echo "$name"
        python3 benches/counts/layers.py "$programs/${command%% *}" "$dir/few" "$dir/many" "$units"
    done < <(list)
}

compare() {
    awk -F'\t' -v check="$1" '
        NR == FNR { if ($0 !~ /^#/) was[$1] = $2; next }
        { change = ($1 in was) ? 100 * ($2 / was[$1] - 1) : 0
          printf "%-24s %8d  was %8d  %+5.1f %%%s\n", $1, $2, was[$1], change, (change > 3) ? "  more" : ""
          if (change > 3) worse = 1 }
        END { exit check && worse }' "$baseline" -
}

cargo build --release -q -p uroce-benches --example transfer --example connections
case ${1:-} in
--write)
    { echo "# $(rustc --version), $(valgrind --version), instructions both sides"; counts; } >"$dir/new"
    mv "$dir/new" "$baseline"
    cat "$baseline"
    ;;
--layers) layers "${@:2}" ;;
--check) counts | compare 1 ;;
"") counts | compare 0 ;;
*) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
