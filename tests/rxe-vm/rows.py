"""The rows of the matrix: what runs on each side of a cell, and what must be true at the end.

A row's `run` starts both sides through the Lab of matrix.py and raises Failed, or RxeFault where rxe is the cause and
what happened proves it. `absent` says why a cell does not exist.
"""

import os
import re
import shutil

import icrc

NARROW6 = "IPv6 needs links of 1280 bytes, and only the pingpongs and the operations name a path MTU of their own"


def failed(text):
    import matrix  # pylint: disable=import-outside-toplevel

    return matrix.Failed(text)


def rxe_fault(text):
    import matrix  # pylint: disable=import-outside-toplevel

    return matrix.RxeFault(text)


def batch(cell):
    """Cells with equal keys are decided by one pair of processes."""
    return (cell.row.batch or cell.row.name, cell.role, cell.family, cell.mtu)


class Row:
    """One program."""

    batch = None
    capture = False

    def __init__(self, name):
        self.name = name

    def link_mtu(self, cell):
        """The path MTU that the links shall allow."""
        return 1024 if cell.family == "v6" and cell.mtu == 256 else cell.mtu

    def absent(self, cell):
        return NARROW6 if cell.family == "v6" and cell.mtu == 256 else None

    def run(self, lab, cells):
        raise NotImplementedError


def check_statuses(lab, grace=10):
    host, guest = lab.finish(grace)
    if host != 0:
        raise failed(f"uroce's exit status is {host}")
    if guest != 0:
        raise failed(f"the guest program's exit status is {guest}")


def together(lab, role, host, guest, host_ready, guest_ready, program=None):
    """The server first; the client when it listens."""
    if role == "server":
        lab.start_host(*host, program=program)
        lab.wait_host(host_ready)
        lab.start_guest(guest)
    else:
        lab.start_guest(guest)
        lab.wait_guest(guest_ready)
        lab.start_host(*host, program=program)


def guest_cm(port):
    return f"rdma resource show cm_id 2>/dev/null | grep -q 'state LISTEN.*:{port} '"


def guest_tcp(port):
    return f"ss -ltnH sport = :{port} | grep -q ."


def ping_lines(count, size):
    """What rping puts into its buffer: a header, then ASCII from 65 to 122 in a circle whose start moves on by one each
    time, and a NUL as the last byte."""
    lines = []
    for n in range(count):
        text = f"rdma-ping-{n}: "
        c = 65 + n % 58
        while len(text) < size - 1:
            text += chr(c)
            c = 65 if c == 122 else c + 1
        lines.append(text)
    return lines


OWN = {"v4": "10.77.0.99", "v6": "fd77::99"}
OWN_DEVICE = f"packet:h0,mac=02:77:00:00:00:99,ip={OWN['v4']},ip={OWN['v6']}"


class Ping(Row):
    """rping, `uroce ping`: its exit status is 0 after some failures, its output decides."""

    def __init__(self, name="rping", device="packet:h0", flags=(), only=None):
        super().__init__(name)
        self.device, self.flags, self.only = device, flags, only

    def absent(self, cell):
        return super().absent(cell) or (self.only and self.only(cell))

    def run(self, lab, cells):
        (cell,) = cells
        host4or6, guest_address = lab.addresses(cell.family)
        if self.device == OWN_DEVICE:
            host4or6 = OWN[cell.family]
        count, size, port = 5, 1000, 7200
        server = host4or6 if cell.role == "server" else guest_address
        common = ["-a", server, "-p", str(port), "-C", str(count), "-S", str(size), "-v", "-V"]
        host = ["ping", "-s" if cell.role == "server" else "-c", *common, "--device", self.device, *self.flags]
        guest = f"rping {'-c' if cell.role == 'server' else '-s'} {' '.join(common)}"
        together(lab, cell.role, host, guest, lab.host_packet_socket, guest_cm(port))
        check_statuses(lab)
        for side in ("host", "guest"):
            data = re.findall(r"^(?:server )?ping data: (.*)$", lab.log(side), re.M)
            if data != ping_lines(count, size):
                raise failed(f"{side}: not {count} times the expected ping data")


