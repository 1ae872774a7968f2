//! From the bytes behind the UDP header to a packet with its name, ICRC verdict and CM message.
//!
//! Owns nothing of the wire format: it asks the stack and the connection manager. Never prints.

use uroce::types::Qpn;
use uroce::wire::{Body, Packet, ParseError};
use uroce_cm::wire::Mad;

use super::names;
use super::outer::Envelope;

/// A packet that could be parsed.
pub(super) struct Decoded<'a> {
    /// Its headers and payload.
    pub packet: Packet<'a>,
    /// Its name; a CM message goes by its attribute.
    pub name: String,
    /// Whether the ICRC at its end is the one that its bytes have.
    pub icrc_right: bool,
    /// What its payload is.
    pub content: Content,
}

/// What the payload of a packet is.
pub(super) enum Content {
    /// Bytes of the user.
    Data,
    /// A message of connection management.
    Cm(Box<Mad>),
    /// To QP 1, and yet no message of connection management: the reason.
    NoCm(String),
}

/// Reads what stands between UDP header and Ethernet trailer.
pub(super) fn decode<'a>(envelope: &Envelope<'a>) -> Result<Decoded<'a>, ParseError> {
    let packet = Packet::parse(envelope.bytes)?;
    let icrc_right = uroce::wire::check(&envelope.flow, envelope.ids, envelope.bytes);
    let content = match &packet.body {
        Body::Datagram(datagram) if packet.dest_qp == Qpn::GSI => match Mad::parse(datagram.payload) {
            Ok(mad) => Content::Cm(Box::new(mad)),
            Err(why) => Content::NoCm(why.to_string()),
        },
        _ => Content::Data,
    };
    let name = match &content {
        Content::Cm(mad) => format!("CM_{}", mad.message.kind()),
        Content::Data | Content::NoCm(_) => names::of_packet(&packet),
    };
    Ok(Decoded { packet, name, icrc_right, content })
}

/// The QPs that the packet itself names.
pub(super) fn qps(packet: &Packet<'_>) -> impl Iterator<Item = u32> {
    let source = match &packet.body {
        Body::Datagram(datagram) => Some(datagram.src_qp),
        _ => None,
    };
    core::iter::once(packet.dest_qp).chain(source).map(Qpn::get)
}
