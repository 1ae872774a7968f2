//! Names of packets: one for each opcode, ACKs by their syndrome, CM messages by their attribute.
//!
//! Owns the vocabulary of the `opcodes` counts, which is that of the fixtures' index. Never counts.

use uroce::wire::{
    Body, NakCode, Packet, Place, Request, RequestOp, Response, ResponseOp, SendTail, Service, Syndrome, WritePart,
};

/// The name of `packet`, such as `RC_SEND_ONLY_IMM` or `RC_ACK:RNR_NAK`.
pub(super) fn of_packet(packet: &Packet<'_>) -> String {
    match &packet.body {
        Body::Request(request) => of_request(request),
        Body::Response(response) => of_response(response),
        Body::Datagram(datagram) if datagram.imm.is_some() => "UD_SEND_ONLY_IMM".into(),
        Body::Datagram(_) => "UD_SEND_ONLY".into(),
        Body::Cnp => "CNP".into(),
    }
}

fn of_request(request: &Request<'_>) -> String {
    let service = match request.service {
        Service::Rc => "RC",
        Service::Uc => "UC",
    };
    let (operation, place, tail) = match request.op {
        RequestOp::Send(place, tail) => {
            let tail = match tail {
                SendTail::None => "",
                SendTail::Imm(_) => "_IMM",
                SendTail::Invalidate(_) => "_INV",
            };
            ("SEND", place, tail)
        }
        RequestOp::Write(part) => ("WRITE", part.place(), write_tail(&part)),
        RequestOp::Read(_) => return format!("{service}_READ_REQUEST"),
        RequestOp::CompareSwap(_) => return format!("{service}_CMP_SWAP"),
        RequestOp::FetchAdd(_) => return format!("{service}_FETCH_ADD"),
        RequestOp::Flush(..) => return format!("{service}_FLUSH"),
        RequestOp::AtomicWrite(_) => return format!("{service}_ATOMIC_WRITE"),
    };
    let place = match place {
        Place::First => "FIRST",
        Place::Middle => "MIDDLE",
        Place::Last => "LAST",
        Place::Only => "ONLY",
    };
    format!("{service}_{operation}_{place}{tail}")
}

const fn write_tail(part: &WritePart) -> &'static str {
    if part.imm().is_some() { "_IMM" } else { "" }
}

fn of_response(response: &Response<'_>) -> String {
    match response.op {
        ResponseOp::ReadFirst(_) => "RC_READ_RESP_FIRST".into(),
        ResponseOp::ReadMiddle => "RC_READ_RESP_MIDDLE".into(),
        ResponseOp::ReadLast(_) => "RC_READ_RESP_LAST".into(),
        ResponseOp::ReadOnly(_) => "RC_READ_RESP_ONLY".into(),
        ResponseOp::AtomicAcknowledge(..) => "RC_ATOMIC_ACK".into(),
        ResponseOp::Acknowledge(aeth) => match aeth.syndrome {
            Syndrome::Ack { .. } => "RC_ACK".into(),
            Syndrome::RnrNak(_) => "RC_ACK:RNR_NAK".into(),
            Syndrome::Nak(code) => format!("RC_ACK:{}", of_nak(code)),
            Syndrome::Reserved(byte) => format!("RC_ACK:RESERVED_{byte:02X}"),
        },
    }
}

const fn of_nak(code: NakCode) -> &'static str {
    match code {
        NakCode::PsnSequenceError => "NAK_PSN_SEQ",
        NakCode::InvalidRequest => "NAK_INV_REQ",
        NakCode::RemoteAccessError => "NAK_REM_ACCESS",
        NakCode::RemoteOperationalError => "NAK_REM_OP",
        NakCode::InvalidRdRequest => "NAK_INV_RD_REQ",
    }
}
