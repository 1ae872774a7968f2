//! What a QP can be asked for that the verbs have no attribute for.

use crate::time::Duration;
use crate::types::RnrTimer;

/// Whose packets a connected QP looks at, by their IP source address. The destination must always be the QP's own
/// address. A packet refused here is dropped and counted ([`crate::counters::DropReason::AddressMismatch`]), and never
/// moves the QP: RoCEv2 has no authentication, so this is what keeps strangers from a QP whose number they guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SourceCheck {
    /// The peer's GID, that of the primary or of a loaded alternate path. What Linux's rxe and hardware do.
    #[default]
    Strict,
    /// Any address of the peer's subnet: for peers that answer from another of their addresses. Answers still go to the
    /// peer's GID.
    Subnet {
        /// Prefix length for IPv4, 0 to 32; longer ones count as 32.
        ipv4: u8,
        /// Prefix length for IPv6, 0 to 128; longer ones count as 128.
        ipv6: u8,
    },
    /// Any address at all. For analysers and tests.
    Off,
}

/// Whose packets a connected QP looks at, by their UDP source port. Dropped packets count as
/// [`crate::counters::DropReason::SourcePortMismatch`] and never move the QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SourcePortCheck {
    /// Any port: peers may spread one connection over several, and may change it.
    #[default]
    Any,
    /// The port of the first packet that was in sequence; learned anew with each path. Only for peers that send requests
    /// and answers of a connection from one port (rxe does).
    First,
    /// This port.
    Only(u16),
}

/// Options of a QP: what is ours rather than the verbs'. They hold from the next packet on, in any state, and survive a
/// reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpOptions {
    /// The MigReq bit of what is sent. `None` takes what IBTA Vol 1 17.2.8 asks for: 1 in the state MIGRATED, which every
    /// QP is in until a program loads an alternate path, else 0. Some hardware misbehaves with 0; Linux's rxe always sends
    /// 0 and ignores what it gets.
    pub mig_req: Option<bool>,
    /// By source address.
    pub source_check: SourceCheck,
    /// By UDP source port.
    pub source_port_check: SourcePortCheck,
    /// Bytes of READs accepted and not yet answered. A READ beyond it is answered "receiver not ready", and comes again
    /// after our RNR timer; a repeat beyond it is dropped, and comes again when the peer misses it; one that stands alone is
    /// always served. Bounds what a few small requests make us send.
    pub max_read_bytes: u64,
    /// Advertise end-to-end credits: how many receives wait, in every acknowledgement (IBTA Vol 1 9.7.7.2). Not on a QP
    /// with a shared receive queue, whose receives are promised to nobody. Off, we say "no credits" (31), as rxe does.
    /// Credits that a peer advertises are respected in any case.
    pub credits: bool,
    /// Let the advertised RNR timer grow while the receive queue stays empty, up to this one, and shrink to
    /// `min_rnr_timer` again when a repeat finds a receive. `None`: always `min_rnr_timer`.
    pub rnr_timer_max: Option<RnrTimer>,
    /// How long a request may be refused "receiver not ready" before it fails with
    /// [`crate::verbs::WcStatus::RnrRetryExceeded`], whatever RNR retries are left. Looked at when a refusal arrives, so it
    /// may be exceeded by one of the peer's timers. `None`: only `rnr_retry` counts.
    pub max_rnr_wait: Option<Duration>,
    /// Tell the peer, by a congestion notification packet (CNP), that the network marked its packets: at most once in this
    /// time. 50 us is usual in papers, 4 us in hardware. Connected QPs only. `None`: never, as rxe, which does not know
    /// such packets.
    pub cnp_interval: Option<Duration>,
    /// Bytes that an RC QP may have unacknowledged, those included that its READs asked for; at least one packet or READ
    /// request goes. What a receiver's buffers hold is a good value: more is lost when the receiver looks away. Counts from
    /// the next change to RTS on. `None`: only packets are counted ([`crate::qp::MAX_UNACKED`]).
    pub max_in_flight: Option<u64>,
}

/// The default of [`QpOptions::max_read_bytes`]: two of the longest messages.
pub const MAX_READ_BYTES: u64 = 4 << 30;

impl Default for QpOptions {
    fn default() -> Self {
        Self {
            mig_req: None,
            source_check: SourceCheck::Strict,
            source_port_check: SourcePortCheck::Any,
            max_read_bytes: MAX_READ_BYTES,
            credits: false,
            rnr_timer_max: None,
            max_rnr_wait: None,
            cnp_interval: None,
            max_in_flight: None,
        }
    }
}
