//! Client and server in two processes, over a device.

use std::net::{IpAddr, SocketAddr};

use uroce::device::Device;
use uroce::device::af_packet::{AfPacket, AfPacketConfig};
use uroce::device::udp::UdpDevice;
use uroce::engine::{Engine, system_seed};
use uroce::rng::Rng;
use uroce::time::{Duration, Instant};
use uroce_benches::connections::{Client, PORT, Plan, Server};
use uroce_cm::CmConfig;

use super::report;

/// Opens `udp:ADDRESS` or `packet:INTERFACE`.
fn open(device: &str) -> Engine<Box<dyn Device>> {
    let device: Box<dyn Device> = match device.split_once(':') {
        Some(("udp", address)) => {
            let address = address.parse().expect("udp:ADDRESS");
            Box::new(UdpDevice::open(address).expect("a free port 4791 on this address"))
        }
        Some(("packet", interface)) => {
            Box::new(AfPacket::open(AfPacketConfig::shared(interface)).expect("an interface with an address"))
        }
        _ => panic!("a device is udp:ADDRESS or packet:INTERFACE"),
    };
    Engine::open(device).expect("a seed from the system")
}

fn rng() -> Rng {
    Rng::from_seed(system_seed().expect("a seed from the system"))
}

/// One turn: what arrived, what follows from it, and out. Sleeps where there was nothing, unless `spin`.
fn turn(
    engine: &mut Engine<Box<dyn Device>>,
    spin: bool,
    due: Option<Instant>,
    work: impl FnOnce(Instant, &mut uroce::endpoint::Endpoint) -> bool,
) {
    let moved = engine.poll().expect("the device works");
    let now = engine.now();
    let busy = work(now, engine.endpoint_mut());
    if busy {
        engine.poll().expect("the device works");
    } else if moved == 0 && !spin {
        let wait = due.map_or(Duration::from_millis(100), |due| due.saturating_since(now));
        engine.wait(Some(wait)).expect("the device works");
    }
}

/// Accepts for ever.
pub(super) fn serve(device: &str, spin: bool) {
    let mut engine = open(device);
    let address = SocketAddr::new(engine.endpoint().config().addresses[0], PORT);
    let mut server = Server::new(engine.endpoint_mut(), CmConfig::default(), address, false, rng());
    println!("ready");
    loop {
        let due = server.poll_timeout();
        turn(&mut engine, spin, due, |now, endpoint| server.work(now, endpoint));
    }
}

/// Connects `count` times.
pub(super) fn connect(device: &str, server: IpAddr, count: u64, at_once: u64, spin: bool) {
    let mut engine = open(device);
    let plan = Plan { server: SocketAddr::new(server, PORT), count, at_once, message: false };
    let mut client = Client::new(engine.endpoint_mut(), CmConfig::default(), plan, rng());
    let begin = engine.now();
    while !client.is_done() {
        let due = client.poll_timeout();
        turn(&mut engine, spin, due, |now, endpoint| client.work(now, endpoint));
    }
    let seconds = engine.now().saturating_since(begin).as_secs_f64();
    report(device, client.ended, client.failed, seconds, None, &client.latency);
}
