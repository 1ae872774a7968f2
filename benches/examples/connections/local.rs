//! Client and server in one thread.

use std::net::{IpAddr, SocketAddr};

use uroce::burst::{IdRule, Medium, RxBurst, RxIds, TxRoom};
use uroce::device::impair::{ImpairModel, Impaired};
use uroce::device::loopback::Switch;
use uroce::endpoint::{Endpoint, EndpointConfig};
use uroce::engine::{Engine, MonotonicClock, system_seed};
use uroce::rng::Rng;
use uroce::sim::World;
use uroce::time::{Clock as _, Duration, Instant};
use uroce::types::PathMtu;
use uroce::wire::{DONT_FRAGMENT, IpFields};
use uroce_benches::connections::{Client, PORT, Plan, Server};
use uroce_cm::CmConfig;

use super::{processor_time, report};

const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));

fn plan(count: u64, at_once: u64) -> Plan {
    Plan { server: SocketAddr::new(SERVER, PORT), count, at_once, message: false }
}

fn rng() -> Rng {
    Rng::from_seed(system_seed().expect("a seed from the system"))
}

fn finish(what: &str, client: &Client, seconds: f64, processor: f64) {
    report(what, client.ended, client.failed, seconds, Some(processor), &client.latency);
}

/// No device: what one endpoint sends goes into the other.
pub(super) fn direct(count: u64, at_once: u64, loss: f64) {
    let endpoint = |ip| {
        Endpoint::new(EndpointConfig::new(vec![ip], PathMtu::B4096), system_seed().expect("a seed from the system"))
    };
    let (mut left, mut right) = (endpoint(CLIENT), endpoint(SERVER));
    let mut client = Client::new(&mut left, CmConfig::default(), plan(count, at_once), rng());
    let mut server = Server::new(&mut right, CmConfig::default(), SocketAddr::new(SERVER, PORT), false, rng());
    let (clock, mut buf, mut dice) = (MonotonicClock::new(), vec![0; 4200], rng());
    let model = ImpairModel::lossy(loss);
    let begin = processor_time();
    while !client.is_done() {
        let now = clock.now();
        hand_over(now, &mut left, &mut right, &mut buf, &model, &mut dice);
        server.work(now, &mut right);
        hand_over(now, &mut right, &mut left, &mut buf, &model, &mut dice);
        client.work(now, &mut left);
    }
    finish("direct", &client, clock.now().saturating_since(Instant::ZERO).as_secs_f64(), processor_time() - begin);
}

fn hand_over(
    now: Instant,
    from: &mut Endpoint,
    to: &mut Endpoint,
    buf: &mut [u8],
    model: &ImpairModel,
    dice: &mut Rng,
) {
    let ids = RxIds::Known(IpFields { id: 0, flags_fragment: DONT_FRAGMENT });
    for endpoint in [&mut *from, &mut *to] {
        if endpoint.poll_timeout().is_some_and(|due| due <= now) {
            endpoint.handle_timeout(now);
        }
    }
    loop {
        let room = TxRoom { buf, headroom: 0, segments_max: 1, ids: IdRule::Zero, medium: Medium::Udp };
        let Some(burst) = from.poll_transmit(now, room) else { break };
        if model.decide(dice, burst.len).deliver.is_some() {
            let bytes = &buf[..burst.len];
            to.handle_burst(now, RxBurst { flow: burst.flow, bytes, segment: burst.segment, ids, at: now });
        }
    }
}

/// Two engines over the in-process switch.
pub(super) fn switch(count: u64, at_once: u64, loss: f64) {
    let switch = Switch::new();
    let model = ImpairModel::lossy(loss);
    let engine = |ip, seed| {
        let device = Impaired::new(switch.port(&[ip]), model, ImpairModel::NONE, seed);
        Engine::open(device).expect("a seed from the system")
    };
    let (mut left, mut right) = (engine(CLIENT, 1), engine(SERVER, 2));
    let mut client = Client::new(left.endpoint_mut(), CmConfig::default(), plan(count, at_once), rng());
    let mut server =
        Server::new(right.endpoint_mut(), CmConfig::default(), SocketAddr::new(SERVER, PORT), false, rng());
    let (begin, processor) = (left.now(), processor_time());
    while !client.is_done() {
        client.work(left.now(), left.endpoint_mut());
        left.poll().expect("a switch does not break");
        right.poll().expect("a switch does not break");
        server.work(right.now(), right.endpoint_mut());
        right.poll().expect("a switch does not break");
        left.poll().expect("a switch does not break");
    }
    finish("switch", &client, left.now().saturating_since(begin).as_secs_f64(), processor_time() - processor);
}

/// Virtual time: what is computed takes none, the link 10 us each way.
pub(super) fn simulated(count: u64, at_once: u64, loss: f64) {
    let mut world = World::new(1);
    let [a, b] = [CLIENT, SERVER].map(|ip| world.add_endpoint(EndpointConfig::new(vec![ip], PathMtu::B4096)));
    world.set_path(a, b, ImpairModel::lossy(loss).with_delay(Duration::from_micros(10)));
    let (of_client, of_server) = (world.fork_rng(), world.fork_rng());
    let mut client = Client::new(world.endpoint(a), CmConfig::default(), plan(count, at_once), of_client);
    let address = SocketAddr::new(SERVER, PORT);
    let mut server = Server::new(world.endpoint(b), CmConfig::default(), address, false, of_server);
    let processor = processor_time();
    while !client.is_done() {
        let now = world.now();
        while client.work(now, world.endpoint(a)) | server.work(now, world.endpoint(b)) {}
        let next = [world.next_event(), client.poll_timeout(), server.poll_timeout()].into_iter().flatten().min();
        world.run_until(next.expect("a client that is not done waits for something").max(now));
    }
    finish(
        "simulator",
        &client,
        world.now().saturating_since(Instant::ZERO).as_secs_f64(),
        processor_time() - processor,
    );
}
