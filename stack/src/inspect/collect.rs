//! Taking a snapshot through a host's handle.

use std::collections::BTreeMap;

use super::server::Section;
use super::{OBJECTS_MAX, SCHEMA, Snapshot};
use crate::device::Device as _;
use crate::endpoint::{Endpoint, Page};
use crate::host::Handle;

/// Slots looked at in one piece: some ten microseconds.
const PIECE: u32 = 64;

impl Snapshot {
    /// Takes one. Between pieces of a few objects the engine goes on.
    #[must_use]
    pub fn take(handle: &Handle, sections: &[Section]) -> Self {
        let now = handle.now();
        let (device, lost) = handle.look(|e| (e.endpoint().report_device(now), e.device().lost()));
        let mut truncated = false;
        let cut = &mut truncated;
        let qps = pages(handle, cut, |e, from| e.report_qps(handle.now(), from, PIECE));
        let cqs = pages(handle, cut, |e, from| e.report_cqs(from, PIECE));
        let mrs = pages(handle, cut, |e, from| e.report_mrs(from, PIECE));
        let srqs = pages(handle, cut, |e, from| e.report_srqs(from, PIECE));
        let pds = pages(handle, cut, |e, from| e.report_pds(from, PIECE));
        let comm = std::fs::read_to_string("/proc/self/comm").unwrap_or_default().trim_end().to_owned();
        let sections: BTreeMap<_, _> = sections.iter().map(|s| (s.name().to_owned(), s.render())).collect();
        let (lost_transmit, lost_receive) = (lost.transmit, lost.receive);
        Self {
            schema: SCHEMA,
            pid: std::process::id(),
            comm,
            device,
            lost_transmit,
            lost_receive,
            qps,
            cqs,
            mrs,
            srqs,
            pds,
            truncated,
            sections,
        }
    }
}

/// All pages of one kind, at most [`OBJECTS_MAX`] objects.
fn pages<T>(handle: &Handle, truncated: &mut bool, one: impl Fn(&Endpoint, u32) -> Page<T>) -> Vec<T> {
    let (mut all, mut from) = (Vec::new(), 0);
    loop {
        let Page { items, next } = handle.look(|e| one(e.endpoint(), from));
        all.extend(items);
        let Some(next) = next else { break };
        if all.len() >= OBJECTS_MAX {
            *truncated = true;
            break;
        }
        from = next;
    }
    all
}