class Pingpong(Row):
    """The GID decides over the family of the packets; the TCP connection of the exchange is IPv4 in any case."""

    def __init__(self, kind, name=None, flags=(), only=None, more=""):
        super().__init__(name or f"ibv_{kind}_pingpong")
        self.kind, self.flags, self.only, self.more = kind, flags, only, more

    def absent(self, cell):
        if self.kind == "ud":
            return super().absent(cell)
        return self.only and self.only(cell)

    def run(self, lab, cells):
        (cell,) = cells
        common = ["-n", "50", "-c", "-s", str({"ud": min(1000, cell.mtu)}.get(self.kind, 2 * cell.mtu + 900))]
        common += [] if self.kind == "ud" else ["-m", str(cell.mtu)]
        common += ["-q", "4"] if self.kind == "srq" else []
        peer = [lab.guest4] if cell.role == "client" else []
        gid, guest_gid = (0, 1) if cell.family == "v4" else (2, 2)
        host = ["pingpong", self.kind, *peer, "--device", "packet:h0", "-g", str(gid), *common, *self.flags]
        guest = f"ibv_{self.kind}_pingpong -d rxe0 -g {guest_gid} {' '.join(common)}"
        guest += "" if peer else " 10.77.0.100"
        together(lab, cell.role, host, guest, lambda: lab.host_listens_tcp(18515), guest_tcp(18515))
        try:
            check_statuses(lab)
        except Exception as e:
            self.explain(lab, e)
            raise
        for side in ("host", "guest"):
            # The programs' exit status is 0 after a difference found by -c.
            if "invalid data" in lab.log(side).lower():
                raise failed(f"{side}: invalid data")
        if not re.search(r"^\d+ iters in", lab.log("guest"), re.M):
            raise failed("the guest did not do its iterations")

    def explain(self, lab, error):
        """Nothing to explain away."""


RXE_STALL = (
    "rxe's send queue stops for ever when an ACK of the whole message arrives while it repeats that message and the"
    " program's queue holds one work request: the work request completes, and rxe never leaves the place where it was"
    " (capture `pcap-fixtures/captures/odd/rxe_stall.pcap`)"
)


class LostAcks(Pingpong):
    """ACKs of ours are lost too, which now and then stops rxe."""

    capture = True

    def explain(self, lab, error):
        if "nothing came for" not in lab.log("host"):
            return
        if rxe_stalled(lab.stop_capture(), "02:77:00:00:00:64"):
            raise rxe_fault(RXE_STALL) from error


def rxe_stalled(capture, host_mac):
    """Whether the last that rxe sent is a message that it began again and did not end, though an ACK of all of it had
    come after it began: a requester has to go on, with this message or with the next."""
    last_of_message, begun, acked = None, None, False
    for _, frame in icrc.frames(capture):
        p = icrc.decode(frame)
        if not p or not p.name.startswith("RC_"):
            continue
        if p.source_mac == host_mac:
            acked |= begun is not None and p.name == "RC_ACK" and ahead(p.psn, last_of_message)
        elif p.name.startswith("RC_SEND"):
            if p.name in ("RC_SEND_LAST", "RC_SEND_ONLY"):
                last_of_message, begun, acked = p.psn, None, False
            elif last_of_message is not None:
                again = ahead(last_of_message, p.psn)
                begun, acked = (p.psn, acked) if again else (None, False)
    return begun is not None and acked


def ahead(psn, of):
    return (psn - of) & 0xFFFFFF < 0x800000


