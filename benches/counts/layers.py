#!/usr/bin/env python3
"""Instructions by layer, out of two callgrind profiles of one program.

layers.py PROGRAM FEW MANY UNITS

FEW and MANY are profiles of a short and a long run (counts.sh makes them with `--dump-instr=yes --demangle=no` and without
compression). What both have in common, the set-up, cancels: the difference is divided by UNITS, the packets or messages
that MANY has more.

An instruction belongs to the layer of the innermost inlined frame whose file has one (LAYERS). Files that serve every
layer (rings, tables, the loops over bytes, the standard library) have none: their instructions go to who called them, and
where several do, to each by its share.
"""

import collections
import re
import subprocess
import sys

# File below the repository, function, layer; the first that matches.
LAYERS = [
    ("stack/src/qp/post.rs", "", "posting: checks, into the ring"),
    ("stack/src/endpoint/verbs.rs", "post_", "posting: checks, into the ring"),
    ("stack/src/cq.rs", "", "completions"),
    ("stack/src/endpoint/verbs.rs", "poll_cq", "completions"),
    ("stack/src/verbs/wc.rs", "", "completions"),
    ("stack/src/qp/requester.rs", "", "requester: what is sent next"),
    ("stack/src/qp/send_queue.rs", "", "requester: what is sent next"),
    ("stack/src/qp/window.rs", "", "requester: what is sent next"),
    ("stack/src/qp/completer.rs", "", "completer: what answers mean"),
    ("stack/src/qp/answers.rs", "", "answers: ACKs and READ data to send"),
    ("stack/src/qp/responder.rs", "", "responder: sequence, rights, messages"),
    ("stack/src/qp/assembly.rs", "", "responder: sequence, rights, messages"),
    ("stack/src/qp/credits.rs", "", "responder: sequence, rights, messages"),
    ("stack/src/qp/rnr.rs", "", "responder: sequence, rights, messages"),
    ("stack/src/srq.rs", "", "responder: sequence, rights, messages"),
    ("stack/src/qp/ud.rs", "", "datagrams"),
    ("stack/src/qp/emit.rs", "", "emit: headers, burst"),
    ("stack/src/wire/emit.rs", "", "emit: headers, burst"),
    ("stack/src/endpoint/mod.rs", "check_icrc", "ICRC checked"),
    ("stack/src/endpoint/peer_ids.rs", "", "ICRC checked"),
    ("stack/src/endpoint/runs.rs", "", "runs received: headers, ICRC, how far"),
    ("stack/src/wire/run.rs", "take", "runs received: headers, ICRC, how far"),
    ("stack/src/qp/runs.rs", "land", "runs received: headers, ICRC, how far"),
    ("stack/src/qp/runs.rs", "advance", "runs received: headers, ICRC, how far"),
    ("stack/src/qp/runs.rs", "", "runs sent: headers, how far"),
    ("stack/src/wire/run.rs", "", "runs sent: headers, how far"),
    ("stack/src/wire/parse.rs", "", "parse"),
    ("stack/src/wire/outer.rs", "parse", "parse"),
    ("stack/src/wire/outer.rs", "", "emit: headers, burst"),
    ("stack/src/mem/", "gather", "regions: keys, elements, read"),
    ("stack/src/raw/mod.rs", "read", "regions: keys, elements, read"),
    ("stack/src/mem/", "", "regions: keys, rights, written"),
    ("stack/src/raw/mod.rs", "", "regions: keys, rights, written"),
    ("stack/src/endpoint/mod.rs", "poll_transmit", "turns: which QP sends"),
    ("stack/src/endpoint/turn.rs", "", "turns: which QP sends"),
    ("stack/src/endpoint/timers.rs", "", "timers"),
    ("stack/src/endpoint/mod.rs", "", "demux: QP by number, what it touches"),
    ("stack/src/qp/mod.rs", "poll_transmit", "QP, sending: which half"),
    ("stack/src/qp/mod.rs", "", "QP, receiving and timers: which half"),
    ("stack/src/qp/path.rs", "", "QP, receiving and timers: which half"),
    ("stack/src/qp/modify.rs", "", "QPs made, modified, destroyed"),
    ("stack/src/verbs/state.rs", "", "QPs made, modified, destroyed"),
    ("stack/src/qp/queues.rs", "", "QPs made, modified, destroyed"),
    ("stack/src/endpoint/verbs.rs", "", "QPs made, modified, destroyed"),
    ("cm/src/wire/", "", "MADs read and written"),
    ("cm/src/gsi.rs", "", "MADs over QP1"),
    ("cm/src/id/", "", "ids and events (front)"),
    ("cm/src/policy/", "", "agent: communications, tables, timers"),
    ("cm/src/", "", "agent: communications, tables, timers"),
    ("stack/src/device/", "", "device"),
    ("stack/src/engine", "", "driver"),
    ("benches/", "hand_over", "hand-over between endpoints"),
    ("benches/", "", "the benchmark itself"),
]
# The loops over bytes, and the ICRC, are named after what calls them.
LOOPS = "stack/src/raw/copy/"
LOOP_NAMES = {
    "regions: keys, elements, read": "bytes: copied out of memory and summed",
    "regions: keys, rights, written": "bytes: copied into memory",
    "ICRC checked": "bytes: summed, to check the ICRC",
    "ICRC made": "bytes: headers summed",
    "runs received: headers, ICRC, how far": "bytes: summed, to check the ICRC",
}
ICRC = "stack/src/wire/icrc.rs"
ICRC_NAMES = {"emit: headers, burst": "ICRC made", "demux: QP by number, what it touches": "ICRC checked"}
ALLOCATOR = re.compile(r"^_?_?(int_)?(libc_)?(malloc|free|calloc|realloc|posix_memalign|memalign|aligned_alloc)|malloc_|_int_|unlink_chunk")
# What a program calls, whose inclusive costs are printed too.
ENTRIES = ["post_send", "post_recv", "Endpoint13poll_transmit", "Endpoint12handle_burst", "poll_cq"]


