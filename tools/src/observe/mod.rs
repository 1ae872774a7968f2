//! Letting others look at this process's endpoints, and looking at theirs.
//!
//! Owns the flag `--no-inspect`, the list of connection ids that goes with a snapshot, and the fetching of snapshots.
//! What is printed of them is the business of `stat`, `res` and `health`.

pub(crate) mod rows;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};
use uroce::host::Host;
use uroce::inspect::{self, InspectError, Inspector, Section, Snapshot};
use uroce::verbs::Verbs as _;
use uroce_cm::Cm;
use uroce_cm::wire::{MadKind, PortSpace};

use crate::node::Handle;
use crate::report::remark;

/// The section of a snapshot that holds the connection manager's ids.
const CM_SECTION: &str = "cm";
/// Ids that are listed at most.
const IDS_MAX: usize = 1024;
/// Ids that are listed anew at every look; more are listed again only after [`REFRESH`].
const IDS_FEW: usize = 16;
/// How old a long list may be.
const REFRESH: Duration = Duration::from_millis(100);

/// The flag that every command with an endpoint takes.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct InspectArgs {
    /// Do not let `uroce stat`, `res` and `health` look at this endpoint
    #[arg(long, global = true, help_heading = "Commands with an endpoint")]
    no_inspect: bool,
}

/// Set once, before any device is opened.
static HIDDEN: OnceLock<bool> = OnceLock::new();

/// The lists of connection ids of this process, by the GUID of their node.
static BOARD: Mutex<BTreeMap<u64, CmList>> = Mutex::new(BTreeMap::new());

impl InspectArgs {
    /// Makes this the choice of the process.
    pub(crate) fn install(&self) {
        // A second call would come from a second command line, and there is none.
        let _ = HIDDEN.set(self.no_inspect);
    }
}

/// Serves the endpoint of `host`, unless the user does not want it. A machine on which that cannot be done loses nothing
/// else by it.
pub(crate) fn serve(host: &Host) -> Option<Inspector> {
    if HIDDEN.get().copied().unwrap_or(false) {
        return None;
    }
    let handle = host.handle();
    let guid = handle.query_device().node_guid;
    let ids = Section::new(CM_SECTION, move || {
        let board = BOARD.lock().unwrap_or_else(PoisonError::into_inner);
        serde_json::to_value(board.get(&guid)).unwrap_or_default()
    });
    Inspector::spawn(handle, vec![ids]).ok()
}

/// An id of the connection manager, as others see it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CmIdRow {
    pub(crate) number: u32,
    pub(crate) lqpn: Option<u32>,
    pub(crate) qp_type: String,
    pub(crate) state: String,
    pub(crate) pending: bool,
    pub(crate) ps: String,
    pub(crate) src: Option<String>,
    pub(crate) dst: Option<String>,
}

/// What a connection manager shows.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct CmList {
    pub(crate) ids: Vec<CmIdRow>,
    /// All of them, listed or not.
    pub(crate) count: usize,
    /// Messages sent and received by kind, and what went wrong.
    pub(crate) counters: Vec<(String, u64)>,
}

/// A connection manager's place on the board.
pub(crate) struct CmBoard {
    guid: u64,
    listed: Option<Instant>,
    /// Even a short list is made anew only now and then.
    rarely: bool,
}

impl CmBoard {
    /// A place for the connection manager of the endpoint.
    pub(crate) fn new(v: &Handle) -> Self {
        Self { guid: v.query_device().node_guid, listed: None, rarely: false }
    }

    /// From now on lists the ids no more often than for people.
    pub(crate) const fn list_rarely(&mut self) {
        self.rarely = true;
    }

    /// Lists the ids as they are now; a long list no more often than it changes anything for people.
    pub(crate) fn publish(&mut self, cm: &Cm, v: &Handle) {
        let due = self.listed.is_none_or(|at| at.elapsed() >= REFRESH);
        if HIDDEN.get().copied().unwrap_or(false) || (self.rarely || cm.id_count() > IDS_FEW) && !due {
            return;
        }
        self.listed = Some(Instant::now());
        let ids = cm.list().take(IDS_MAX).map(|id| {
            let qp = id.qp.and_then(|qp| v.query_qp(qp).ok());
            CmIdRow {
                number: id.number,
                lqpn: qp.map(|info| info.qpn.get()),
                qp_type: if id.space == PortSpace::Udp { "UD" } else { "RC" }.to_owned(),
                state: id.state.to_owned(),
                pending: id.pending,
                ps: space_name(id.space).to_owned(),
                src: id.local.map(|a| a.to_string()),
                dst: id.peer.map(|a| a.to_string()),
            }
        });
        let list = CmList { ids: ids.collect(), count: cm.id_count(), counters: cm_counters(cm) };
        BOARD.lock().unwrap_or_else(PoisonError::into_inner).insert(self.guid, list);
    }
}

impl Drop for CmBoard {
    fn drop(&mut self) {
        BOARD.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.guid);
    }
}

/// As iproute2 names them.
const fn space_name(space: PortSpace) -> &'static str {
    match space {
        PortSpace::Tcp => "TCP",
        PortSpace::Udp => "UDP",
        PortSpace::Ib => "IB",
        PortSpace::IpOverIb => "IPoIB",
    }
}

fn cm_counters(cm: &Cm) -> Vec<(String, u64)> {
    let c = cm.agent().counters();
    let kinds = MadKind::ALL.into_iter().flat_map(|kind| {
        let name = kind.name().to_lowercase();
        [(format!("cm_{name}_sent"), c.sent(kind)), (format!("cm_{name}_received"), c.received(kind))]
    });
    let others = [
        ("cm_malformed", c.malformed),
        ("cm_duplicates", c.duplicates),
        ("cm_unmatched", c.unmatched),
        ("cm_strangers", c.strangers),
        ("cm_retransmitted", c.retransmitted),
        ("cm_overflows", c.overflows),
        ("cm_outgoing_dropped", c.outgoing_dropped),
        ("cm_timewait_evicted", c.timewait_evicted),
    ];
    kinds.chain(others.map(|(name, n)| (name.to_owned(), n))).collect()
}

/// Snapshots of all endpoints of this user, in the order of their sockets. One that cannot be read is told of.
pub(crate) fn snapshots() -> Vec<Snapshot> {
    let (all, silent) = look();
    for (path, error) in silent {
        remark(format_args!("{}: {error}", path.display()));
    }
    all
}

/// The same, and the sockets behind which no snapshot could be had.
pub(crate) fn look() -> (Vec<Snapshot>, Vec<(PathBuf, InspectError)>) {
    let (mut all, mut silent) = (Vec::new(), Vec::new());
    for path in inspect::find() {
        match inspect::read(&path) {
            Ok(snapshot) => all.push(snapshot),
            // It ended while we looked.
            Err(InspectError::Gone) => {}
            Err(error) => silent.push((path, error)),
        }
    }
    (all, silent)
}

/// What the connection manager of a snapshot shows.
pub(crate) fn cm_of(snapshot: &Snapshot) -> CmList {
    let value = snapshot.sections.get(CM_SECTION).cloned().unwrap_or_default();
    serde_json::from_value(value).unwrap_or_default()
}
