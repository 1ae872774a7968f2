//! perftest's text layout, so that scripts that read perftest read this.
//!
//! Owns column widths and words. Never measures.

use core::fmt::Write as _;

use uroce::types::{Gid, Psn, Qpn};
use uroce::verbs::Remote;

use super::args::{Direction, Operation, PerfArgs, Unit};
use crate::device_arg::DeviceArg;
use crate::stats::{Bandwidth, Latency};

/// perftest's ruler.
pub(super) const RULER: &str =
    "---------------------------------------------------------------------------------------";

/// One end of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    /// QP.
    pub qpn: Qpn,
    /// First PSN that this end sends.
    pub psn: Psn,
    /// Address.
    pub gid: Gid,
    /// Memory that the other end may reach, for one-sided operations.
    pub memory: Option<Remote>,
}

/// The lines above the table.
pub(super) fn preamble(args: &PerfArgs, device: &str, gid_index: u8, mtu: usize) -> String {
    let mut text = String::new();
    let mut line = |t: &str| {
        text.push_str(t);
        text.push('\n');
    };
    line(RULER);
    line(&format!("                    {}", title(args)));
    line(&format!(" Dual-port       : OFF\t\tDevice         : {device}"));
    line(&format!(" Number of qps   : {}\t\tTransport type : IB", args.qps));
    line(" Connection type : RC\t\tUsing SRQ      : OFF");
    line(" PCIe relax order: OFF");
    line(" ibv_wr* API     : OFF");
    if args.host.is_some() || args.device == Some(DeviceArg::Loop) {
        line(&format!(" TX depth        : {}", args.depth()));
    } else if args.operation == Operation::Send {
        line(&format!(" RX depth        : {}", args.rx_depth));
    }
    if args.direction == Direction::Bw {
        line(&format!(" CQ Moderation   : {}", args.moderation()));
    }
    line(&format!(" Mtu             : {mtu}[B]"));
    line(" Link type       : Ethernet");
    line(&format!(" GID index       : {gid_index}"));
    if args.operation.is_one_sided_fetch() {
        line(&format!(" Outstand reads  : {}", args.outstanding_reads()));
    } else {
        line(&format!(" Max inline data : {}[B]", args.inline));
    }
    line(" rdma_cm QPs\t : ON");
    line(" Data ex. method : rdma_cm");
    text.push_str(RULER);
    text
}

/// perftest's name of the test.
pub(super) fn title(args: &PerfArgs) -> String {
    let operation = match args.operation {
        Operation::Send => "Send".to_owned(),
        Operation::Write => "RDMA_Write".to_owned(),
        Operation::Read => "RDMA_Read".to_owned(),
        Operation::Atomic => format!("Atomic {}", args.atomic.name()),
    };
    match args.direction {
        Direction::Bw if args.bidirectional => format!("{operation} Bidirectional BW Test"),
        Direction::Bw => format!("{operation} BW Test"),
        Direction::Lat => format!("{operation} Latency Test"),
    }
}

/// The address of one end: `side` is `local` or `remote`.
pub(super) fn address(side: &str, end: &End) -> String {
    let mut text = format!(" {side} address: LID 0000 QPN {:#06x} PSN {:#x}", end.qpn.get(), end.psn.get());
    if let Some(memory) = end.memory {
        let _ = write!(text, " RKey {:#08x} VAddr {:#016x}", memory.rkey.get(), memory.addr);
    }
    // perftest writes the bytes of a GID in decimal.
    let gid: Vec<String> = end.gid.to_bytes().iter().map(|b| format!("{b:02}")).collect();
    let _ = write!(text, "\n GID: {}", gid.join(":"));
    text
}

/// Heads the columns.
pub(super) const fn header(direction: Direction, unit: Unit, timed: bool) -> &'static str {
    match (direction, unit, timed) {
        (Direction::Bw, Unit::MiB, _) => {
            " #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]"
        }
        (Direction::Bw, Unit::Gbit, _) => {
            " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]"
        }
        (Direction::Lat, _, false) => concat!(
            " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]",
            "   99% percentile[usec]   99.9% percentile[usec] "
        ),
        (Direction::Lat, _, true) => " #bytes        #iterations       t_avg[usec]    tps average",
    }
}

/// A row of a bandwidth table.
pub(super) fn bandwidth_row(b: &Bandwidth, unit: Unit) -> String {
    let (peak, average) = (unit.of(b.peak), unit.of(b.average));
    format!(
        " {:<7}    {:<10}       {peak:<7.2}            {average:<7.2}\t\t   {:<7.6}",
        b.size,
        b.iterations,
        b.messages_per_second / 1e6
    )
}

/// A row of a latency table.
pub(super) fn latency_row(l: &Latency) -> String {
    format!(
        " {:<7} {}          {:<7.2}        {:<7.2}      {:<7.2}  \t       {:<7.2}     \t{:<7.2}\t\t{:<7.2} \t\t{:<7.2}",
        l.size, l.iterations, l.min, l.max, l.typical, l.average, l.deviation, l.p99, l.p999
    )
}

/// A row of a latency table that was measured for a time.
pub(super) fn timed_latency_row(l: &Latency) -> String {
    format!(" {:<7}       {}            {:<7.2}        {:<7.2}", l.size, l.iterations, l.average, l.per_second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stand_where_perftest_writes_them() {
        // Taken from what perftest 4.5 printed beside the captures ib_send_bw_cm and ib_send_lat.
        let bandwidth =
            Bandwidth { size: 5000, iterations: 5, peak: 0.0, average: 2.22 * 1_048_576.0, messages_per_second: 465.0 };
        let row = bandwidth_row(&bandwidth, Unit::MiB);
        assert_eq!(row, " 5000       5                0.00               2.22   \t\t   0.000465");
        let latency = Latency {
            size: 8,
            iterations: 10,
            min: 4984.81,
            max: 9369.63,
            typical: 7206.34,
            average: 7263.06,
            deviation: 1350.30,
            p90: 9369.63,
            p99: 9369.63,
            p999: 9369.63,
            per_second: 0.0,
        };
        assert_eq!(
            latency_row(&latency),
            " 8       10          4984.81        9369.63      7206.34  \t       7263.06     \t1350.30\t\t9369.63 \t\t9369.63"
        );
    }

    #[test]
    fn a_gid_is_written_in_decimal() {
        let end = End {
            qpn: Qpn::from_wire(0x48),
            psn: Psn::from_wire(0x78_be57),
            gid: Gid::from(core::net::Ipv4Addr::new(10, 77, 0, 1)),
            memory: None,
        };
        assert_eq!(
            address("local", &end),
            " local address: LID 0000 QPN 0x0048 PSN 0x78be57\n GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:77:00:01"
        );
    }
}