class Cm(Row):
    """ucmatose, udaddy, cmtime: both sides have the same letters."""

    def __init__(self, program, command, port, arguments, name=None, only=None):
        super().__init__(name or program)
        self.program, self.command, self.port, self.arguments, self.only = program, command, port, arguments, only

    def absent(self, cell):
        return self.only(cell) if self.only else super().absent(cell)

    def run(self, lab, cells):
        (cell,) = cells
        ours, theirs = lab.addresses(cell.family)
        arguments = self.arguments(cell)
        if cell.role == "server":
            ends, guest_ends = ["-b", ours], f"-s {ours}"
        else:
            ends, guest_ends = ["-s", theirs, "-b", ours], f"-b {theirs}"
        host = ["cm", self.command, *ends, "--device", "packet:h0", *arguments]
        guest = f"{self.program} {guest_ends} {' '.join(arguments)}"
        together(lab, cell.role, host, guest, lab.host_packet_socket, guest_cm(self.port))
        self.statuses(lab, cell)
        lab.end()
        self.check(lab)

    def statuses(self, lab, cell):
        check_statuses(lab)

    def check(self, lab):
        if re.search(r"fail|error", lab.log("guest").partition("\n")[2], re.I):
            raise failed("the guest's program speaks of an error")


class Cmtime(Cm):
    """A cmtime that serves never ends."""

    def statuses(self, lab, cell):
        if cell.role == "server":
            check_statuses(lab)
        elif lab.host.wait() != 0:
            raise failed(f"uroce's exit status is {lab.host.wait()}")


class Mckey(Row):
    """The sender waits some seconds after it has joined, in both programs."""

    def absent(self, cell):
        return "Linux's rdma_cm refuses to join an IPv6 group for RoCE v2 (ENOTSUPP)" if cell.family == "v6" else None

    def run(self, lab, cells):
        (cell,) = cells
        ours, theirs = lab.addresses(cell.family)
        group = "239.7.7.7" if cell.family == "v4" else "ff0e::7:7"
        common = ["-m", group, "-S", "100"]
        send = cell.role == "client"
        host = ["cm", "multicast", *common, "-C", "5" if send else "1", "-b", ours, "--device", "packet:h0"]
        host += ["-s", "--settle", "1"] if send else []
        guest = f"mckey {' '.join(common)} -C {5 if send else 1000} -b {theirs}"
        if not send:
            # A mckey that sends does not wait until it has sent. With 6.12 it happens that nothing at all has left when its
            # QP is gone: of three runs one leaves something.
            guest = f"sh -c '{guest} -s; {guest} -s; {guest} -s'"
        # A receiver's membership, not a listener, shows that it is there.
        joined = "rdma resource show qp 2>/dev/null | grep -q 'type UD'"
        together(lab, "client" if send else "server", host, guest, lab.host_packet_socket, joined)
        check_statuses(lab, grace=20)


# ---- operations


RXE_FLUSH = (
    "rxe computes the ICRC of a FLUSH over the headers twice, so that no other implementation's fits (capture"
    " `pcap-fixtures/captures/odd/rxe_flush.pcap`; the rows below it speak rxe's ICRC)"
)
NO_FLUSH = "rxe of kernel 6.1 has neither FLUSH nor ATOMIC WRITE"


