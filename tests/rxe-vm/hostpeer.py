#!/usr/bin/env python3
"""hostpeer.py IP MAC [PORT] -- a RoCEv2 endpoint of one packet, to see that frames from h0 reach rxe.

    run.sh ns python3 hostpeer.py 10.77.0.2 02:77:00:00:00:02

Sends an RDMA-CM REQ, built here byte by byte, as a raw Ethernet frame from h0 to rxe in a guest, and
prints the CM message that comes back: a REJ with reason 8 where nobody listens on PORT (19999).
"""

import os
import socket
import struct
import sys
import time

import icrc

INTERFACE = "h0"
SOURCE_IP = "10.77.0.100"
SOURCE_MAC = "02:77:00:00:00:64"
SOURCE_PORT = 40000
LOCAL_QPN, STARTING_PSN = 0x12, 0x123456
GSI_QKEY = 0x80010000
SERVICE_ID_TCP = 0x0000000001060000
REQ = 0x10
TRIES = 4
ETH_P_ALL = 3


def mac(text):
    return bytes.fromhex(text.replace(":", ""))


def mapped(ipv4):
    return bytes(10) + b"\xff\xff" + ipv4


def private_data(source, dest):
    """The header that the CM's IP addressing annex puts before the program's private data."""
    p = bytearray(92)
    p[1] = 4 << 4  # IP version
    p[2:4] = SOURCE_PORT.to_bytes(2, "big")
    p[16:20] = source
    p[32:36] = dest
    return bytes(p)


def req(source, dest, port, comm_id):
    """The 232 bytes of a REQ for an RC connection."""
    c = bytearray(232)
    c[0:4] = comm_id
    c[8:16] = (SERVICE_ID_TCP | port).to_bytes(8, "big")
    c[16:24] = bytes.fromhex("027700fffe000064")  # local CA GUID
    c[32:35] = LOCAL_QPN.to_bytes(3, "big")
    c[35] = 1  # responder resources
    c[39] = 1  # initiator depth
    c[43] = 20 << 3  # remote CM response timeout; transport RC
    c[44:47] = STARTING_PSN.to_bytes(3, "big")
    c[47] = 20 << 3 | 7  # local CM response timeout; retry count
    c[48:50] = b"\xff\xff"  # P_Key
    c[50] = 3 << 4 | 7  # path MTU 1024; RNR retry count
    c[51] = 15 << 4  # max CM retries
    c[52:54] = c[54:56] = b"\xff\xff"  # LIDs: permissive
    c[56:72] = mapped(source)
    c[72:88] = mapped(dest)
    c[93] = 64  # hop limit
    c[95] = 20 << 3  # local ACK timeout
    c[140:232] = private_data(source, dest)
    return bytes(c)


def ip_checksum(header):
    total = sum(struct.unpack(f">{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def frame(source, dest, dest_mac, mad):
    """A UD SEND of `mad` to QP1."""
    bth = struct.pack(">BBHII", 0x64, 0, 0xFFFF, 1, 0x80000000)
    deth = struct.pack(">II", GSI_QKEY, 1)
    payload = bth + deth + mad
    udp = struct.pack(">HHHH", 49152, icrc.ROCE_PORT, 8 + len(payload) + 4, 0)
    total = 20 + len(udp) + len(payload) + 4
    ip = bytearray(struct.pack(">BBHHHBBH4s4s", 0x45, 0, total, 0x1234, 0x4000, 64, icrc.UDP, 0, source, dest))
    ip[10:12] = ip_checksum(ip).to_bytes(2, "big")
    packet = bytes(ip) + udp + payload
    return dest_mac + mac(SOURCE_MAC) + b"\x08\x00" + packet + icrc.icrc(packet, 20).to_bytes(4, "little")


def answer(sock, until):
    """The first RoCEv2 packet from someone else, or None."""
    while (left := until - time.monotonic()) > 0:
        sock.settimeout(left)
        try:
            received = sock.recv(9000)
        except TimeoutError:
            return None
        p = icrc.decode(received) if received[6:12] != mac(SOURCE_MAC) else None
        if p:
            return p
    return None


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    source, dest = socket.inet_aton(SOURCE_IP), socket.inet_aton(sys.argv[1])
    port = int(sys.argv[3]) if len(sys.argv) == 4 else 19999
    transaction = os.urandom(8)
    header = struct.pack(">BBBBHH8sHHI", 1, icrc.MAD_CLASS_CM, 2, 3, 0, 0, transaction, REQ, 0, 0)
    mad = header + req(source, dest, port, os.urandom(4))
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    sock.bind((INTERFACE, 0))
    for attempt in range(1, TRIES + 1):
        began = time.monotonic()
        sock.send(frame(source, dest, mac(sys.argv[2]), mad))
        p = answer(sock, began + 1)
        if not p:
            continue
        got = p.body[8:]
        reason = f", reason {int.from_bytes(got[34:36], 'big')}" if p.name == "CM_REJ" else ""
        print(
            f"{p.name}{reason}, on try {attempt} after {1e3 * (time.monotonic() - began):.1f} ms, "
            f"ICRC {'ok' if p.icrc_ok else 'BAD'}, transaction {'same' if got[8:16] == transaction else 'other'}"
        )
        return
    sys.exit("no answer")


main()
