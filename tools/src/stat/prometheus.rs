//! Counters in the text that Prometheus reads.
//!
//! Owns the names of the metrics and the small server of `--listen`: one request at a time, each within its limits.

use core::net::SocketAddr;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use uroce::counters::Counters;
use uroce::inspect::Snapshot;

use crate::exit::Failure;
use crate::observe::{cm_of, snapshots};
use crate::report::Output;

/// Bytes of a request that are read at most.
const REQUEST_MAX: usize = 8 << 10;
/// How long a client may take with each step.
const PATIENCE: Duration = Duration::from_secs(1);

/// Which endpoint.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Endpoint {
    ifname: String,
    port: u8,
    pid: u32,
    comm: String,
}

impl Endpoint {
    fn of(s: &Snapshot) -> Self {
        Self { ifname: s.device.name.clone(), port: 1, pid: s.pid, comm: s.comm.clone() }
    }
}

/// QPs of an endpoint in a state.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct InState {
    ifname: String,
    port: u8,
    pid: u32,
    comm: String,
    state: String,
}

/// The text of these endpoints: every counter of a port as `uroce_NAME_total`, and how many QPs there are in each state
/// and how long the oldest packet waits.
pub(super) fn text(found: &[Snapshot]) -> Result<String, Failure> {
    let mut registry = Registry::with_prefix("uroce");
    for row in Counters::TABLE {
        let family = Family::<Endpoint, Counter>::default();
        for s in found {
            let value = s.device.counters.iter().find(|(name, _)| name == row.name).map_or(0, |(_, n)| *n);
            family.get_or_create(&Endpoint::of(s)).inc_by(value);
        }
        // The encoder ends the sentence.
        registry.register(row.name, row.trigger.trim_end_matches('.'), family);
    }
    device_losses(&mut registry, found);
    cm_messages(&mut registry, found);
    let (qps, waits) = (Family::<InState, Gauge>::default(), Family::<Endpoint, Gauge>::default());
    for s in found {
        let Endpoint { ifname, port, pid, comm } = Endpoint::of(s);
        for qp in &s.qps {
            let (ifname, comm, state) = (ifname.clone(), comm.clone(), qp.state.clone());
            qps.get_or_create(&InState { ifname, port, pid, comm, state }).inc();
        }
        let oldest = s.qps.iter().filter_map(|qp| qp.waits_ns).max().unwrap_or(0);
        waits.get_or_create(&Endpoint::of(s)).set(i64::try_from(oldest / 1_000_000).unwrap_or(i64::MAX));
    }
    registry.register("qps", "QPs by state", qps);
    registry.register("oldest_unacked_milliseconds", "How long the oldest unacknowledged packet waits", waits);
    let mut text = String::new();
    encode(&mut text, &registry).map_err(Failure::failed)?;
    Ok(text)
}

fn device_losses(registry: &mut Registry, found: &[Snapshot]) {
    let (transmit, receive) = (Family::<Endpoint, Counter>::default(), Family::<Endpoint, Counter>::default());
    for s in found {
        transmit.get_or_create(&Endpoint::of(s)).inc_by(s.lost_transmit);
        receive.get_or_create(&Endpoint::of(s)).inc_by(s.lost_receive);
    }
    registry.register("device_lost_transmit", "Packets that the device took and could not send", transmit);
    registry.register("device_lost_receive", "Packets that found no room in the device", receive);
}

fn cm_messages(registry: &mut Registry, found: &[Snapshot]) {
    let names: std::collections::BTreeSet<_> =
        found.iter().flat_map(|s| cm_of(s).counters).map(|(name, _)| name).collect();
    for name in names {
        let family = Family::<Endpoint, Counter>::default();
        for s in found {
            if let Some((_, n)) = cm_of(s).counters.iter().find(|(n, _)| *n == name) {
                family.get_or_create(&Endpoint::of(s)).inc_by(*n);
            }
        }
        registry.register(name, "Of the connection manager", family);
    }
}

/// Answers every HTTP request on `address` with the text of the moment.
pub(super) fn serve(address: SocketAddr, out: &mut Output) -> Result<(), Failure> {
    let listener = TcpListener::bind(address)
        .map_err(|e| Failure::Environment(format!("{address}: {e}; choose another address for --listen")))?;
    out.line(format_args!("http://{}/metrics", listener.local_addr()?))?;
    out.flush()?;
    loop {
        // A client that went away is no reason to end.
        if let Ok((client, _)) = listener.accept() {
            let _ = answer(client);
        }
    }
}

fn answer(mut client: TcpStream) -> Result<(), Failure> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let (mut request, mut buffer) = (Vec::new(), [0; 1024]);
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let n = client.read(&mut buffer)?;
        request.extend_from_slice(buffer.get(..n).unwrap_or_default());
        if n == 0 || request.len() > REQUEST_MAX {
            return Ok(());
        }
    }
    let (status, body) = if request.starts_with(b"GET ") {
        ("200 OK", text(&snapshots())?)
    } else {
        ("405 Method Not Allowed", String::new())
    };
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    client.write_all(head.as_bytes())?;
    Ok(client.write_all(body.as_bytes())?)
}