class Op(Row):
    """A test of ops.c and ops_peer; one pair of processes goes through all of them."""

    batch = "ops"
    flags = ()

    def __init__(self, test, newer=False):
        super().__init__(f"ops {test}")
        self.test, self.newer = test, newer

    def absent(self, cell):
        return NO_FLUSH if self.newer and cell.kernel == "6.1" else None

    def run(self, lab, cells):
        first = cells[0]
        tests = [c.row.test for c in cells]
        gid, guest_gid = (0, 1) if first.family == "v4" else (2, 2)
        client = ["-a", lab.guest4] if first.role == "client" else []
        host = [first.role, "h0", *client, "-g", str(gid), "-M", str(first.mtu), *self.flags, *tests]
        guest = "ops server" if client else "ops client -a 10.77.0.100"
        guest = f"{guest} -g {guest_gid} -M {first.mtu} {' '.join(tests)}"
        self.before(lab)
        try:
            program = os.environ.get("OPS_PEER") or lab_program("ops_peer")
            ready = lambda: lab.host_listens_tcp(18516)  # pylint: disable=unnecessary-lambda-assignment
            together(lab, first.role, host, guest, ready, guest_tcp(18516), program=program)
            lab.finish()
        finally:
            self.after(lab)
        for cell in cells:
            self.judge(lab, cell)

    def before(self, lab):
        """Set-up in the guest."""

    def after(self, lab):
        """Undoes `before`."""

    def judge(self, lab, cell):
        said = {
            side: re.findall(rf"^{re.escape(cell.row.test)} (.*)$", lab.log(side), re.M) for side in ("host", "guest")
        }
        wrong = [f"{side}: {' '.join(lines) or 'says nothing'}" for side, lines in said.items() if lines != ["ok"]]
        if wrong:
            import matrix  # pylint: disable=import-outside-toplevel

            matrix.report_failure(lab, cell, "; ".join(wrong))


def lab_program(name):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return os.path.join(root, "target/release", name)


class FlushOp(Op):
    """FLUSH with the ICRC of IBTA, to an rxe that takes another for right: it must stay without any answer. The other way
    round rxe's FLUSH is not ours to answer; what is looked at is the same."""

    batch = "flush"

    def __init__(self):
        super().__init__("flush", newer=True)

    def judge(self, lab, cell):
        requester = lab.log("host" if cell.role == "client" else "guest")
        # uroce's words for it, and those of ops.c: rxe as requester never ends with 7 retries.
        if re.search(r"^flush FAIL .*(RetryExceeded|no completion|retry exceeded)", requester, re.M):
            cell.why = RXE_FLUSH
            cell.say("r", f"rxe {cell.name}")
            return
        raise failed(f"a FLUSH did not stay unanswered: does rxe compute its ICRC rightly now? {requester}")


class RxeFlushOp(Op):
    """The same with rxe's ICRC at uroce's side."""

    batch = "rxe-flush"
    flags = ("--rxe-flush",)

    def __init__(self, test):
        super().__init__(test, newer=True)
        self.name = f"ops {test}, rxe's ICRC"


class NetemOp(Op):
    """What the guest sends goes through netem."""

    batch = None

    def __init__(self, name, netem, flags=()):
        super().__init__("rounds")
        self.name, self.netem, self.flags = name, netem, flags

    def absent(self, cell):
        return once(cell)

    def before(self, lab):
        said, status = lab.sh(f"tc qdisc add dev eth0 root netem {self.netem}")
        if status:
            raise failed(f"netem: {said}")

    def after(self, lab):
        lab.sh("tc qdisc del dev eth0 root")


class Perf(Row):
    """uroce on both sides: in the guest over its virtio interface, with a MAC and addresses of its own beside rxe, which
    never gives UDP 4791 back."""

    def __init__(self, operation, what):
        super().__init__(f"perf {operation} {what}, uroce in the guest")
        self.operation, self.what = operation, what

    def absent(self, cell):
        return None if (cell.mtu, cell.kernel) == (4096, "6.12") else "no rxe takes part: once is enough"

    def run(self, lab, cells):
        (cell,) = cells
        ours = lab.addresses(cell.family)[0]
        own = {"v4": f"10.77.0.20{lab.number}", "v6": f"fd77::20{lab.number}"}
        device = f"packet:eth0,mac=02:77:00:00:01:0{lab.number},ip={own['v4']},ip={own['v6']}"
        share = os.path.join(os.path.dirname(os.path.dirname(lab.logs)), "share", "uroce")
        program = os.environ.get("UROCE") or lab_program("uroce")
        if not os.path.exists(share) or os.path.getmtime(share) < os.path.getmtime(program):
            shutil.copy2(program, share + ".new")
            os.replace(share + ".new", share)
        size = [] if self.operation == "atomic" else ["-s", "8192" if self.what == "bw" else "64"]
        common = ["perf", self.operation, self.what, "-n", "100", *size, "-u", "17"]
        gid = {"v4": "0", "v6": "2"}[cell.family]
        host = [*common, "-d", "packet:h0", "-x", gid, *([own[cell.family]] if cell.role == "client" else [])]
        own_gid = {"v4": "0", "v6": "1"}[cell.family]
        guest = f"/host/uroce {' '.join(common)} -d {device} -x {own_gid}{'' if cell.role == 'client' else ' ' + ours}"
        bound = "[ $(wc -l </proc/net/packet) -gt 1 ]"
        together(lab, cell.role, host, guest, lab.host_packet_socket, bound)
        check_statuses(lab)


