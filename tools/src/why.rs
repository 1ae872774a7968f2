//! Why a connection did not come about, and what to do about it.
//!
//! Owns the words for what the connection manager reports, and asks the path itself when a peer is silent: a closed port
//! and a black hole are different faults. Never changes a connection.

use core::net::{IpAddr, SocketAddr};
use std::time::Duration;

use uroce::device::probe::{ProbeAnswer, UdpProbe};
use uroce::types::{PKey, Psn, QKey, Qpn};
use uroce::wire::{Body, Datagram, Flow, IpFields, Packet, seal, segment_len};
use uroce_cm::id::STATUS_NO_DEVICE;
use uroce_cm::wire::{
    CommunicationId, Drep, MAD_LEN, Mad, MadHeader, Message, PrivateData, RejReason, SidrStatus, TransactionId,
};
use uroce_cm::{EventKind, IdEvent};

/// How long ICMP may take to say something: the kernel needs three seconds to give a neighbour up.
const ICMP_PATIENCE: Duration = Duration::from_millis(3_400);
/// "Don't fragment", alone.
const DF: u16 = 0x4000;

/// The failure of a connection from `from`, an address of this machine, to `peer`, in words.
pub(crate) fn connection(from: Option<IpAddr>, peer: SocketAddr, event: &IdEvent) -> String {
    let name = event.kind.name();
    let status = event.status;
    let tried =
        event.attempt.map_or(String::new(), |a| format!(" after {} tries in {} ms", a.tries, a.elapsed.as_millis()));
    match event.kind {
        // The kernel's verdict, on hardware: our own knows only the other one.
        EventKind::AddrError if status != STATUS_NO_DEVICE => format!(
            "{peer} cannot be reached ({name}, status {status}: {}): nobody answers for that address",
            std::io::Error::from_raw_os_error(status.saturating_neg())
        ),
        EventKind::AddrError => format!(
            "{peer} cannot be reached from this device ({name}, status {status}): the device has no {} address for it; \
             give it one, or choose another --device",
            if peer.is_ipv4() { "IPv4" } else { "IPv6" }
        ),
        EventKind::Unreachable => match event.sidr_status() {
            Some(answer) => format!(
                "{peer} refused the service: status {status} ({}, {name}); {}",
                sidr_name(answer),
                sidr_advice(answer)
            ),
            None => format!("no answer from {peer}{tried} ({name}, status {status}): {}", silence(from, peer.ip())),
        },
        EventKind::Rejected => {
            let reason = event.reason().unwrap_or(RejReason::Unknown(0));
            let said = text(&event.param.private_data);
            let said = if said.is_empty() { String::new() } else { format!("; it says: {said}") };
            format!("{peer} refused the connection: reason {reason}{said}; {}", advice(reason))
        }
        EventKind::ConnectError => format!(
            "{peer}: {name}, status {status}{tried}: what was agreed on does not fit this device (a path MTU beyond the \
             interface's, or more READs than it serves)"
        ),
        _ => format!("{peer}: {name}, status {status}{tried}"),
    }
}

/// Private data as text, if it is any.
pub(crate) fn text(private_data: &[u8]) -> String {
    let said: Vec<u8> = private_data.iter().copied().take_while(|b| *b != 0).collect();
    let printable = said.iter().all(|b| b.is_ascii_graphic() || *b == b' ');
    if printable { String::from_utf8_lossy(&said).into_owned() } else { String::new() }
}

