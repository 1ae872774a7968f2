//! Messages of connection management as text.
//!
//! Owns wording. Never parses: the connection manager's crate does.

use uroce_cm::wire::{IpHeader, Mad, Message, Rej, Rep, Req};

type Fields = Vec<(&'static str, String)>;

/// What follows a CM message on its line: who connects to what, and the numbers that both sides must agree on.
pub(super) fn one_line(mad: &Mad) -> String {
    let mut words = Vec::new();
    if let Some(id) = mad.message.local_comm_id() {
        words.push(format!("from {id}"));
    }
    if let Some(id) = mad.message.remote_comm_id() {
        words.push(format!("to {id}"));
    }
    match &mad.message {
        Message::Req(m) => {
            words.push(format!("service {}", m.service_id));
            words.push(format!("QPN {} PSN {}", m.local_qpn, m.starting_psn));
            words.push(format!("retry {} rnr {}", m.retry_count, m.rnr_retry_count));
        }
        Message::Rep(m) => words.push(format!("QPN {} PSN {}", m.local_qpn, m.starting_psn)),
        Message::Rej(m) => words.push(format!("reason {}: {}", m.reason.code(), m.reason.describe())),
        Message::Dreq(m) => words.push(format!("QPN {}", m.remote_qpn)),
        Message::Mra(m) => words.push(format!("wait {:?}", m.service_timeout.duration())),
        Message::SidrReq(m) => words.push(format!("request {:#010x} service {}", m.request_id, m.service_id)),
        Message::SidrRep(m) => words.push(format!("request {:#010x} {:?} QPN {}", m.request_id, m.status, m.qpn)),
        Message::Lap(m) => words.push(format!("path {} > {}", m.local_gid, m.remote_gid)),
        Message::Apr(m) => words.push(format!("{:?}", m.status)),
        Message::Rtu(_) | Message::Drep(_) => {}
    }
    words.join(" ")
}

/// All fields of a CM message.
pub(super) fn fields(mad: &Mad) -> Fields {
    let mut all = vec![("cm_transaction", mad.header.transaction_id.to_string())];
    all.extend(mad.message.local_comm_id().map(|id| ("cm_local_id", id.to_string())));
    all.extend(mad.message.remote_comm_id().map(|id| ("cm_remote_id", id.to_string())));
    match &mad.message {
        Message::Req(m) => all.extend(req(m)),
        Message::Rep(m) => all.extend(rep(m)),
        Message::Rej(m) => all.extend(rej(m)),
        Message::Mra(m) => {
            all.push(("cm_message", format!("{:?}", m.message)));
            all.push(("cm_service_timeout", format!("{:?}", m.service_timeout.duration())));
            all.push(private(m.private_data.as_bytes()));
        }
        Message::Rtu(m) => all.push(private(m.private_data.as_bytes())),
        Message::Dreq(m) => {
            all.push(("cm_remote_qpn", m.remote_qpn.to_string()));
            all.push(private(m.private_data.as_bytes()));
        }
        Message::Drep(m) => all.push(private(m.private_data.as_bytes())),
        Message::SidrReq(m) => {
            all.push(("cm_request_id", format!("{:#010x}", m.request_id)));
            all.push(("cm_service", m.service_id.to_string()));
            all.push(private(m.private_data.as_bytes()));
        }
        Message::SidrRep(m) => {
            all.push(("cm_request_id", format!("{:#010x}", m.request_id)));
            all.push(("cm_status", format!("{:?}", m.status)));
            all.push(("cm_qpn", m.qpn.to_string()));
            all.push(("cm_qkey", m.qkey.to_string()));
            all.push(("cm_service", m.service_id.to_string()));
            all.push(private(m.private_data.as_bytes()));
        }
        Message::Lap(m) => {
            all.push(("cm_remote_qpn", m.remote_qpn.to_string()));
            all.push(("cm_path", format!("{} > {}", m.local_gid, m.remote_gid)));
            all.push(private(m.private_data.as_bytes()));
        }
        Message::Apr(m) => {
            all.push(("cm_status", format!("{:?}", m.status)));
            all.push(private(m.private_data.as_bytes()));
        }
    }
    all
}

fn req(m: &Req) -> Fields {
    let mtu = m.path_mtu().map_or_else(|| format!("code {}", m.path_mtu_code), |mtu| mtu.bytes().to_string());
    let mut all = vec![
        ("cm_service", m.service_id.to_string()),
        ("cm_ca_guid", m.ca_guid.to_string()),
        ("cm_qpn", m.local_qpn.to_string()),
        ("cm_starting_psn", m.starting_psn.to_string()),
        ("cm_responder_resources", m.responder_resources.to_string()),
        ("cm_initiator_depth", m.initiator_depth.to_string()),
        ("cm_transport", format!("{:?}", m.transport)),
        ("cm_path_mtu", mtu),
        ("cm_retry_count", m.retry_count.to_string()),
        ("cm_rnr_retry_count", m.rnr_retry_count.to_string()),
        ("cm_max_cm_retries", m.max_cm_retries.to_string()),
        ("cm_local_timeout", format!("{:?}", m.local_response_timeout.duration())),
        ("cm_remote_timeout", format!("{:?}", m.remote_response_timeout.duration())),
        ("cm_srq", m.srq.to_string()),
        ("cm_flow_control", m.flow_control.to_string()),
        ("cm_path", format!("{} > {}", m.primary.local_gid, m.primary.remote_gid)),
        ("cm_ack_timeout_code", m.primary.ack_timeout.to_string()),
        ("cm_flow_label", format!("{:#07x}", m.primary.flow_label)),
    ];
    let data = m.private_data.as_bytes();
    let own = match IpHeader::parse(data) {
        Ok(ip) => {
            let (src, dst) = (ip.source, ip.destination);
            all.push(("cm_ip", format!("{src} port {} > {dst}", ip.source_port)));
            data.get(IpHeader::LEN..).unwrap_or_default()
        }
        Err(_) => data,
    };
    all.push(private(own));
    all
}

fn rep(m: &Rep) -> Fields {
    vec![
        ("cm_ca_guid", m.ca_guid.to_string()),
        ("cm_qpn", m.local_qpn.to_string()),
        ("cm_starting_psn", m.starting_psn.to_string()),
        ("cm_responder_resources", m.responder_resources.to_string()),
        ("cm_initiator_depth", m.initiator_depth.to_string()),
        ("cm_rnr_retry_count", m.rnr_retry_count.to_string()),
        ("cm_srq", m.srq.to_string()),
        ("cm_flow_control", m.flow_control.to_string()),
        private(m.private_data.as_bytes()),
    ]
}

fn rej(m: &Rej) -> Fields {
    vec![
        ("cm_message", format!("{:?}", m.message)),
        ("cm_reason", format!("{} ({})", m.reason.code(), m.reason.describe())),
        private(m.private_data.as_bytes()),
    ]
}

/// Private data are as long as the message leaves room for; the zeros at their end say nothing.
fn private(data: &[u8]) -> (&'static str, String) {
    let used = data.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1);
    let hex = data.iter().take(used).map(|b| format!("{b:02x}")).collect();
    ("cm_private_data", hex)
}
