//! The index of the captures: what each one holds, from `captures/index.toml`.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde::{Deserialize, Deserializer};

use crate::capture::{Directions, Frames};
use crate::error::FixtureError;

/// All captures, in the order of the index. The index is part of the binary; the captures are read when asked for.
#[must_use]
pub fn all() -> &'static [Fixture] {
    &INDEX
}

/// The capture called `name`, such as `rping_v4`.
///
/// # Errors
/// [`FixtureError::Unknown`] if there is none.
pub fn by_name(name: &str) -> Result<&'static Fixture, FixtureError> {
    all().iter().find(|fixture| fixture.name == name).ok_or_else(|| FixtureError::Unknown(name.into()))
}

/// The captures that carry `tag`, such as `cm` or `psn-wrap`. The README lists the tags.
pub fn with_tag(tag: &str) -> impl Iterator<Item = &'static Fixture> {
    all().iter().filter(move |fixture| fixture.has_tag(tag))
}

/// One capture and what is known about it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Fixture {
    /// A short name, the file name without its suffix.
    pub name: String,
    /// The pcap file, in the `captures` folder.
    pub file: String,
    /// What both programs printed, in the `captures` folder.
    pub log: String,
    /// What the capture shows, in one sentence.
    pub summary: String,
    /// Words to choose captures by.
    pub tags: Vec<String>,
    /// The command that ran on node 2, if any did.
    pub server: Option<String>,
    /// The command that ran on node 1.
    pub client: String,
    /// The exit status of the client.
    pub exit_status: i32,
    /// A command that ran before, to make a node lose or delay packets.
    pub setup: Option<Setup>,
    /// How many frames the capture holds; all are RoCEv2 packets.
    pub packets: u64,
    /// The size of the pcap file in bytes.
    pub bytes: u64,
    /// How many packets there are of each kind. A kind is an opcode (`RC_SEND_ONLY`); for an acknowledgement that is
    /// not positive, the opcode and its reason (`RC_ACK:NAK_PSN_SEQ`, `RC_ACK:RNR_NAK`); for a MAD of the CM, its
    /// attribute (`CM_REQ`).
    #[serde(rename = "opcodes")]
    pub opcode_counts: BTreeMap<String, u64>,
    /// The CM messages that carry parameters (REQ, REP, REJ, SIDR_REQ, SIDR_REP), in capture order.
    #[serde(default)]
    pub cm: Vec<CmFact>,
    /// The PSN of the first request of each flow, in capture order. MADs do not count as requests.
    #[serde(default)]
    pub first_psn: Vec<FirstPsn>,
}

impl Fixture {
    /// Whether the capture carries `tag`.
    #[must_use]
    pub fn has_tag(&self, tag: &str) -> bool {
        self.tags.iter().any(|have| have == tag)
    }

    /// Where the pcap file is.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        captures().join(&self.file)
    }

    /// Where the file is that holds what both programs printed.
    #[must_use]
    pub fn log_path(&self) -> PathBuf {
        captures().join(&self.log)
    }

    /// The frames of the capture, in capture order.
    ///
    /// # Errors
    /// When the file cannot be opened, is no whole pcap file of Ethernet frames, or holds a frame that was cut.
    pub fn frames(&self) -> Result<Frames, FixtureError> {
        Frames::read(&self.path())
    }

    /// The frames of the capture by direction, each in capture order.
    ///
    /// # Errors
    /// As [`frames`](Self::frames), and when a frame comes from neither node.
    pub fn split(&self) -> Result<Directions, FixtureError> {
        Directions::of(self.frames()?, &self.name)
    }
}

/// A command that ran on one of the nodes before the capture.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Setup {
    /// 1 or 2.
    pub node: u8,
    /// The shell command.
    pub command: String,
}

/// A CM message of a capture.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct CmFact {
    /// Which frame carries it, from 0.
    pub frame: usize,
    /// Which node sent it, 1 or 2.
    pub node: u8,
    /// The transaction id of the MAD.
    pub transaction_id: u64,
    /// What it says.
    #[serde(flatten)]
    pub message: CmMessage,
}

