//! The matcher for fault rules, against the captures.

use uroce::wire::Packet;
use uroce_cm::matcher::is_mad;
use uroce_cm::wire::MadKind;

#[test]
fn captured_messages_are_told_apart_and_data_are_none() {
    for name in ["rping_v4", "udaddy", "cm_rej_user", "rlab_basic_cm6", "ib_send_bw_ud"] {
        let fixture = uroce_fixtures::by_name(name).unwrap();
        let mut seen = [0u64; 11];
        for frame in fixture.frames().unwrap() {
            let packet = Packet::parse(frame.udp_payload().unwrap()).unwrap();
            if let Some(kind) = is_mad(&packet) {
                seen[kind.index()] += 1;
            }
        }
        for kind in MadKind::ALL {
            let expected = fixture.opcode_counts.get(&format!("CM_{}", kind.name())).copied().unwrap_or(0);
            assert_eq!(seen[kind.index()], expected, "{name} {kind}");
        }
    }
}
