//! One program against the verbs, over a software endpoint; `src/bin/verbs_on_hw.rs` runs the same over an RDMA device.

use std::net::Ipv4Addr;

use uroce::device::loopback::Switch;
use uroce::engine::Engine;
use uroce::host::Host;
use uroce_tests::verbs_program::CHECKS;

#[test]
fn every_check_holds_over_software() {
    for (name, check) in CHECKS {
        println!("{name}");
        let host = Host::new(Engine::open(Switch::new().port(&[Ipv4Addr::new(10, 0, 0, 1).into()])).unwrap());
        check(&mut host.handle());
    }
}