def once(cell):
    """Rows about uroce's side of the link: one path MTU shows it."""
    return None if cell.mtu == 1024 else "one path MTU shows it"


def once_v4(cell):
    return once(cell) or (None if cell.family == "v4" else "one family shows it")


def faults(*rules):
    return [word for rule in rules for word in ("--fault", rule)]


ROWS = [
    Ping(),
    Cm("ucmatose", "connect", 7471, lambda cell: ["-c", "3", "-C", "4", "-S", str(2 * cell.mtu + 100)]),
    Cm("udaddy", "datagram", 7174, lambda cell: ["-c", "2", "-C", "4", "-S", "100"]),
    Cmtime("cmtime", "time", 7471, lambda cell: ["-c", "40"]),
    Cmtime("cmtime", "time", 7471, lambda cell: ["-c", "300"], name="cmtime, 300 REQs at once", only=once),
    Mckey("mckey"),
    Pingpong("rc"),
    Pingpong("uc"),
    Pingpong("ud"),
    Pingpong("srq"),
    *[
        Op(test)
        for test in (
            "send send-imm send-0 send-sge32 send-inv write write-imm write-0 read read-0 read-sge32 cmp-swap fetch-add"
            " bad-key-write bad-key-read bad-key-atomic bad-range-write bad-range-read bad-range-atomic bad-range-wrap"
            " no-right-write no-right-read no-right-atomic too-long rnr rnr-exhausted retry-exhausted rounds psn-wrap"
        ).split()
    ],
    Op("atomic-write", newer=True),
    Op("bad-key-atomic-write", newer=True),
    FlushOp(),
    RxeFlushOp("flush"),
    RxeFlushOp("flush-region"),
    RxeFlushOp("bad-key-flush"),
    NetemOp("netem loss 3 %", "loss 3%"),
    NetemOp("netem reorder", "delay 2ms reorder 70% 50%"),
    NetemOp("netem duplicate", "duplicate 20%"),
    NetemOp("netem loss 2 %, ours 2 %", "loss 2%", flags=("--loss", "0.02")),
    Pingpong(
        "rc",
        name="ibv_rc_pingpong, lost packets",
        flags=faults("drop:send-middle:every=25", *[f"drop:ack:{n}:in" for n in range(4, 40, 5)]),
        only=once_v4,
    ),
    LostAcks(
        "rc",
        name="ibv_rc_pingpong, lost ACKs",
        flags=[*faults("drop:send-middle:every=25", *[f"drop:ack:{n}" for n in range(9, 40, 9)]), "--patience", "4"],
        only=once_v4,
    ),
    Ping("rping, lost packets", flags=faults("drop:read-resp-only:2", "drop:rtu:1", "drop:write-only:3", "drop:ack:9"), only=once_v4),
    Ping("rping, own MAC", device=OWN_DEVICE, only=once),
    Ping("rping, pnet", device="pnet:h0", only=once_v4),
    *[Perf(op, what) for op, what in (("send", "bw"), ("write", "bw"), ("read", "bw"), ("atomic", "bw"), ("send", "lat"))],
]