/// Why nothing came back from `peer`, as far as this machine can tell.
pub(crate) fn silence(from: Option<IpAddr>, peer: IpAddr) -> String {
    let answer = from.and_then(|from| ask_port(from, peer, ICMP_PATIENCE).ok());
    match answer {
        Some(ProbeAnswer::PortClosed) => format!(
            "{peer} says that nobody has UDP port 4791 (ICMP port unreachable); start the peer there, and check that it \
             is on this address"
        ),
        Some(ProbeAnswer::NoHost) => format!(
            "nobody answers at {peer} (host unreachable: no ARP or neighbour answer); check the address, the cable and \
             that the peer is up"
        ),
        Some(ProbeAnswer::NoRoute) => {
            format!("there is no way to {peer} (no route, or a firewall that says so); see `ip route get {peer}`")
        }
        Some(ProbeAnswer::TooBig) => format!(
            "a packet of connection management does not fit the path to {peer}, which carries less than 336 bytes; raise \
             the MTU on the way"
        ),
        Some(ProbeAnswer::Silent | ProbeAnswer::Answered(_)) => format!(
            "UDP port 4791 of {peer} is silent, with no ICMP error: a firewall drops RoCEv2 on the way, or the peer has the \
             port and no RoCEv2 endpoint there that answers; try `uroce doctor {peer}`"
        ),
        None => format!("is a RoCEv2 endpoint there? Try `uroce doctor {peer}`"),
    }
}

/// Sends one message that every connection manager ignores to port 4791 of `peer`, and waits for an ICMP error.
pub(crate) fn ask_port(from: IpAddr, peer: IpAddr, patience: Duration) -> std::io::Result<ProbeAnswer> {
    let mut probe = UdpProbe::open(from, SocketAddr::new(peer, Flow::PORT))?;
    let packet = harmless(from, peer, probe.port()?);
    probe.send(&packet, patience)
}

/// A well-formed DREP that answers nothing: whoever gets it has no such connection, and says nothing.
fn harmless(from: IpAddr, peer: IpAddr, src_port: u16) -> Vec<u8> {
    let id = CommunicationId::new(0x7572_6f63);
    let drep = Drep { local_comm_id: id, remote_comm_id: id, private_data: PrivateData::default() };
    let mad = Mad { header: MadHeader::new(TransactionId::new(0x7572_6f63_6500)), message: Message::Drep(drep) }.emit();
    let datagram = Datagram { qkey: QKey::GSI, src_qp: Qpn::GSI, imm: None, payload: &mad };
    let packet = Packet::new(Qpn::GSI, PKey::DEFAULT, Psn::ZERO, Body::Datagram(datagram));
    let header = packet.header_len();
    let mut bytes = vec![0; segment_len(header, MAD_LEN)];
    // A MAD over UD is a packet that the wire has.
    let Some(at) = packet.write_headers(MAD_LEN, &mut bytes) else { return bytes };
    if let Some(place) = bytes.get_mut(at..at + MAD_LEN) {
        place.copy_from_slice(&mad);
    }
    let flow = Flow { src: from, dst: peer, src_port, traffic_class: 0, hop_limit: 64, flow_label: 0, vlan: None };
    seal(&flow, IpFields { id: 0, flags_fragment: DF }, &mut bytes, at + MAD_LEN);
    bytes
}

/// What a SIDR_REP's status is called.
const fn sidr_name(status: SidrStatus) -> &'static str {
    match status {
        SidrStatus::Success => "success",
        SidrStatus::Unsupported => "nobody serves this service id",
        SidrStatus::Rejected => "refused by the application",
        SidrStatus::NoQp => "no QP",
        SidrStatus::Redirect => "ask another port",
        SidrStatus::UnsupportedVersion => "unsupported class version",
        SidrStatus::Unknown(_) => "a status that is not defined",
    }
}

/// What to do about it.
const fn sidr_advice(status: SidrStatus) -> &'static str {
    match status {
        SidrStatus::Unsupported => "start the service there, and check the port and the port space",
        SidrStatus::Rejected => "the application there decides: see its log, its limits and its options",
        SidrStatus::NoQp => "close what uses QPs there, or raise its limit",
        SidrStatus::Redirect => "connect to the port that it names; redirection is not followed",
        SidrStatus::UnsupportedVersion => "the peer speaks another version of connection management; update it",
        SidrStatus::Success | SidrStatus::Unknown(_) => "see the peer's log",
    }
}

