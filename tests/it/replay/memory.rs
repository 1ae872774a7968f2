//! The memory that a node's peer addresses: regions under the captured keys and addresses, and a model of what is in them.
//!
//! Owns the rule for what the node's own program wrote: the bytes that the capture shows being READ, put there right
//! before the READ, unless the peer has written them. What the peer wrote must come back out of our own execution.

use std::collections::{BTreeMap, BTreeSet};

use uroce::endpoint::Endpoint;
use uroce::raw::Region;
use uroce::types::Rkey;
use uroce::verbs::{AccessFlags, FastRegister, FlushScope, Operation, PdHandle, Remote, Verbs, WcStatus};
use uroce_fixtures::CmMessage;

use super::capture::{Capture, Node};
use super::script::Posted;

/// All that a peer may do, FLUSH for visibility among it.
pub(super) const REMOTE: AccessFlags = match AccessFlags::from_bits(0x10F) {
    Some(flags) => flags,
    None => panic!("they are known"),
};
/// How rlab's server ends its private data, behind the address and key of its buffer.
const RLAB_MARK: &[u8] = b"RLAB";
/// Bytes of that buffer.
const RLAB_BUFFER: u64 = 65_536;

struct Place {
    region: Region,
    addr: u64,
    /// What must be in it.
    model: Vec<u8>,
    /// Which bytes the peer wrote.
    peers: Vec<bool>,
}

/// The regions by key.
#[derive(Default)]
pub(super) struct Memory(BTreeMap<u32, Place>);

impl Memory {
    /// Regions that hold all that the peer addressed on any link and was not refused.
    pub(super) fn register(
        capture: &Capture,
        node: Node,
        peers: &[Vec<Posted>],
        ep: &mut Endpoint,
        pd: PdHandle,
    ) -> Self {
        let mut ranges: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        let mut cover = |rkey: u32, from: u64, to: u64| {
            let range = ranges.entry(rkey).or_insert((from, to));
            *range = (range.0.min(from), range.1.max(to));
        };
        for (addr, rkey) in capture.fixture.cm.iter().filter_map(|fact| rlab_buffer(&fact.message)) {
            if node == Node::Server {
                cover(rkey, addr, addr + RLAB_BUFFER);
            }
        }
        for one in peers.iter().flatten().filter(|p| p.status != WcStatus::RemoteAccess) {
            if let Some((remote, len)) = addressed(one).filter(|(_, len)| *len > 0) {
                // Regions begin on a page, so that what is aligned on the wire is aligned in this process.
                cover(remote.rkey.get(), remote.addr & !0xFFF, remote.addr + len);
            }
        }
        let invalidates = |p: &Posted| match p.operation {
            Operation::SendInvalidate(rkey) => Some(rkey.get()),
            _ => None,
        };
        let taken_away: BTreeSet<u32> = peers.iter().flatten().filter_map(invalidates).collect();
        let place = |(rkey, (from, to)): (u32, (u64, u64))| {
            let len = usize::try_from(to - from).expect("a region of this process");
            let region = Region::alloc(len).expect("a region");
            if taken_away.contains(&rkey) {
                let mr = ep.alloc_fast_mr(pd, &region).expect("register");
                ep.memory_mut().set_key(mr.handle, rkey).expect("the captured key is free");
                let key = Rkey::new(rkey);
                let (length, access) = (to - from, REMOTE);
                let wr = FastRegister { mr: mr.handle, key, offset: 0, length, iova: from, access };
                ep.memory_mut().fast_register(pd, &wr).expect("a registration that can be invalidated");
            } else {
                let mr = ep.register(pd, &region, REMOTE, Some(from)).expect("register");
                ep.memory_mut().set_key(mr.handle, rkey).expect("the captured key is free");
            }
            (rkey, Place { region, addr: from, model: vec![0; len], peers: vec![false; len] })
        };
        Self(ranges.into_iter().map(place).collect())
    }

    fn find(&mut self, remote: Remote, len: usize) -> Option<(&mut Place, usize)> {
        let place = self.0.get_mut(&remote.rkey.get())?;
        let at = usize::try_from(remote.addr.checked_sub(place.addr)?).ok()?;
        (at + len <= place.model.len()).then_some((place, at))
    }

    /// The peer is about to make the request `one`: what it will find was put there, and what it writes will be there.
    pub(super) fn prepare(&mut self, one: &Posted) {
        let Some((remote, len)) = addressed(one) else { return };
        let Some((place, at)) = self.find(remote, usize::try_from(len).expect("a length")) else { return };
        if !matches!(one.operation, Operation::Write(_) | Operation::WriteImm(..) | Operation::AtomicWrite(_)) {
            place.put(at, &one.answer);
        }
        let before = u64::from_ne_bytes(place.model[at..].first_chunk().copied().unwrap_or_default());
        match one.operation {
            Operation::Write(_) | Operation::WriteImm(..) | Operation::AtomicWrite(_) => {
                place.written(at, &one.payload);
            }
            Operation::FetchAdd { add, .. } => place.written(at, &before.wrapping_add(add).to_ne_bytes()),
            Operation::CompareSwap { compare, swap, .. } => {
                let after = if before == compare { swap } else { before };
                place.written(at, &after.to_ne_bytes());
            }
            _ => {}
        }
    }

    /// Every byte is what the captured exchange left there.
    pub(super) fn check(&self, what: &str) {
        for (rkey, place) in &self.0 {
            let found = place.region.to_vec();
            let wrong = found.iter().zip(&place.model).position(|(a, b)| a != b);
            assert_eq!(wrong, None, "{what}: region {rkey:#x} differs from byte {wrong:?} on");
        }
    }

    /// Bytes that the peer wrote.
    pub(super) fn written_by_peer(&self) -> usize {
        self.0.values().flat_map(|p| &p.peers).filter(|w| **w).count()
    }
}

impl Place {
    /// The node's program puts `data` there, where the peer has not written.
    fn put(&mut self, at: usize, data: &[u8]) {
        for (i, byte) in (at..).zip(data) {
            if !self.peers[i] {
                self.model[i] = *byte;
                self.region.write(i, &[*byte]).expect("within the region");
            }
        }
    }

    fn written(&mut self, at: usize, data: &[u8]) {
        self.model[at..at + data.len()].copy_from_slice(data);
        self.peers[at..at + data.len()].fill(true);
    }
}

/// What the request addresses, and how many bytes of it.
fn addressed(one: &Posted) -> Option<(Remote, u64)> {
    match one.operation {
        Operation::Write(remote) | Operation::WriteImm(remote, _) | Operation::AtomicWrite(remote) => {
            Some((remote, one.payload.len() as u64))
        }
        Operation::Flush { remote, length, scope: FlushScope::Range, .. } => Some((remote, length.into())),
        Operation::Read(remote) => Some((remote, one.wanted.into())),
        Operation::CompareSwap { remote, .. } | Operation::FetchAdd { remote, .. } => Some((remote, 8)),
        _ => None,
    }
}

fn rlab_buffer(message: &CmMessage) -> Option<(u64, u32)> {
    let CmMessage::Rep { private_data, .. } = message else { return None };
    let (rest, rkey) = private_data.strip_suffix(RLAB_MARK)?.split_last_chunk()?;
    let (_, addr) = rest.split_last_chunk()?;
    Some((u64::from_be_bytes(*addr), u32::from_be_bytes(*rkey)))
}
