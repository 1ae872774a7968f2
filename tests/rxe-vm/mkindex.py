#!/usr/bin/env python3
"""mkindex.py DIR KERNEL -- writes DIR/INDEX.md from the captures in DIR and the index.tsv that captures.sh left there.

KERNEL is the guests' kernel version, as text for the head of the index (`build.sh status` knows it).
"""

import collections
import ipaddress
import os
import sys

import icrc

CM_LINES = 6
FLOW_LINES = 6

NOTES = {
    "rping_v4": "Ping data is the text `rdma-ping-0: ABC...` (64 B incl. NUL); per iteration: SEND of {addr,rkey,len} (16 B), READ, SEND, SEND, WRITE, SEND.",
    "rping_big": "10000-byte READ and WRITE at path MTU 4096.",
    "udaddy": "SIDR_REQ/SIDR_REP give the remote QPN and Q_Key (0x01234567); the data are UD SEND_ONLY with immediate.",
    "rstream": "rsockets: everything is WRITE_ONLY_IMM; the REP/REQ private data carry the rsocket buffer addresses.",
    "mckey_mcast": "UD to DQPN 0xffffff, IPv4 239.7.7.7, MAC 01:00:5e:07:07:07; Q_Key 0x01234567. The receiver got all 3.",
    "cm_rej_noport": "REJ reason 8 (Invalid Service ID).",
    "cm_rej_user": "REJ reason 28 (Consumer Reject), private data `rlab-reject`.",
    "cm_req_noanswer": "REQ to an address that answers ARP but has no RoCE stack: the REQ at 0 s, and again after 4.85 s and 9.71 s (same transaction and comm id; QP1 PSN counts on). The REJ reason 4 (timeout) at 13.9 s is sent as `timeout 14` ends the program and its id is destroyed; it is not rxe giving up (max CM retries is 15).",
    "cm_mra": "The MRA answers the second REQ, 4.7 s after the first; it names service timeout 24 (68.7 s), so that no third REQ comes. The program accepts after 8 s.",
    "cm_rej_stale": "Both REQs have the same CA GUID and QPN. REJ reason 10 (Stale Connection) without additional information, its own communication id 0; then the server's DREQ on the first connection.",
    "rlab_basic_cm": "Known answers: SEND `hello rxe\\0`; SEND_IMM 100 B p[i]=7i+1, imm 0xdeadbeef; WRITE 5000 B p[i]=7i+2 to addr+8192; WRITE_IMM 33 B p[i]=7i+3 to addr+16384, imm 0xcafef00d; READ 5000 B back from addr+8192; CAS at addr+32768 0x1122334455667788 -> 0xaabbccddeeff0011 (old value returned 0x1122334455667788); FADD +0x10 (returned 0xaabbccddeeff0011, then 0x...0021); 0-byte WRITE; 0-byte READ; SEND 3 B; reply SEND `bye from server\\0`. All bytes mod 256.",
    "rlab_psnwrap_1024": "Same known answers; client starts at PSN 0xfffffc, server at 0xfffffd: the PSN wraps inside the 5000-byte WRITE (first packet 0xfffffe).",
    "rlab_mw_inv": "Server binds a type-2 memory window (rkey in the first SEND), client writes with it, SEND_ONLY_INV (IETH = that rkey), next WRITE -> NAK Remote Access Error.",
    "nak_send_toolong": "64-byte SEND into a 16-byte receive: rxe answers NAK *Remote Operational Error* (0x63), where the spec would let one expect Invalid Request (0x61).",
    "rnr_then_ok": "Six RNR NAKs with timer 22 (20.48 ms), the SEND again each time with the same PSN, then the ACK once the receive is posted.",
    "rnr_exhausted": "rnr_retry=2: 3 sends, 3 RNR NAKs, IBV_WC_RNR_RETRY_EXC_ERR at the requester.",
    "loss_data": "The capture point is before the drop: every 9th request packet (numgen inc mod 9 = 4) was dropped in the receiver after capture. Go-back-N with NAK PSN sequence error; client PSN starts at 0xffffe0 and wraps. All 64 sends completed.",
    "loss_ack": "Every 5th ACK dropped at the requester after capture. 13 dropped; recovered by coalesced later ACKs or timeout (67 ms).",
    "loss_read_resp": "READ_RESP_MIDDLE dropped at the requester: rxe re-requests the rest with a partial READ (RETH address and length advanced, PSN = first missing).",
    "loss_atomic_ack": "Every other ATOMIC_ACK dropped at the requester: the same CMP_SWAP/FETCH_ADD (same PSN) comes again and the responder replays the *saved* result. Dropped: 2 (the first answer to each atomic).",
    "loss_cm_rep": "First CM REP dropped at the client after capture; the server sends it again.",
    "netem_dup_reorder": "netem on the client's egress, before the capture point: duplicates and reordering are on the wire.",
    "srq_pingpong": "4 QPs on one SRQ.",
}