/// What to do about a refusal.
pub(crate) const fn advice(reason: RejReason) -> &'static str {
    use RejReason as R;
    match reason {
        R::NoQp | R::NoEec => "close connections there, or raise the limit of QPs",
        R::NoResources => "the peer has too many requests or connections at once: try later, or raise its backlog",
        R::Timeout => "an answer of ours was lost or late: look for packet loss, or try again",
        R::Unsupported => {
            "the peer cannot do what was asked for; leave out what is special (alternate path, EE context)"
        }
        R::InvalidCommId | R::InvalidCommInstance => {
            "the peer has forgotten this connection, perhaps because it was restarted: connect again"
        }
        R::InvalidServiceId => "start the service there, and check its port and port space",
        R::InvalidTransport => "ask for the transport that the service has, RC or UC",
        R::StaleConnection => {
            "the peer still has a connection with this QP number: wait for its time wait, or use another QP"
        }
        R::RdcDoesNotExist => "reliable datagrams are not in use anywhere: ask for RC",
        R::InvalidGid => {
            "the address in the request is not one of the peer's GIDs of that type: check the GID type (RoCE v2, not v1) \
             and index, and which interface the address is on"
        }
        R::InvalidLid => "RoCE has no LIDs: the peer takes this for InfiniBand; check its link layer",
        R::InvalidServiceLevel => "choose another service level",
        R::InvalidTrafficClass => "choose another type of service",
        R::InvalidHopLimit => "raise the hop limit: the peer thinks that the path is longer",
        R::InvalidPacketRate => "choose another packet rate",
        R::InvalidAltGid
        | R::InvalidAltLid
        | R::InvalidAltServiceLevel
        | R::InvalidAltTrafficClass
        | R::InvalidAltHopLimit
        | R::InvalidAltPacketRate
        | R::InvalidAltFlowLabel => "leave the alternate path out, or correct its address",
        R::CmRedirect | R::PortRedirect => "connect to the address that it names; redirection is not followed",
        R::InvalidMtu => "take a smaller path MTU: both sides must be able to carry it (`uroce doctor` finds it)",
        R::InsufficientResponderResources => "ask for fewer READs and atomics at a time",
        R::ConsumerDefined => "the application there decides: see its log, its limits and its options",
        R::InvalidRnrRetry => "choose another number of RNR retries",
        R::DuplicateLocalCommId => "try again: the identifier is in use by an older connection",
        R::InvalidClassVersion => "the peer speaks another version of connection management; update it",
        R::InvalidFlowLabel => "choose another flow label",
        R::VendorOptionNotSupported => "leave options of the vendor out",
        R::Unknown(_) => "see the peer's log",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uroce::wire::check;

    #[test]
    fn every_refusal_says_what_to_do() {
        for reason in RejReason::ALL.iter().copied().chain([RejReason::Unknown(34)]) {
            assert!(advice(reason).len() > 15, "{reason}");
        }
    }

    #[test]
    fn the_packet_that_asks_is_well_formed_and_answers_nothing() {
        for (from, peer) in [("10.0.0.1", "10.0.0.2"), ("fd77::1", "fd77::2")] {
            let (from, peer): (IpAddr, IpAddr) = (from.parse().unwrap(), peer.parse().unwrap());
            let bytes = harmless(from, peer, 50_000);
            let flow = Flow {
                src: from,
                dst: peer,
                src_port: 50_000,
                traffic_class: 0,
                hop_limit: 64,
                flow_label: 0,
                vlan: None,
            };
            assert!(check(&flow, IpFields { id: 0, flags_fragment: DF }, &bytes));
            let packet = Packet::parse(&bytes).unwrap();
            let Body::Datagram(datagram) = packet.body else { panic!("{packet:?}") };
            assert_eq!((packet.dest_qp, datagram.src_qp), (Qpn::GSI, Qpn::GSI));
            assert!(matches!(Mad::parse(datagram.payload).unwrap().message, Message::Drep(_)));
        }
    }

    #[test]
    fn private_data_that_are_text_are_shown() {
        assert_eq!(text(b"no room\0\0\0"), "no room");
        assert_eq!(text(&[1, 2, 3]), "");
    }
}