class Profile:
    """Costs of each instruction, and of each call by the instruction that makes it."""

    def __init__(self, path):
        self.own = collections.Counter()  # (object, function, address)
        self.calls = collections.Counter()  # (caller's object, function, address), (callee's object, function)
        obj = fn = callee_obj = callee = None
        for line in open(path, encoding="utf-8", errors="replace"):
            key, _, value = line.rstrip("\n").partition("=")
            if key == "ob":
                obj = value
                callee_obj = obj
            elif key == "fn":
                fn, callee_obj = value, obj
            elif key == "cob":
                callee_obj = value
            elif key == "cfn":
                callee = value
            elif key == "calls":
                call = (callee_obj, callee)
                callee_obj = obj
            elif line.startswith("0x"):
                address, _, cost = line.split()
                site = (obj, fn, int(address, 16))
                if call := locals().get("call"):
                    self.calls[site, call] += int(cost)
                else:
                    self.own[site] += int(cost)
                call = None


def frames_of(program, addresses):
    """Inlined frames of each address, innermost first: (function, file)."""
    lines = subprocess.run(
        ["addr2line", "-a", "-i", "-f", "-C", "-e", program], check=True, text=True, capture_output=True,
        input="".join(f"{a:#x}\n" for a in addresses)).stdout.splitlines()
    out, at = {}, None
    for line in lines:
        if line.startswith("0x"):
            at, name = out.setdefault(int(line, 16), []), None
        elif name is None:
            name = line
        else:
            at.append((name.split("<")[0].rsplit("::", 1)[-1] if "::" in name else name, line))
            name = None
    return out


def layer_of(frames):
    """Layer of an instruction, or None where its caller must be asked."""
    icrc = False
    for name, file in frames:
        icrc |= ICRC in file
        for path, function, layer in LAYERS:
            if path in file and function in name:
                return ICRC_NAMES.get(layer, layer) if icrc else layer
    return None


class Layers:
    """Which part of a function's costs belongs to whom, for functions that have no layer."""

    def __init__(self, program, profile):
        addresses = {a for (o, _, a) in profile.own if o.endswith(program)}
        addresses |= {a for ((o, _, a), _) in profile.calls if o.endswith(program)}
        self.program, self.frames = program, frames_of(program, sorted(addresses))
        self.callers = collections.defaultdict(collections.Counter)
        for (site, callee), cost in profile.calls.items():
            self.callers[callee][site] += cost
        self.known = {}

    def of_site(self, site):
        obj, fn, address = site
        layer = layer_of(self.frames.get(address, [])) if obj.endswith(self.program) else None
        if layer:
            return {layer: 1.0}
        shares = self.of_function((obj, fn))
        if any(ICRC in file for _, file in self.frames.get(address, [])) and obj.endswith(self.program):
            renamed = collections.Counter()
            for layer, share in shares.items():
                renamed[ICRC_NAMES.get(layer, layer)] += share
            return renamed
        return shares

    def of_function(self, function):
        if function not in self.known:
            self.known[function] = {}  # Ends a recursion.
            shares, total = collections.Counter(), 0
            for site, cost in self.callers[function].items():
                total += cost
                for layer, share in self.of_site(site).items():
                    shares[layer] += share * cost
            self.known[function] = {layer: share / total for layer, share in shares.items()} if total else {}
        return self.known[function]

    def costs(self, profile):
        out = collections.Counter()
        for site, cost in profile.own.items():
            obj, fn, address = site
            if not obj.endswith(self.program) and ALLOCATOR.search(fn):
                out["allocator"] += cost
                continue
            loop = any(LOOPS in file for _, file in self.frames.get(address, [])) and obj.endswith(self.program)
            shares = self.of_site(site) or {"other": 1.0}
            for layer, share in shares.items():
                out[LOOP_NAMES.get(layer, layer) if loop else layer] += share * cost
        return out


def main():
    program, few, many, units = sys.argv[1], Profile(sys.argv[2]), Profile(sys.argv[3]), float(sys.argv[4])
    few_costs, many_costs = (Layers(program, p).costs(p) for p in (few, many))
    costs = {k: (many_costs[k] - few_costs[k]) / units for k in many_costs}
    total = sum(costs.values())
    print("| layer | instructions | part |\n|---|---|---|")
    for layer, cost in sorted(costs.items(), key=lambda x: -x[1]):
        if cost / total >= 0.005:
            print(f"| {layer} | {cost:,.0f} | {cost / total:.0%} |")
    print(f"| all | {total:,.0f} | |")
    for entry in ENTRIES:
        per = [sum(c for (_, (_, f)), c in p.calls.items() if entry in f) for p in (few, many)]
        if per[1] > per[0]:
            print(f"{entry}: {(per[1] - per[0]) / units:,.0f}", file=sys.stderr)


if __name__ == "__main__":
    main()