HEAD = """# Captures of Linux soft-RoCE (rdma_rxe)

Made by tests/rxe-vm/captures.sh: two QEMU guests (kernel {kernel}, Debian's; userland rdma-core 44.0, perftest 4.5),
virtio-net + tap on a bridge, tcpdump on tap1 (guest 1's port) with `udp port 4791`, full frames, classic pcap, Ethernet.

- node 1 = client: 02:77:00:00:00:01, 10.77.0.1, fd77::1, fe80::77:ff:fe00:1
- node 2 = server: 02:77:00:00:00:02, 10.77.0.2, fd77::2, fe80::77:ff:fe00:2
- GID index 0 = link-local, 1 = IPv4-mapped, 2 = ULA. netdev MTU 4500, so the device's active MTU is 4096.

{captures} captures, {packets} RoCEv2 packets, {bad} with an ICRC other than the one tests/rxe-vm/icrc.py recomputes (zlib.crc32,
written from the RoCEv2 annex). tshark 4.0.17: every packet dissects as InfiniBand, none malformed **with
`--disable-protocol rpcordma`**; without it tshark's RPC-over-RDMA heuristic calls some small SENDs malformed (a tshark artefact).
tshark also flags `Illegal checksum value (0)` on all IPv6 packets: rxe sends UDP checksum 0 over IPv6 too.

Seen in all captures: UDP checksum 0; TTL/hop limit 64; TOS 0; MigReq bit 0; P_Key 0xffff; SE 0; QP1 uses Q_Key 0x80010000 and the
BTH AckReq bit is set on its MADs (UD data have it 0; RC requests have it on LAST/ONLY packets; ACKs 0). UDP source port: the same
in both directions of an RC/UC connection (the kernel derives it from the two QPNs), 55410 for QP1, one per QP for UD.

Timings are those of TCG-emulated guests (a round trip takes 1-30 ms), so a few retransmissions by timeout are in them.

"""


def number(b):
    return int.from_bytes(b, "big")


def hex_or_none(b):
    return b.rstrip(b"\0").hex() or "(none)"


def describe_req(tid, c):
    p = c[140:232]  # private data, with the IP addressing header first
    if p[1] >> 4 == 4:
        source, dest = ipaddress.ip_address(p[16:20]), ipaddress.ip_address(p[32:36])
    else:
        source, dest = ipaddress.ip_address(p[4:20]), ipaddress.ip_address(p[20:36])
    return (
        f"REQ tid {tid} comm 0x{c[0:4].hex()} service 0x{c[8:16].hex()} QPN 0x{number(c[32:35]):06x} "
        f"PSN 0x{number(c[44:47]):06x} resp_res {c[35]} init_depth {c[39]} retry {c[47] & 7} rnr {c[50] & 7} "
        f"MTU {128 << (c[50] >> 4)} IP-CM v{p[1] >> 4} sport {number(p[2:4])} {source} -> {dest} "
        f"private data {hex_or_none(p[36:])}"
    )


