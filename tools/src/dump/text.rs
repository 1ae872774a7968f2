//! Packets as text: the rest of the one line, and all fields.
//!
//! Owns wording. Never counts and never prints.

use core::fmt::Write as _;

use uroce::wire::{
    Aeth, AtomicEth, Body, Datagram, Packet, Request, RequestOp, Response, ResponseOp, Reth, SendTail, Syndrome,
    WritePart,
};

/// Bytes of payload on one line of a hex dump.
const HEX_LINE: usize = 16;

/// What follows the packet's name on its line.
pub(super) fn one_line(packet: &Packet<'_>) -> String {
    let mut text = format!("qp {} psn {}", packet.dest_qp, packet.psn);
    if packet.solicited {
        text.push_str(" SE");
    }
    if packet.ack_req {
        text.push_str(" A");
    }
    if packet.fecn {
        text.push_str(" FECN");
    }
    if packet.becn {
        text.push_str(" BECN");
    }
    for (name, value) in extended(&packet.body) {
        let _ = write!(text, " {name} {value}"); // Writing to a string cannot fail.
    }
    if let Some(payload) = payload(&packet.body) {
        let _ = write!(text, " len {}", payload.len());
    }
    text
}

/// All header fields by name, BTH first.
pub(super) fn fields(packet: &Packet<'_>) -> Vec<(&'static str, String)> {
    let bit = |b: bool| u8::from(b).to_string();
    let mut all = vec![
        ("solicited", bit(packet.solicited)),
        ("mig_req", bit(packet.mig_req)),
        ("pkey", packet.pkey.to_string()),
        ("fecn", bit(packet.fecn)),
        ("becn", bit(packet.becn)),
        ("reserved", format!("{:#04x} {:#04x}", packet.reserved.0, packet.reserved.1)),
        ("dest_qp", packet.dest_qp.to_string()),
        ("ack_req", bit(packet.ack_req)),
        ("psn", packet.psn.to_string()),
    ];
    all.extend(extended(&packet.body));
    if let Some(payload) = payload(&packet.body) {
        all.push(("payload_bytes", payload.len().to_string()));
    }
    all
}

/// The payload, of packets that may have one.
pub(super) const fn payload<'a>(body: &Body<'a>) -> Option<&'a [u8]> {
    match body {
        Body::Request(Request {
            op: RequestOp::Read(_) | RequestOp::CompareSwap(_) | RequestOp::FetchAdd(_) | RequestOp::Flush(..),
            ..
        })
        | Body::Response(Response { op: ResponseOp::Acknowledge(_) | ResponseOp::AtomicAcknowledge(..), .. })
        | Body::Cnp => None,
        Body::Request(r) => Some(r.payload),
        Body::Response(r) => Some(r.payload),
        Body::Datagram(d) => Some(d.payload),
    }
}

/// Payload as lines of offset, hex and text.
pub(super) fn hex_lines(bytes: &[u8]) -> impl Iterator<Item = String> {
    bytes.chunks(HEX_LINE).enumerate().map(|(i, line)| {
        let mut hex = String::new();
        for byte in line {
            let _ = write!(hex, "{byte:02x} ");
        }
        let text: String =
            line.iter().map(|b| if b.is_ascii_graphic() || *b == b' ' { char::from(*b) } else { '.' }).collect();
        format!("{:04x}  {hex:<48} {text}", i * HEX_LINE)
    })
}

/// The fields of the extended headers.
fn extended(body: &Body<'_>) -> Vec<(&'static str, String)> {
    match body {
        Body::Request(request) => of_request(&request.op),
        Body::Response(response) => of_response(&response.op),
        Body::Datagram(Datagram { qkey, src_qp, imm, .. }) => {
            let mut all = vec![("src_qp", src_qp.to_string()), ("qkey", qkey.to_string())];
            all.extend(imm.map(|i| ("imm", i.to_string())));
            all
        }
        Body::Cnp => Vec::new(),
    }
}

fn of_request(op: &RequestOp) -> Vec<(&'static str, String)> {
    match op {
        RequestOp::Send(_, SendTail::None) => Vec::new(),
        RequestOp::Send(_, SendTail::Imm(imm)) => vec![("imm", imm.to_string())],
        RequestOp::Send(_, SendTail::Invalidate(rkey)) => vec![("invalidate", rkey.to_string())],
        RequestOp::Write(part) => {
            let mut all = match part {
                WritePart::First(r) | WritePart::Only(r, _) => reth(r),
                WritePart::Middle | WritePart::Last(_) => Vec::new(),
            };
            all.extend(part.imm().map(|i| ("imm", i.to_string())));
            all
        }
        RequestOp::Read(r) | RequestOp::AtomicWrite(r) => reth(r),
        RequestOp::Flush(f, r) => {
            let mut all = vec![("placement", f.placement.to_string()), ("selectivity", f.scope.to_string())];
            all.extend(reth(r));
            all
        }
        RequestOp::CompareSwap(a) => atomic(a, "swap", true),
        RequestOp::FetchAdd(a) => atomic(a, "add", false),
    }
}

fn reth(r: &Reth) -> Vec<(&'static str, String)> {
    vec![("va", format!("{:#x}", r.addr)), ("rkey", r.rkey.to_string()), ("dma_len", r.length.to_string())]
}

fn atomic(a: &AtomicEth, operand: &'static str, compare: bool) -> Vec<(&'static str, String)> {
    let mut all =
        vec![("va", format!("{:#x}", a.addr)), ("rkey", a.rkey.to_string()), (operand, format!("{:#x}", a.swap_add))];
    if compare {
        all.push(("compare", format!("{:#x}", a.compare)));
    }
    all
}

fn of_response(op: &ResponseOp) -> Vec<(&'static str, String)> {
    match op {
        ResponseOp::ReadMiddle => Vec::new(),
        ResponseOp::ReadFirst(a) | ResponseOp::ReadLast(a) | ResponseOp::ReadOnly(a) | ResponseOp::Acknowledge(a) => {
            aeth(a)
        }
        ResponseOp::AtomicAcknowledge(a, original) => {
            let mut all = aeth(a);
            all.push(("original", format!("{original:#x}")));
            all
        }
    }
}

fn aeth(a: &Aeth) -> Vec<(&'static str, String)> {
    let syndrome = match a.syndrome {
        Syndrome::Ack { credits: 31 } => "ACK".into(),
        Syndrome::Ack { credits } => format!("ACK(credits {credits})"),
        Syndrome::RnrNak(timer) => format!("RNR_NAK({} us)", timer.duration().as_micros()),
        Syndrome::Nak(code) => format!("NAK({code:?})"),
        Syndrome::Reserved(byte) => format!("reserved({byte:#04x})"),
    };
    vec![("syndrome", syndrome), ("msn", a.msn.get().to_string())]
}