/// What a CM message says. "Local" is the sender. Private data are without trailing zeros.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind")]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are those of the messages in IBTA Vol 1 12.6")]
pub enum CmMessage {
    /// Connection request. `starting_psn` is the PSN that the sender expects first. The addresses, the port and the
    /// private data behind them come from the 36-byte header that the RDMA IP CM service puts into the private data.
    #[serde(rename = "REQ")]
    Req {
        local_comm_id: u32,
        service_id: u64,
        qpn: u32,
        starting_psn: u32,
        responder_resources: u8,
        initiator_depth: u8,
        retry_count: u8,
        rnr_retry_count: u8,
        path_mtu: u16,
        source: IpAddr,
        source_port: u16,
        destination: IpAddr,
        #[serde(deserialize_with = "hex")]
        private_data: Vec<u8>,
    },
    /// The answer that accepts.
    #[serde(rename = "REP")]
    Rep {
        local_comm_id: u32,
        remote_comm_id: u32,
        qpn: u32,
        starting_psn: u32,
        responder_resources: u8,
        initiator_depth: u8,
        rnr_retry_count: u8,
        srq: bool,
        #[serde(deserialize_with = "hex")]
        private_data: Vec<u8>,
    },
    /// The answer that refuses. `rejected` is the kind of message refused: 0 REQ, 1 REP, 2 none (a timeout).
    #[serde(rename = "REJ")]
    Rej {
        local_comm_id: u32,
        remote_comm_id: u32,
        rejected: u8,
        reason: u16,
        #[serde(deserialize_with = "hex")]
        private_data: Vec<u8>,
    },
    /// Request to resolve a service into a UD QP.
    #[serde(rename = "SIDR_REQ")]
    SidrReq { request_id: u32, service_id: u64 },
    /// The answer to it; `status` 0 is success.
    #[serde(rename = "SIDR_REP")]
    SidrRep { request_id: u32, status: u8, qpn: u32, service_id: u64, q_key: u32 },
}

/// Where a flow of requests starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct FirstPsn {
    /// Which node sends it, 1 or 2.
    pub node: u8,
    /// The QPN it is sent to, 24 bits.
    pub dest_qp: u32,
    /// The PSN of its first request, 24 bits.
    pub psn: u32,
}

static INDEX: LazyLock<Vec<Fixture>> = LazyLock::new(|| {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Index {
        capture: Vec<Fixture>,
    }
    // The text is a constant of this crate, so the first test that runs shows whether it can be read.
    let index: Index = toml::from_str(include_str!("../captures/index.toml")).expect("captures/index.toml is readable");
    index.capture
});

/// The folder of the captures. They are part of the source tree, not of the binary.
fn captures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("captures")
}

/// Bytes written as hexadecimal text.
fn hex<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(from)?;
    let digits: Option<Vec<u32>> = text.chars().map(|digit| digit.to_digit(16)).collect();
    let bytes = digits
        .filter(|digits| digits.len() % 2 == 0)
        .and_then(|digits| digits.chunks_exact(2).map(|pair| u8::try_from(pair[0] << 4 | pair[1]).ok()).collect());
    bytes.ok_or_else(|| serde::de::Error::custom("not an even number of hexadecimal digits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_is_named() {
        let error = by_name("rping_v5").unwrap_err();
        assert_eq!(error.to_string(), "no capture is called \"rping_v5\"");
    }

    #[test]
    fn tags_choose_captures() {
        let names: Vec<_> = with_tag("psn-wrap").map(|fixture| fixture.name.as_str()).collect();
        assert_eq!(names, ["rlab_psnwrap_1024", "loss_data"]);
    }

    #[test]
    fn cm_facts_are_read() {
        let fixture = by_name("cm_rej_user").unwrap();
        let CmMessage::Rej { reason, private_data, .. } = &fixture.cm[1].message else { panic!("{:?}", fixture.cm) };
        assert_eq!((*reason, private_data.as_slice()), (28, &b"rlab-reject"[..]));
    }
}