def describe_rep(c):
    return (
        f"REP comm 0x{c[0:4].hex()}/0x{c[4:8].hex()} QPN 0x{number(c[12:15]):06x} PSN 0x{number(c[20:23]):06x} "
        f"resp_res {c[24]} init_depth {c[25]} rnr {c[27] >> 5} srq {c[27] >> 4 & 1} "
        f"private data {hex_or_none(c[36:232])}"
    )


def describe_cm(mad):
    """A line for the messages that carry numbers worth knowing, None for the others."""
    attribute, c = icrc.CM_MESSAGES.get(number(mad[16:18])), mad[24:]
    if attribute == "REQ":
        return describe_req(mad[8:16].hex(), c)
    if attribute == "REP":
        return describe_rep(c)
    if attribute == "REJ":
        return (
            f"REJ comm 0x{c[0:4].hex()}/0x{c[4:8].hex()} msg {c[8] >> 6} reason {number(c[10:12])} "
            f"private data {hex_or_none(c[84:232])}"
        )
    if attribute == "SIDR_REQ":
        return f"SIDR_REQ service 0x{c[8:16].hex()}"
    if attribute == "SIDR_REP":
        return f"SIDR_REP status {c[4]} QPN 0x{number(c[8:11]):06x} service 0x{c[12:20].hex()} qkey 0x{c[20:24].hex()}"
    return None


def is_request(p):
    return p.dest_qp > 1 and not any(word in p.name for word in ("RC_ACK", "RESP", "ATOMIC_ACK"))


def section(directory, row):
    """(lines, packets, wrong ICRCs) for one capture."""
    name, status, server, client, setup = row[:5]
    path = f"{directory}/{name}.pcap"
    names, cm_lines, first_psn, bad = collections.Counter(), [], {}, 0
    for _, frame in icrc.frames(path):
        p = icrc.decode(frame)
        if not p:
            continue
        names[p.name] += 1
        bad += not p.icrc_ok
        node = p.source_mac[-1]
        if p.name.startswith("CM_"):
            text = describe_cm(p.body[8:])
            if text:
                cm_lines.append(f"- node {node}: {text}")
        elif is_request(p):
            first_psn.setdefault((node, p.dest_qp), p.psn)
    packets = names.total()
    lines = [
        f"## {name}.pcap",
        "",
        f"- server (guest 2): `{server}`" if server else "- no server",
        f"- client (guest 1): `{client}`; exit status {status}",
    ]
    if setup.strip():
        lines.append(f"- set up before: `{setup.strip()}`")
    opcodes = ", ".join(f"{n} {c}" for n, c in names.items())
    lines.append(f"- {packets} packets, {os.path.getsize(path)} bytes: {opcodes}")
    lines += cm_lines[:CM_LINES]
    if first_psn:
        flows = [f"node {n} -> QPN 0x{q:06x}: 0x{psn:06x}" for (n, q), psn in first_psn.items()]
        lines.append("- first request PSN by direction: " + "; ".join(flows[:FLOW_LINES]))
    if name in NOTES:
        lines.append(f"- {NOTES[name]}")
    if os.path.exists(f"{directory}/{name}.log"):
        lines.append(f"- what both programs printed: {name}.log")
    return lines + [""], packets, bad


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    directory, kernel = sys.argv[1:]
    rows = [line.rstrip("\n").split("\t") for line in open(f"{directory}/index.tsv")]
    body, packets, bad = [], 0, 0
    for row in rows:
        lines, count, wrong = section(directory, row)
        body += lines
        packets += count
        bad += wrong
    head = HEAD.format(kernel=kernel, captures=len(rows), packets=packets, bad=bad)
    with open(f"{directory}/INDEX.md", "w") as index:
        index.write(head + "\n".join(body))
    print(len(rows), "captures,", packets, "packets,", bad, "with a wrong ICRC")


main()
