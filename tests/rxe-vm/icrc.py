#!/usr/bin/env python3
"""icrc.py [-v | -m] FILE.pcap... -- decodes RoCEv2 packets and recomputes every ICRC.

Standard library only, and written from the RoCEv2 annex: a second opinion on what uroce computes.
Prints the opcodes of each file and how many ICRCs are right; -v adds a line for each packet, -m
makes it rows of a Markdown table. Exit status 1 if an ICRC is wrong.
"""

import collections
import struct
import sys
import zlib

ROCE_PORT = 4791
UDP = 17
MAD_CLASS_CM = 7

TRANSPORTS = {0: "RC", 1: "UC", 2: "RD", 3: "UD", 5: "XRC"}
CNP = 0x81
OPERATIONS = (
    "SEND_FIRST SEND_MIDDLE SEND_LAST SEND_LAST_IMM SEND_ONLY SEND_ONLY_IMM "
    "WRITE_FIRST WRITE_MIDDLE WRITE_LAST WRITE_LAST_IMM WRITE_ONLY WRITE_ONLY_IMM "
    "READ_REQUEST READ_RESP_FIRST READ_RESP_MIDDLE READ_RESP_LAST READ_RESP_ONLY "
    "ACK ATOMIC_ACK CMP_SWAP FETCH_ADD RESYNC SEND_LAST_INV SEND_ONLY_INV "
    "24 25 26 27 FLUSH ATOMIC_WRITE 30 31"
).split()
# RC opcodes that carry an AETH.
WITH_AETH = (0x0D, 0x0F, 0x10, 0x11, 0x12)
CM_MESSAGES = dict(enumerate("REQ MRA REJ REP RTU DREQ DREP SIDR_REQ SIDR_REP LAP APR".split(), 0x10))
NAK_CODES = dict(enumerate("PSN_SEQ INV_REQ REM_ACCESS REM_OP INV_RD_REQ".split()))

Packet = collections.namedtuple(
    "Packet",
    "name dest_qp psn ack_req solicited mig_req pad pkey icrc_ok extra source_port udp_checksum ip_version ttl tos "
    "source_mac body",
)


def frames(path):
    """Yields (seconds, frame) from a classic pcap file of either byte order and resolution."""
    data = open(path, "rb").read()
    order = "<" if data[:4] in (b"\xd4\xc3\xb2\xa1", b"\x4d\x3c\xb2\xa1") else ">"
    resolution = 1e9 if data[:4] in (b"\x4d\x3c\xb2\xa1", b"\xa1\xb2\x3c\x4d") else 1e6
    at = 24
    while at + 16 <= len(data):
        seconds, fraction, captured, _ = struct.unpack_from(order + "IIII", data, at)
        at += 16
        yield seconds + fraction / resolution, data[at : at + captured]
        at += captured


def icrc(packet, l3_length):
    """The ICRC of `packet`, which runs from its IP header to before the ICRC.

    Eight bytes of ones stand for the LRH; the fields that routers may change count as ones.
    """
    b = bytearray(packet)
    if b[0] >> 4 == 4:
        b[1] = 0xFF  # TOS
        b[8] = 0xFF  # TTL
        b[10:12] = b"\xff\xff"  # header checksum
    else:
        b[0] |= 0x0F  # traffic class, flow label
        b[1:4] = b"\xff\xff\xff"
        b[7] = 0xFF  # hop limit
    b[l3_length + 6 : l3_length + 8] = b"\xff\xff"  # UDP checksum
    b[l3_length + 8 + 4] = 0xFF  # BTH: FECN, BECN, reserved
    return zlib.crc32(b"\xff" * 8 + bytes(b))


def split_ip(frame):
    """(IP packet, length of its header) of an Ethernet frame with UDP in it, or None."""
    ethertype, ip = frame[12:14], frame[14:]
    if ethertype == b"\x08\x00" and ip[9] == UDP:
        return ip[: int.from_bytes(ip[2:4], "big")], (ip[0] & 15) * 4
    if ethertype == b"\x86\xdd" and ip[6] == UDP:
        return ip[: 40 + int.from_bytes(ip[4:6], "big")], 40
    return None


def name_of(opcode, dest_qp, body):
    """(name, further facts)"""
    if opcode == CNP:
        return "CNP", ""
    transport = opcode >> 5
    name = f"{TRANSPORTS.get(transport, transport)}_{OPERATIONS[opcode & 31]}"
    if opcode in WITH_AETH:
        kind, value = body[0] >> 5 & 3, body[0] & 31
        msn = f"msn={int.from_bytes(body[1:4], 'big')}"
        if kind == 1:
            return f"{name}:RNR_NAK", f"timer={value} {msn}"
        if kind == 3:
            return f"{name}:NAK_{NAK_CODES.get(value, value)}", msn
        return name, msn
    if TRANSPORTS.get(transport) == "UD":
        extra = f"qkey={body[0:4].hex()} sqp=0x{int.from_bytes(body[5:8], 'big'):06x}"
        if dest_qp == 1 and body[8 + 1] == MAD_CLASS_CM:
            attribute = int.from_bytes(body[8 + 16 : 8 + 18], "big")
            return f"CM_{CM_MESSAGES.get(attribute, hex(attribute))}", extra
        return name, extra
    return name, ""


def decode(frame):
    """A Packet (body: what lies between BTH and ICRC), or None if the frame is not RoCEv2."""
    found = split_ip(frame)
    if not found:
        return None
    ip, l3_length = found
    source_port, dest_port, _, udp_checksum = struct.unpack_from(">HHHH", ip, l3_length)
    if dest_port != ROCE_PORT:
        return None
    bth = ip[l3_length + 8 : l3_length + 20]
    body = ip[l3_length + 20 : -4]
    dest_qp = int.from_bytes(bth[5:8], "big")
    name, extra = name_of(bth[0], dest_qp, body)
    v4 = ip[0] >> 4 == 4
    return Packet(
        name=name,
        dest_qp=dest_qp,
        psn=int.from_bytes(bth[9:12], "big"),
        ack_req=bth[8] >> 7,
        solicited=bth[1] >> 7,
        mig_req=bth[1] >> 6 & 1,
        pad=bth[1] >> 4 & 3,
        pkey=bth[2:4].hex(),
        icrc_ok=ip[-4:] == icrc(ip[:-4], l3_length).to_bytes(4, "little"),
        extra=extra,
        source_port=source_port,
        udp_checksum=udp_checksum,
        ip_version=ip[0] >> 4,
        ttl=ip[8] if v4 else ip[7],
        tos=ip[1] if v4 else (ip[0] & 15) << 4 | ip[1] >> 4,
        source_mac=frame[6:12].hex(":"),
        body=body,
    )


def describe(seconds, p):
    return (
        f"{seconds:9.6f} {p.source_mac[-2:]} v{p.ip_version} {p.name:<24} dqp=0x{p.dest_qp:06x} psn=0x{p.psn:06x} "
        f"a={p.ack_req} se={p.solicited} m={p.mig_req} pad={p.pad} pkey={p.pkey} sport={p.source_port} "
        f"udpsum={p.udp_checksum:04x} ttl={p.ttl} tos={p.tos} len={len(p.body)} {p.extra}"
        f"{'' if p.icrc_ok else ' ICRC BAD'}"
    )


def main():
    options = [a for a in sys.argv[1:] if a.startswith("-")]
    files = [a for a in sys.argv[1:] if not a.startswith("-")]
    if not files or set(options) - {"-v", "-m"}:
        sys.exit(__doc__)
    total = bad = 0
    for path in files:
        names, good, count, began = collections.Counter(), 0, 0, None
        for seconds, frame in frames(path):
            began = seconds if began is None else began
            p = decode(frame)
            names[p.name if p else "(not RoCEv2)"] += 1
            if p:
                count += 1
                good += p.icrc_ok
                if "-v" in options:
                    print(describe(seconds - began, p))
        total += count
        bad += count - good
        file, opcodes = path.split("/")[-1], ", ".join(f"{n} {c}" for n, c in names.items())
        if "-m" in options:
            print(f"| {file} | {count} | {good} | {opcodes} |")
        else:
            print(f"{file}: RoCEv2 {count}, ICRC ok {good}; {opcodes}")
    if "-m" not in options:
        print(f"total {total} RoCEv2 packets, ICRC bad {bad}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
